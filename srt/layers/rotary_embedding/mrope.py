"""MRotaryEmbedding: rotary layers whose positions have several axes, and each pair takes one of them."""

from __future__ import annotations

from typing import Any

import torch

from srt.layers.rotary_embedding.base import RotaryEmbedding
from srt.layers.rotary_embedding.mrope_positions import get_next_input_positions, get_rope_index


class MRotaryEmbedding(RotaryEmbedding):
    """Multimodal RoPE (Qwen2-VL, arXiv 2409.12191): positions ``[axes, tokens]`` or ``[axes, batch, seq]``, time, height
    and width for vision tokens; ``[tokens]`` for text, whose positions are the same on every axis.

    Args: as of :class:`RotaryEmbedding`, and
        mrope_section: pairs of each axis.
        mrope_interleaved: axes in turn (Qwen3-VL) instead of one after another.
        mrope_interleaved_glm: axes in turn, a used-up one passed over (GLM).
    """

    get_rope_index = staticmethod(get_rope_index)
    get_next_input_positions = staticmethod(get_next_input_positions)

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool = True,
        dtype: torch.dtype | None = None,
        mrope_section: list[int] | None = None,
        mrope_interleaved: bool = False,
        mrope_interleaved_glm: bool = False,
        *,
        rope_scaling: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        if mrope_section is not None:
            rope_scaling = {
                "rope_type": "default",
                **(rope_scaling or {}),
                "mrope_section": mrope_section,
                "mrope_interleaved": mrope_interleaved,
                "mrope_interleaved_glm": mrope_interleaved_glm,
            }
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, rope_scaling, **keywords
        )
