"""Live rotary modules for models of other libraries."""
