"""Rotary position embeddings of the LLM subsystem."""

from srt.layers.rotary_embedding.base import RotaryEmbedding
from srt.layers.rotary_embedding.dual_chunk import DualChunkRotaryEmbedding
from srt.layers.rotary_embedding.factory import (
    _ROPE_DICT,
    _get_live_rope_cache_entry,
    get_rope,
    get_rope_cpu,
    get_rope_from_config,
    get_rope_wrapper,
)
from srt.layers.rotary_embedding.fourier import FourierRotaryEmbedding
from srt.layers.rotary_embedding.mrope import MRotaryEmbedding
from srt.layers.rotary_embedding.mrope_positions import get_next_input_positions, get_rope_index
from srt.layers.rotary_embedding.scaling import (
    DeepseekScalingRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    Ernie4_5_VLRotaryEmbedding,
    Gemma4RotaryEmbedding,
    Grok1ScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    MRotaryEmbeddingInterleaved,
    NTKScalingRotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
    TeleChat3RoPEScaledRotaryEmbedding,
    XDRotaryEmbedding,
    YaRNScalingMRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from srt.layers.rotary_embedding.vision import Llama4VisionRotaryEmbedding

__all__ = [
    "_ROPE_DICT",
    "DeepseekScalingRotaryEmbedding",
    "DualChunkRotaryEmbedding",
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "Ernie4_5_VLRotaryEmbedding",
    "FourierRotaryEmbedding",
    "Gemma4RotaryEmbedding",
    "Grok1ScalingRotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "Llama4VisionRotaryEmbedding",
    "MRotaryEmbedding",
    "MRotaryEmbeddingInterleaved",
    "NTKScalingRotaryEmbedding",
    "Phi3LongRoPEScaledRotaryEmbedding",
    "RotaryEmbedding",
    "TeleChat3RoPEScaledRotaryEmbedding",
    "XDRotaryEmbedding",
    "YaRNScalingMRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "_get_live_rope_cache_entry",
    "get_next_input_positions",
    "get_rope",
    "get_rope_cpu",
    "get_rope_from_config",
    "get_rope_index",
    "get_rope_wrapper",
]
