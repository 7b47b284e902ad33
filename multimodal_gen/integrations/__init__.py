"""Bridges to other projects; imported only by name."""
