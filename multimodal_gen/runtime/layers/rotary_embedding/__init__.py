"""Rotary position embeddings of the diffusion subsystem."""

from .base import RotaryEmbedding
from .factory import _ND_ROPE_CACHE, _ROPE_DICT, _get_live_rope_cache_entry, get_rope, get_rotary_pos_embed
from .nd import NDRotaryEmbedding, OneDRotaryEmbedding, get_1d_rotary_pos_embed

__all__ = [
    "_ND_ROPE_CACHE",
    "_ROPE_DICT",
    "NDRotaryEmbedding",
    "OneDRotaryEmbedding",
    "RotaryEmbedding",
    "_get_live_rope_cache_entry",
    "get_1d_rotary_pos_embed",
    "get_rope",
    "get_rotary_pos_embed",
]
