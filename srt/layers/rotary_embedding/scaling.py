"""Upstream's class names for rope types whose forward is the base's: constructors with upstream's argument order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from srt.layers.rotary_embedding.base import RotaryEmbedding
from srt.layers.rotary_embedding.mrope import MRotaryEmbedding


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    """Position interpolation (arXiv 2306.15595), by one factor or, for adapters that were tuned to different ones, by
    several in one joint table: each factor's rows, ``max_position_embeddings`` times the factor, follow the last's.

    A token of a factor is rotated at its position plus that factor's offset, which ``forward`` takes as ``offsets``.
    As upstream, a position beyond its own factor's rows is one of the next factor's; beyond the last's it is an
    IndexError.

    Args: as of :class:`RotaryEmbedding`, and
        scaling_factors: a number, or a list of numbers, each once.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factors: float | Sequence[float],
        dtype: torch.dtype | None = None,
    ) -> None:
        scaling = {"rope_type": "linear", "factor": scaling_factors}
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, scaling)

    @property
    def scaling_factors(self) -> list[float]:
        """The factors in the order of their rows."""
        return list(self.scaling_factor_to_offset)

    @property
    def scaling_factor_to_offset(self) -> dict[float, int]:
        """The first row of each factor."""
        counts = self.spec.factor_rows
        if not counts:
            return {float(dict(self.spec.params)["factor"]): 0}
        return dict(zip(counts, accumulate(counts.values(), initial=0)))


class NTKScalingRotaryEmbedding(RotaryEmbedding):
    """Fixed and mixed NTK scaling."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype | None = None,
        mixed_b: float | None = None,
    ) -> None:
        scaling = {"rope_type": "ntk", "factor": scaling_factor, "mixed_b": mixed_b}
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, scaling)


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    """Dynamic NTK scaling, its base fixed for the full extended length."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        scaling = {"rope_type": "dynamic", "factor": scaling_factor}
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, scaling)


class DynamicNTKAlphaRotaryEmbedding(RotaryEmbedding):
    """NTK scaling of the base by ``alpha`` (Hunyuan)."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_alpha: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        scaling = {"rope_type": "dynamic", "alpha": scaling_alpha}
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, scaling)


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Llama 3.1's scaling."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype | None,
        scaling_factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        orig_max_position: int,
    ) -> None:
        scaling = {
            "rope_type": "llama3",
            "factor": scaling_factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": orig_max_position,
        }
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, scaling)


class _StretchedRotaryEmbedding(RotaryEmbedding):
    """A type that stretches an original length, which is upstream's ``max_position_embeddings``, by a factor."""

    rope_type: str

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype | None = None,
        *,
        device: torch.device | str | None = None,
        **parameters: Any,
    ) -> None:
        scaling = {
            "rope_type": self.rope_type,
            "factor": scaling_factor,
            "original_max_position_embeddings": max_position_embeddings,
            **parameters,
        }
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, scaling, device=device
        )


class YaRNScalingRotaryEmbedding(_StretchedRotaryEmbedding):
    """YaRN (arXiv 2309.00071); its further parameters as keywords."""

    rope_type = "yarn"


class DeepseekScalingRotaryEmbedding(_StretchedRotaryEmbedding):
    """YaRN as DeepSeek-V2 and V3 scale it."""

    rope_type = "deepseek_yarn"


class TeleChat3RoPEScaledRotaryEmbedding(_StretchedRotaryEmbedding):
    """YaRN as TeleChat3 scales it."""

    rope_type = "telechat3-yarn"


class Grok1ScalingRotaryEmbedding(_StretchedRotaryEmbedding):
    """Grok-1's scalings, chosen by ``extra_method``."""

    rope_type = "grok1"


class Phi3LongRoPEScaledRotaryEmbedding(RotaryEmbedding):
    """LongRoPE (Phi-3). Made for more than the original length, every row is the long table's, so that a sequence's
    rows do not change when it crosses that length while its keys are cached; else every row is the short table's."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        original_max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype | None,
        short_factor: Sequence[float],
        long_factor: Sequence[float],
        short_mscale: float | None = None,
        long_mscale: float | None = None,
    ) -> None:
        scaling = {
            "rope_type": "longrope",
            "short_factor": short_factor,
            "long_factor": long_factor,
            "original_max_position_embeddings": original_max_position_embeddings,
            "short_mscale": short_mscale,
            "long_mscale": long_mscale,
        }
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, scaling)


class Gemma4RotaryEmbedding(RotaryEmbedding):
    """Gemma 4's proportional rope: exponents of the whole head, of whose pairs only ``rotary_dim/2`` turn; as a table
    of the whole head, halves crossing it from end to end."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        scaling = {"rope_type": "proportional", "rope_proportion": rotary_dim / head_size}
        super().__init__(head_size, head_size, max_position_embeddings, base, is_neox_style, dtype, scaling)


class XDRotaryEmbedding(MRotaryEmbedding):
    """XD-RoPE (Hunyuan): four axes, each with its section of the pairs, on an alpha-scaled base."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_alpha: float,
        dtype: torch.dtype | None,
        xdrope_section: Sequence[int],
    ) -> None:
        scaling = {"rope_type": "xdrope", "alpha": scaling_alpha, "xdrope_section": xdrope_section}
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, rope_scaling=scaling
        )


class MRotaryEmbeddingInterleaved(MRotaryEmbedding):
    """openPangu's mRoPE (vLLM's class of this name): the axes of ``mrope_section``, (height, width) or (time, height,
    width), spread evenly over the pairs.

    Raises:
        ValueError: ``mrope_interleaved`` is false: that is :class:`MRotaryEmbedding`.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype | None,
        mrope_section: Sequence[int],
        mrope_interleaved: bool = True,
    ) -> None:
        scaling = {
            "rope_type": "openpangu",
            "mrope_section": mrope_section,
            "mrope_interleaved": mrope_interleaved,
        }
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, rope_scaling=scaling
        )


class YaRNScalingMRotaryEmbedding(MRotaryEmbedding):
    """mRoPE with YaRN's frequencies; its further parameters as keywords."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype | None = None,
        *,
        mrope_section: Sequence[int],
        mrope_interleaved: bool = False,
        **parameters: Any,
    ) -> None:
        scaling = {
            "rope_type": "yarn",
            "factor": scaling_factor,
            "original_max_position_embeddings": max_position_embeddings,
            "mrope_section": mrope_section,
            "mrope_interleaved": mrope_interleaved,
            **parameters,
        }
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, rope_scaling=scaling
        )


class Ernie4_5_VLRotaryEmbedding(MRotaryEmbedding):
    """Ernie 4.5 VL's mRoPE: ``mrope_section`` is (height, width, time); height and width take pairs in turn."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype | None = None,
        mrope_section: Sequence[int] = (22, 22, 20),
    ) -> None:
        scaling = {"rope_type": "default", "mrope_section": mrope_section, "mrope_layout": "ernie"}
        super().__init__(
            head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, rope_scaling=scaling
        )
