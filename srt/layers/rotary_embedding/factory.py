"""get_rope and its siblings: arguments -> validated key -> the shared live module."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from common.cache_liveness import LiveCache, get_live_entry, get_or_build
from common.rope_config import read_rope_config
from common.rope_frequencies import RopeSpec, check_dtype, describe_key, normalize_rope
from srt.layers.rotary_embedding.base import RotaryEmbedding
from srt.layers.rotary_embedding.dual_chunk import DualChunkRotaryEmbedding
from srt.layers.rotary_embedding.fourier import FourierRotaryEmbedding
from srt.layers.rotary_embedding.mrope import MRotaryEmbedding
from srt.layers.rotary_embedding.scaling import (
    DeepseekScalingRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    Gemma4RotaryEmbedding,
    Grok1ScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
    TeleChat3RoPEScaledRotaryEmbedding,
    XDRotaryEmbedding,
    YaRNScalingMRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

_ROPE_DICT = LiveCache("srt.rope", describe=describe_key)


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
    dual_chunk_attention_config: dict[str, Any] | None = None,
    *,
    cache: MutableMapping | None = None,
) -> RotaryEmbedding:
    """The rotary layer for these numbers, shared with all that ask for the same.

    Args:
        head_size: elements of a head.
        rotary_dim: how many of them are rotated, before ``partial_rotary_factor``; even.
        max_position: positions that the model is made for (``max_position_embeddings``).
        base: theta (``rope_theta``).
        is_neox_style: pairs ``(i, i + rotary_dim/2)`` as GPT-NeoX; else ``(2i, 2i+1)`` as GPT-J.
        rope_scaling: the rope type (``rope_type``, or ``type`` as older configs spell it) and its parameters.
        dtype: the model's dtype, the default dtype if None. The table is float32 whatever it is.
        partial_rotary_factor: below 1, ``rotary_dim`` is multiplied by it.
        dual_chunk_attention_config: ``chunk_size`` and ``local_size`` of dual chunk attention (Qwen2.5-1M).
        cache: a mapping of the caller's to share in, instead of the process-wide ``_ROPE_DICT``.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, its value and what was expected. Nothing
            is cached then.
    """
    numbers = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
    return _shared(*numbers, dual_chunk=dual_chunk_attention_config, cache=cache)


def get_rope_cpu(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: torch.device | str | None = None,
) -> RotaryEmbedding:
    """As :func:`get_rope`; a new table is built on ``device``, by default the CPU, whatever the default device is."""
    numbers = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
    return _shared(*numbers, device="cpu" if device is None else device)


def get_rope_wrapper(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: torch.device | str | None = None,
) -> RotaryEmbedding:
    """:func:`get_rope_cpu` where ``device`` is the CPU, else :func:`get_rope`."""
    numbers = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
    if device is not None and torch.device(device).type == "cpu":
        return get_rope_cpu(*numbers, device)
    return get_rope(*numbers)


def get_rope_from_config(
    config: Any,
    *,
    layer_type: str | None = None,
    max_position: int | None = None,
    dtype: torch.dtype | None = None,
    is_neox_style: bool | None = None,
) -> RotaryEmbedding:
    """:func:`get_rope` by a transformers config object or the dict of a ``config.json``, of any age.

    Args: as of :func:`common.rope_config.read_rope_config`, and ``dtype`` as of :func:`get_rope`.

    Raises:
        ValueError, TypeError: a field is missing, contradicts another, is out of range, or would have to be ignored.
    """
    numbers = read_rope_config(config, layer_type=layer_type, max_position=max_position, is_neox_style=is_neox_style)
    return get_rope(
        numbers.head_size,
        numbers.rotary_dim,
        numbers.max_position,
        numbers.base,
        numbers.is_neox_style,
        numbers.rope_scaling,
        dtype,
    )


# The class of a rope type, where upstream has one of its own, for engines that ask with isinstance.
_LAYERS: dict[str, type[RotaryEmbedding]] = {
    "linear": LinearScalingRotaryEmbedding,
    "ntk": NTKScalingRotaryEmbedding,
    "llama3": Llama3RotaryEmbedding,
    "yarn": YaRNScalingRotaryEmbedding,
    "deepseek_yarn": DeepseekScalingRotaryEmbedding,
    "telechat3-yarn": TeleChat3RoPEScaledRotaryEmbedding,
    "grok1": Grok1ScalingRotaryEmbedding,
    "longrope": Phi3LongRoPEScaledRotaryEmbedding,
    "proportional": Gemma4RotaryEmbedding,
}
_AXES_LAYERS: dict[str, type[MRotaryEmbedding]] = {"yarn": YaRNScalingMRotaryEmbedding, "xdrope": XDRotaryEmbedding}


def _layer(spec: RopeSpec) -> type[RotaryEmbedding]:
    if spec.pair_axes is not None:
        return _AXES_LAYERS.get(spec.rope_type, MRotaryEmbedding)
    if spec.rope_type == "dynamic":
        alpha = dict(spec.params)["alpha"] is not None
        return DynamicNTKAlphaRotaryEmbedding if alpha else DynamicNTKScalingRotaryEmbedding
    return _LAYERS.get(spec.rope_type, RotaryEmbedding)


def _shared(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    is_neox_style: bool,
    rope_scaling: dict[str, Any] | None,
    dtype: torch.dtype | None,
    partial_rotary_factor: float,
    *,
    dual_chunk: dict[str, Any] | None = None,
    cache: MutableMapping | None = None,
    device: torch.device | str | None = None,
) -> RotaryEmbedding:
    dtype = check_dtype(dtype)
    if isinstance(rope_scaling, Mapping) and rope_scaling.get("use_fope"):
        return _fourier(
            (head_size, rotary_dim, max_position, base, is_neox_style, dtype),
            rope_scaling,
            partial_rotary_factor,
            device,
        )
    spec = normalize_rope(head_size, rotary_dim, max_position, base, rope_scaling, partial_rotary_factor)
    chunks = None if dual_chunk is None else _chunks(dual_chunk, spec)
    key = (head_size, spec, is_neox_style, dtype) if chunks is None else (head_size, spec, is_neox_style, dtype, chunks)

    def build() -> RotaryEmbedding:
        numbers = (head_size, spec.rotary_dim, max_position, base, is_neox_style, dtype)
        if chunks is not None:
            return DualChunkRotaryEmbedding(*numbers, chunk_size=chunks[0], local_size=chunks[1], device=device)
        return _layer(spec).of(spec, *numbers, device=device)

    return get_or_build(_ROPE_DICT if cache is None else cache, key, build)


def _chunks(config: dict[str, Any], spec: RopeSpec) -> tuple[int, int]:
    """The numbers of dual chunk attention that its rope depends on."""
    if spec.rope_type != "default" or spec.pair_axes is not None:
        raise ValueError(
            f"dual_chunk_attention_config was given with rope_scaling of type {spec.rope_type!r}; expected none"
        )
    missing = {"chunk_size", "local_size"} - set(config)
    if missing:
        raise ValueError(f"dual_chunk_attention_config lacks {', '.join(sorted(missing))}")
    return config["chunk_size"], config["local_size"]


def _fourier(
    numbers: tuple, scaling: Mapping[str, Any], partial_rotary_factor: float, device: torch.device | str | None
) -> FourierRotaryEmbedding:
    """A layer with learned parameters: a new one each time, for it is its model's own."""
    known = ("num_kv_heads", "fope_init_factor", "fope_sep_head", "num_inv_freq")
    unknown = set(scaling) - {*known, "use_fope", "rope_type", "type", "rope_theta"}
    if unknown or partial_rotary_factor != 1.0:
        wrong = ", ".join(sorted(unknown)) or f"partial_rotary_factor={partial_rotary_factor}"
        raise ValueError(f"rope_scaling with use_fope has {wrong}; known are {', '.join(known)}")
    if "num_kv_heads" not in scaling:
        raise ValueError("rope_scaling with use_fope lacks the parameter 'num_kv_heads'")
    return FourierRotaryEmbedding(*numbers, **{name: scaling[name] for name in known if name in scaling}, device=device)
