"""get_rope and get_rotary_pos_embed of the diffusion subsystem, with caches of their own."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.cache_liveness import LiveCache, get_live_entry, get_or_build
from common.rope_frequencies import check_dtype, describe_key, normalize_rope

from .base import RotaryEmbedding
from .nd import NDRotaryEmbedding

_ROPE_DICT = LiveCache("multimodal_gen.rope", describe=describe_key)
_ND_ROPE_CACHE = LiveCache("multimodal_gen.nd_rope")  # modules that hold numbers only; their grids are in grid_cache.py
_ND_ROPE_LIMIT = 16


def _get_live_rope_cache_entry(key: tuple, cache: MutableMapping | None = None) -> nn.Module | None:
    """The cached module for ``key`` if it is alive and right; a dead one is dropped with one warning."""
    return get_live_entry(_ROPE_DICT if cache is None else cache, key)


def get_rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
) -> RotaryEmbedding:
    """The rotary layer for these numbers, shared with all that ask for the same; see the LLM subsystem's ``get_rope``.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, its value and what was expected. Nothing
            is cached then.
    """
    dtype = check_dtype(dtype)
    spec = normalize_rope(head_size, rotary_dim, max_position, base, rope_scaling, partial_rotary_factor)
    key = (head_size, spec, is_neox_style, dtype)

    def build() -> RotaryEmbedding:
        return RotaryEmbedding(head_size, spec.rotary_dim, max_position, base, is_neox_style, dtype, spec=spec)

    return get_or_build(_ROPE_DICT, key, build)


def get_rotary_pos_embed(
    rope_sizes: int | Sequence[int],
    hidden_size: int,
    heads_num: int,
    rope_dim_list: Sequence[int] | None,
    rope_theta: float,
    theta_rescale_factor: float | Sequence[float] = 1.0,
    interpolation_factor: float | Sequence[float] = 1.0,
    shard_dim: int = 0,
    dtype: torch.dtype = torch.float32,
    start_frame: int = 0,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of a grid of frames x height x width, float32 ``[tokens, head_dim/2]`` each, in row-major order.

    Args:
        rope_sizes: positions on each of the three axes, or one number for all.
        hidden_size, heads_num: their quotient is the head dimension.
        rope_dim_list: columns of the head that each axis rotates; thirds of the head if None.
        rope_theta: base of the frequencies.
        theta_rescale_factor: NTK factor, and ``interpolation_factor``: of the positions; one number, or one an axis.
        shard_dim: the axis that is cut over the sequence-parallel group, if one is set.
        dtype: the precision of the computation, float32 or float64.
        start_frame: first position on the first axis.
        device: where the result lies; the CPU by default.

    The tensors are the caller's own: overwriting, freeing or moving them harms no other caller.

    Raises:
        ValueError, TypeError: naming the argument, its value and what was expected.
    """
    if heads_num <= 0 or hidden_size % heads_num:
        raise ValueError(f"hidden_size must be a multiple of heads_num, got {hidden_size} and {heads_num}")
    head_dim = hidden_size // heads_num
    dims = (head_dim // 3,) * 3 if rope_dim_list is None else tuple(rope_dim_list)
    if sum(dims) != head_dim:
        raise ValueError(f"rope_dim_list must sum to the head dimension {head_dim}, got {dims}")
    key = (dims, rope_theta, _numbers(theta_rescale_factor), _numbers(interpolation_factor), dtype)

    def build() -> NDRotaryEmbedding:
        while len(_ND_ROPE_CACHE) >= _ND_ROPE_LIMIT:
            _ND_ROPE_CACHE.pop(next(iter(_ND_ROPE_CACHE)), None)
        return NDRotaryEmbedding(dims, rope_theta, theta_rescale_factor, interpolation_factor, dtype=dtype)

    module = get_or_build(_ND_ROPE_CACHE, key, build)
    return module.forward_from_grid(rope_sizes, shard_dim, start_frame, device)


def _numbers(value: float | Sequence[float]) -> float | tuple[float, ...]:
    return value if isinstance(value, (int, float)) else tuple(value)
