"""One pure function per rope type: numbers in, inverse frequencies and attention scale out; and the table from them.

The order of float32 operations is Hugging Face's (transformers, ``modeling_rope_utils.py``), so that cos and sin are
the same bits. Every factory names dtype and device: neither the default dtype nor the default device matters.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Frequencies = tuple[Tensor, float]


# --- rope types -----------------------------------------------------------------------------------------------------
#
# Each takes (rotary_dim, base, *, max_position, parameters of the type) and returns inv_freq, float32 [rotary_dim/2]
# on the CPU, and the factor on cos and sin. Keyword arguments without a default are the type's required parameters.


def _powers(rotary_dim: int, base: float) -> Tensor:
    """``base ** (2i / rotary_dim)``."""
    return base ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / rotary_dim)


def default(rotary_dim: int, base: float, *, max_position: int) -> Frequencies:
    """RoFormer (arXiv 2104.09864)."""
    return 1.0 / _powers(rotary_dim, base), 1.0


def linear(rotary_dim: int, base: float, *, max_position: int, factor: float) -> Frequencies:
    """Position interpolation (arXiv 2306.15595): positions divided by ``factor``."""
    return default(rotary_dim, base, max_position=max_position)[0] / factor, 1.0


def dynamic(
    rotary_dim: int, base: float, *, max_position: int, factor: float | None = None, alpha: float | None = None
) -> Frequencies:
    """Dynamic NTK scaling: by ``alpha`` (Hunyuan) on the base, or by ``factor`` for sequences of the full extended
    length ``max_position * factor`` (as vLLM and sglang build their table)."""
    if alpha is not None:
        base = base * alpha ** (rotary_dim / (rotary_dim - 2))
    else:
        stretched = max_position * factor
        base = base * ((factor * stretched / max_position) - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / _powers(rotary_dim, base), 1.0


def llama3(
    rotary_dim: int,
    base: float,
    *,
    max_position: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Frequencies:
    """Llama 3.1: slow pairs divided by ``factor``, fast ones kept, those between interpolated."""
    inv_freq = 1.0 / _powers(rotary_dim, base)
    original = original_max_position_embeddings
    slowest_kept, fastest_scaled = original / high_freq_factor, original / low_freq_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > fastest_scaled, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where((wavelength >= slowest_kept) & (wavelength <= fastest_scaled), between, scaled), 1.0


def _yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn(
    rotary_dim: int,
    base: float,
    *,
    max_position: int,
    factor: float,
    original_max_position_embeddings: int | None = None,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
    extrapolation_factor: float = 1,
    attn_factor: float = 1,
) -> Frequencies:
    """YaRN (arXiv 2309.00071): slow pairs interpolated, fast ones kept, a ramp between the pairs that turn
    ``beta_slow`` and ``beta_fast`` times within the original length."""
    original = max_position if original_max_position_embeddings is None else original_max_position_embeddings
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_magnitude(factor)
        attention_factor *= attn_factor

    def pair_turning(times: float) -> float:
        return (rotary_dim * math.log(original / (times * 2 * math.pi))) / (2 * math.log(base))

    first, last = pair_turning(beta_fast), pair_turning(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)
    kept = (1 - torch.clamp(ramp, 0, 1)) * extrapolation_factor
    powers = _powers(rotary_dim, base)
    return (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept, float(attention_factor)


def deepseek_yarn(
    rotary_dim: int,
    base: float,
    *,
    max_position: int,
    factor: float,
    original_max_position_embeddings: int | None = None,
    mscale: float = 1,
    mscale_all_dim: float = 0,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
    extrapolation_factor: float = 1,
    attn_factor: float = 1,
) -> Frequencies:
    """YaRN as DeepSeek-V2 and V3 scale it: by the ratio of two magnitudes, whose all-dim part is 1 by default."""
    ratio = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all_dim)
    return yarn(
        rotary_dim,
        base,
        max_position=max_position,
        factor=factor,
        original_max_position_embeddings=original_max_position_embeddings,
        attention_factor=ratio * attn_factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
        extrapolation_factor=extrapolation_factor,
    )


@dataclass(frozen=True)
class RopeType:
    """A row of the table of types: its frequencies, and whether a table may grow beyond its full length (not where
    its values depend on that length)."""

    frequencies: Callable[..., Frequencies]
    grows: bool = True


ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(default),
    "linear": RopeType(linear),
    "dynamic": RopeType(dynamic, grows=False),
    "llama3": RopeType(llama3),
    "yarn": RopeType(yarn),
    "deepseek_yarn": RopeType(deepseek_yarn),
}


# --- the numbers of one rope ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeSpec:
    """The validated, hashable numbers that determine a table."""

    rotary_dim: int
    base: float
    rope_type: str
    max_position: int
    params: tuple[tuple[str, Hashable], ...] = ()

    @property
    def grows(self) -> bool:
        return ROPE_TYPES[self.rope_type].grows

    def frequencies(self) -> Frequencies:
        """inv_freq, float32 ``[rotary_dim/2]`` on the CPU, and the factor on cos and sin."""
        function = ROPE_TYPES[self.rope_type].frequencies
        return function(self.rotary_dim, self.base, max_position=self.max_position, **dict(self.params))

    @cached_property
    def full_rows(self) -> int:
        """Positions that the type is made for: extended types reach ``factor`` times the original length."""
        params = dict(self.params)
        factor = params.get("factor")
        if self.rope_type in ("default", "llama3") or factor is None:
            return self.max_position
        original = params.get("original_max_position_embeddings") or self.max_position
        return max(self.max_position, math.ceil(original * factor))


def full_rows(spec: RopeSpec) -> int:
    return spec.full_rows


def table_rows(spec: RopeSpec) -> int:
    limit = table_limit()
    return spec.full_rows if limit is None else min(spec.full_rows, limit)


def table_limit() -> int | None:
    text = os.environ.get("LIVE_ROPE_TABLE_LIMIT")
    return int(text) if text else None


def check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    return dtype


def normalize_rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    rope_scaling: Mapping[str, Any] | None = None,
    partial_rotary_factor: float = 1.0,
) -> RopeSpec:
    for name, value in (("head_size", head_size), ("rotary_dim", rotary_dim), ("max_position", max_position)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
    for name, value in (("base", base), ("partial_rotary_factor", partial_rotary_factor)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if partial_rotary_factor < 1.0:
        rotary_dim = int(rotary_dim * partial_rotary_factor)
    if rotary_dim % 2 or rotary_dim <= 0 or rotary_dim > head_size:
        raise ValueError(f"rotary_dim must be even and in 2..head_size={head_size}, got {rotary_dim}")
    if rope_scaling is None:
        rope_scaling = {}
    if not isinstance(rope_scaling, Mapping):
        raise TypeError(f"rope_scaling must be a dict or None, got {rope_scaling!r}")
    rope_type = rope_scaling.get("rope_type", rope_scaling.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type {rope_type!r} is unknown; known are {', '.join(sorted(ROPE_TYPES))}")
    signature = inspect.signature(ROPE_TYPES[rope_type].frequencies).parameters
    params = {}
    for name, parameter in list(signature.items())[3:]:
        value = rope_scaling.get(name, parameter.default)
        if value is parameter.empty:
            raise ValueError(f"rope_scaling of type {rope_type!r} lacks the parameter {name}")
        if value is not None and not isinstance(value, (int, float)):
            raise TypeError(f"rope_scaling parameter {name} must be a number, got {value!r}")
        params[name] = value
    return RopeSpec(rotary_dim, float(base), rope_type, max_position, tuple(sorted(params.items())))


def cos_sin_table(inv_freq: Tensor, scale: float, rows: int, start: int = 0) -> Tensor:
    half = inv_freq.numel()
    table = torch.empty((rows, 2 * half), dtype=torch.float32, device="cpu")
    step = max(1, (1 << 18) // half)
    for at in range(0, rows, step):
        block = table[at : at + step]
        positions = torch.arange(start + at, start + at + len(block), dtype=torch.float32, device="cpu")
        freqs = torch.outer(positions, inv_freq)
        block[:, :half] = freqs.cos()
        block[:, half:] = freqs.sin()
        if scale != 1.0:
            block *= scale
    return table
