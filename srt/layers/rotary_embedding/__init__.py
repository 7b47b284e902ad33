"""Rotary position embeddings of the LLM subsystem."""

from srt.layers.rotary_embedding.base import RotaryEmbedding
from srt.layers.rotary_embedding.factory import (
    _ROPE_DICT,
    _get_live_rope_cache_entry,
    get_rope,
    get_rope_cpu,
    get_rope_from_config,
    get_rope_wrapper,
)
from srt.layers.rotary_embedding.mrope import MRotaryEmbedding

__all__ = [
    "_ROPE_DICT",
    "MRotaryEmbedding",
    "RotaryEmbedding",
    "_get_live_rope_cache_entry",
    "get_rope",
    "get_rope_cpu",
    "get_rope_from_config",
    "get_rope_wrapper",
]
