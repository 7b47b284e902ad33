"""One pure function per rope type: numbers in, inverse frequencies and attention scale out; and the table from them.

The order of float32 operations is Hugging Face's (transformers, ``modeling_rope_utils.py``), so that cos and sin are
the same bits. Every factory names dtype and device: neither the default dtype nor the default device matters.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

Frequencies = tuple[Tensor, float]


# --- rope types -----------------------------------------------------------------------------------------------------
#
# Each takes (rotary_dim, base, *, max_position, parameters of the type) and returns inv_freq, float32 [rotary_dim/2]
# on the CPU, and the factor on cos and sin. Keyword arguments without a default are the type's required parameters.


def _powers(rotary_dim: int, base: float | Tensor) -> Tensor:
    """``base ** (2i / rotary_dim)``."""
    return base ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / rotary_dim)


def default(rotary_dim: int, base: float, *, max_position: int) -> Frequencies:
    """RoFormer (arXiv 2104.09864)."""
    return 1.0 / _powers(rotary_dim, base), 1.0


def linear(rotary_dim: int, base: float, *, max_position: int, factor: float | Sequence[float]) -> Frequencies:
    """Position interpolation (arXiv 2306.15595): positions divided by ``factor``. Of several, this is one piece's
    function: see :meth:`RopeSpec.pieces`."""
    return default(rotary_dim, base, max_position=max_position)[0] / factor, 1.0


def ntk(rotary_dim: int, base: float, *, max_position: int, factor: float, mixed_b: float | None = None) -> Frequencies:
    """Fixed NTK scaling of the base, or with ``mixed_b`` of each pair's frequency (kexue.fm/archives/9706)."""
    if mixed_b is None:
        return default(rotary_dim, base * factor, max_position=max_position)[0] / factor ** (2 / rotary_dim), 1.0
    pair = torch.arange(1, rotary_dim // 2 + 1, dtype=torch.float32, device="cpu")
    step = torch.tensor(factor, dtype=torch.float32, device="cpu").log() / (rotary_dim / 2) ** mixed_b
    return default(rotary_dim, base, max_position=max_position)[0] / (step * pair**mixed_b).exp(), 1.0


def dynamic(
    rotary_dim: int,
    base: float,
    *,
    max_position: int,
    factor: float | None = None,
    alpha: float | None = None,
    seq_len: int | None = None,
) -> Frequencies:
    """Dynamic NTK scaling: by ``alpha`` (Hunyuan) on the base; or by ``factor``, for sequences of ``seq_len`` tokens, as
    Hugging Face follows each sequence's length: up to ``max_position`` those of the base. Without ``seq_len``, for a
    table of ``max_position * factor`` positions, as vLLM and sglang fix it."""
    if alpha is not None:
        return dynamic_alpha(rotary_dim, base, max_position=max_position, alpha=alpha)
    power = rotary_dim / (rotary_dim - 2)
    if seq_len is None:
        stretch = factor * (max_position * factor) / max_position - (factor - 1)
    elif seq_len > max_position:  # Hugging Face's length is a tensor, so that it rounds to float32 at each step
        length = torch.tensor(seq_len, dtype=torch.float32, device="cpu")
        return 1.0 / _powers(rotary_dim, base * ((factor * length / max_position) - (factor - 1)) ** power), 1.0
    else:
        stretch = factor * max_position / max_position - (factor - 1)
    return default(rotary_dim, base * stretch**power, max_position=max_position)


def dynamic_alpha(rotary_dim: int, base: float, *, max_position: int, alpha: float) -> Frequencies:
    """``base * alpha ** (d / (d - 2))``."""
    return default(rotary_dim, base * alpha ** (rotary_dim / (rotary_dim - 2)), max_position=max_position)


def longrope(
    rotary_dim: int,
    base: float,
    *,
    max_position: int,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: int,
    factor: float | None = None,
    attention_factor: float | None = None,
    short_mscale: float | None = None,
    long_mscale: float | None = None,
) -> Frequencies:
    """LongRoPE (arXiv 2402.13753): a divisor for each pair. The long ones where the model is made for more than the
    original length (as vLLM chooses, so that a sequence's rows do not change when it crosses it), else the short."""
    original = original_max_position_embeddings
    long = max_position > original
    divisors = long_factor if long else short_factor
    scale = long_mscale if long else short_mscale
    if scale is None:
        scale = attention_factor
    if scale is None:
        factor = max_position / original if factor is None else factor
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32, device="cpu") * _powers(rotary_dim, base)), float(scale)


def proportional(
    rotary_dim: int, base: float, *, max_position: int, factor: float = 1.0, rope_proportion: float = 1.0
) -> Frequencies:
    """Gemma 4: the exponents of the whole head, but only the first ``rope_proportion`` of the pairs turn."""
    turning = int(rope_proportion * rotary_dim // 2)
    inv_freq = torch.zeros(rotary_dim // 2, dtype=torch.float32, device="cpu")
    inv_freq[:turning] = default(rotary_dim, base, max_position=max_position)[0][:turning]
    return inv_freq / factor, 1.0


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


def _yarn_kept(
    rotary_dim: int, base: float, original: int, beta_fast: float, beta_slow: float, truncate: bool
) -> Tensor:
    """How much of each pair's frequency is kept: all of the fast ones', none of the slow ones', a ramp between."""

    def pair_turning(times: float) -> float:
        return (rotary_dim * math.log(original / (times * 2 * math.pi))) / (2 * math.log(base))

    first, last = pair_turning(beta_fast), pair_turning(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)
    return 1 - torch.clamp(ramp, 0, 1)


def yarn(
    rotary_dim: int,
    base: float,
    *,
    max_position: int,
    factor: float | None = None,
    original_max_position_embeddings: int | None = None,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
    extrapolation_factor: float = 1,
    attn_factor: float = 1,
    apply_yarn_scaling: bool = True,
) -> Frequencies:
    """YaRN (arXiv 2309.00071): slow pairs interpolated, fast ones kept, a ramp between the pairs that turn
    ``beta_slow`` and ``beta_fast`` times within the original length."""
    original = max_position if original_max_position_embeddings is None else original_max_position_embeddings
    if factor is None:
        factor = max_position / original
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_magnitude(factor)
        attention_factor = attention_factor * attn_factor if apply_yarn_scaling else 1.0

    kept = _yarn_kept(rotary_dim, base, original, beta_fast, beta_slow, truncate) * extrapolation_factor
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


def axial(rotary_dim: int, base: float, *, max_position: int, layout: str = "rows first") -> Frequencies:
    """The ropes of vision towers, whose positions are an image's row and column; each axis has half of the pairs.

    ``layout``: ``rows first`` (Qwen2-VL) and ``columns first``, one axis after the other, both with the frequencies of
    half a head; ``columns in turn`` (Kimi-K2.5), the same, column and row in turn; ``alternate`` (Pixtral), rows
    first, each axis with every other frequency of the whole head.
    """
    if layout == "alternate":
        whole = default(rotary_dim, base, max_position=max_position)[0]
        return torch.cat((whole[0::2], whole[1::2])), 1.0
    half = default(rotary_dim // 2, base, max_position=max_position)[0]
    return half.repeat_interleave(2) if layout == "columns in turn" else torch.cat((half, half)), 1.0


def _axial_axes(layout: str, rotary_dim: int) -> tuple[int, ...]:
    quarter = rotary_dim // 4
    axes = {
        "rows first": (0,) * quarter + (1,) * quarter,
        "columns first": (1,) * quarter + (0,) * quarter,
        "columns in turn": (1, 0) * quarter,
        "alternate": (0,) * quarter + (1,) * quarter,
    }
    if layout not in axes:
        raise ValueError(f"layout of rope_scaling is {layout!r}; expected one of {', '.join(axes)}")
    if rotary_dim % 4:
        raise ValueError(f"rotary_dim is {rotary_dim}; an axial rope expects a multiple of 4")
    return axes[layout]


def telechat3_yarn(
    rotary_dim: int,
    base: float,
    *,
    max_position: int,
    factor: float,
    original_max_position_embeddings: int | None = None,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
    extrapolation_factor: float = 1,
    attn_factor: float = 1,
) -> Frequencies:
    """YaRN with TeleChat3's slower growing magnitude."""
    return yarn(
        rotary_dim,
        base,
        max_position=max_position,
        factor=factor,
        original_max_position_embeddings=original_max_position_embeddings,
        attention_factor=(1.0 if factor <= 1 else 0.07 * math.log(factor) + 1.0) * attn_factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
        extrapolation_factor=extrapolation_factor,
    )


def grok1(
    rotary_dim: int,
    base: float,
    *,
    max_position: int,
    factor: float,
    original_max_position_embeddings: int | None = None,
    extra_method: str = "yarn_log",
    beta_fast: float = 32,
    beta_slow: float = 1,
    extrapolation_factor: float = 1,
) -> Frequencies:
    """Grok-1's scalings: YaRN's ramp on the logarithm of the frequencies (``yarn_log``), on the frequencies (``yarn``,
    ``yarn_linear``), a scaled base (``theta_scale``) or none (``original``); cos and sin unscaled."""
    original = original_max_position_embeddings or max_position
    ramp = {"beta_fast": beta_fast, "beta_slow": beta_slow, "extrapolation_factor": extrapolation_factor}
    if extra_method == "original":
        return default(rotary_dim, base, max_position=original)
    if extra_method in ("yarn", "yarn_linear"):
        return yarn(rotary_dim, base, max_position=original, factor=factor, attention_factor=1.0, **ramp)
    if extra_method == "yarn_log":
        kept = _yarn_kept(rotary_dim, base, original, beta_fast, beta_slow, True) * extrapolation_factor
        powers = _powers(rotary_dim, base)
        slow, fast = torch.log(1.0 / (factor * powers)), torch.log(1.0 / powers)
        return torch.exp(fast * kept + slow * (1.0 - kept)), 1.0
    turns = 2 * math.pi
    scaled = base ** (math.log(original * factor / turns) / math.log(original / turns))
    return default(rotary_dim, scaled, max_position=original)


Check = Callable[[int, float, int, dict[str, Any]], None]


@dataclass(frozen=True)
class RopeType:
    """A row of the table of types.

    Args:
        frequencies: the function.
        grows: whether a table may grow beyond its full length: not where its values depend on that length.
        check: ``check(rotary_dim, base, max_position, parameters)`` raises ValueError where parameters, each right on
            its own, do not fit together.
        unused: parameters that published configs carry beside this type's and that no implementation reads.
    """

    frequencies: Callable[..., Frequencies]
    grows: bool = True
    check: Check | None = None
    unused: frozenset[str] = frozenset()

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The keyword arguments beside ``max_position``: without a default, they are required."""
        signature = inspect.signature(self.frequencies).parameters
        return {name: p for name, p in signature.items() if p.kind is p.KEYWORD_ONLY and name != "max_position"}


def _lacks(kind: str, name: str) -> ValueError:
    return ValueError(f"rope_scaling of type {kind!r} lacks the parameter {name!r}")


def _check_linear(rotary_dim: int, base: float, max_position: int, params: dict[str, Any]) -> None:
    factors = params["factor"]
    if not isinstance(factors, tuple):
        return
    if not factors or len(set(factors)) < len(factors):
        raise ValueError(f"factor of rope_scaling is {list(factors)}; expected one or more numbers, each once")
    params["factor"] = factors if len(factors) > 1 else factors[0]


def _check_dynamic(rotary_dim: int, base: float, max_position: int, params: dict[str, Any]) -> None:
    if params.get("factor") is None and params["alpha"] is None:
        raise ValueError("rope_scaling of type 'dynamic' has neither 'factor' nor 'alpha'; expected one of them")
    if rotary_dim < 4:
        raise ValueError(f"rotary_dim is {rotary_dim}; a dynamic rope expects 4 or more")
    if params["alpha"] is not None:
        params.update(factor=None, seq_len=None)
    elif params["seq_len"] is not None:
        params["seq_len"] = max(params["seq_len"], max_position)


def _check_xdrope(rotary_dim: int, base: float, max_position: int, params: dict[str, Any]) -> None:
    if rotary_dim < 4:
        raise ValueError(f"rotary_dim is {rotary_dim}; a dynamic rope expects 4 or more")


def _check_yarn(rotary_dim: int, base: float, max_position: int, params: dict[str, Any]) -> None:
    if params["factor"] is None and params["original_max_position_embeddings"] is None:
        raise _lacks("yarn", "factor")
    if base == 1:
        raise ValueError("base is 1; YaRN expects another, by whose logarithm it divides")
    if params["original_max_position_embeddings"] is None:
        params["original_max_position_embeddings"] = max_position
    if params["factor"] is None:
        params["factor"] = max_position / params["original_max_position_embeddings"]


def _check_llama3(rotary_dim: int, base: float, max_position: int, params: dict[str, Any]) -> None:
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    if high < low:
        raise ValueError(f"high_freq_factor is {high}; expected at least low_freq_factor {low}")


def _check_longrope(rotary_dim: int, base: float, max_position: int, params: dict[str, Any]) -> None:
    for name in ("short_factor", "long_factor"):
        if len(params[name]) != rotary_dim // 2:
            raise ValueError(f"{name} has {len(params[name])} numbers; expected rotary_dim/2 = {rotary_dim // 2}")
    if params["original_max_position_embeddings"] < 2:
        raise ValueError("original_max_position_embeddings is 1; longrope expects more, by whose logarithm it divides")


def _check_proportional(rotary_dim: int, base: float, max_position: int, params: dict[str, Any]) -> None:
    if not 0 <= params["rope_proportion"] <= 1:
        raise ValueError(f"rope_proportion is {params['rope_proportion']}; expected a number from 0 to 1")


def _check_grok1(rotary_dim: int, base: float, max_position: int, params: dict[str, Any]) -> None:
    methods = ("original", "yarn", "yarn_linear", "yarn_log", "theta_scale")
    if params["extra_method"] not in methods:
        raise ValueError(f"extra_method is {params['extra_method']!r}; expected one of {', '.join(methods)}")
    if base == 1:
        raise ValueError("base is 1; YaRN expects another, by whose logarithm it divides")


ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(default),
    "linear": RopeType(linear, check=_check_linear),
    "ntk": RopeType(ntk),
    "dynamic": RopeType(
        dynamic,
        grows=False,
        check=_check_dynamic,
        unused=frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),  # Hunyuan's configs
    ),
    "llama3": RopeType(llama3, check=_check_llama3),
    "yarn": RopeType(yarn, check=_check_yarn),
    "deepseek_yarn": RopeType(deepseek_yarn, check=_check_yarn),
    "telechat3-yarn": RopeType(telechat3_yarn, check=_check_yarn),
    "grok1": RopeType(grok1, check=_check_grok1),
    "longrope": RopeType(longrope, grows=False, check=_check_longrope),
    "proportional": RopeType(proportional, check=_check_proportional),
    "xdrope": RopeType(dynamic_alpha, check=_check_xdrope),
    "axial": RopeType(axial),
}
_SPELLINGS = {
    "deepseek_llama_scaling": "deepseek_yarn",
    "su": "longrope",
    "mrope": "default",
    "openpangu": "default",
    "telechat3_yarn": "telechat3-yarn",
}


# --- positions of several axes ---------------------------------------------------------------------------------------


def mrope_pair_axes(section: Sequence[int], layout: str = "chunked") -> tuple[int, ...]:
    """The axis of positions that each pair takes: ``sum(section)`` numbers.

    Args:
        section: pairs of each axis (``mrope_section``), in the order that the layout says.
        layout: ``chunked``, one axis after another (Qwen2-VL, XD-RoPE); ``interleaved``, axes in turn until one is
            used up, the first taking the rest (Qwen3-VL); ``glm``, axes in turn, one used up being passed over (GLM);
            ``ernie``, height and width in turn, time last, for ``section`` (height, width, time) (Ernie 4.5 VL);
            ``pangu``, spread evenly, no axis twice running while another is left, of three the first last (openPangu,
            vLLM's ``get_mrope_interleaved_id_list``), for (height, width) or (time, height, width).
    """
    pairs = sum(section)
    if layout == "chunked":
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    if layout == "interleaved":
        turns, axes = len(section), [0] * pairs
        for axis in range(1, turns):
            taken = range(axis, section[axis] * turns, turns)
            if taken and taken[-1] >= pairs:
                raise ValueError(f"mrope_section is {tuple(section)}; its axes cannot take turns in {pairs} pairs")
            for pair in taken:
                axes[pair] = axis
        return tuple(axes)
    if layout == "glm":
        left, axes = list(section), []
        for pair in range(pairs):
            axis = next(a % len(left) for a in range(pair, pair + len(left)) if left[a % len(left)])
            left[axis] -= 1
            axes.append(axis)
        return tuple(axes)
    if layout == "pangu":
        return _evenly_spread(section)
    if layout != "ernie":
        raise ValueError(f"mrope_layout is {layout!r}; expected chunked, interleaved, glm, ernie or pangu")
    if len(section) != 3:
        raise ValueError(f"mrope_section is {tuple(section)}; Ernie's layout expects height, width and time")
    height, width, time = section
    if height != width:
        raise ValueError(f"mrope_section is {tuple(section)}; Ernie's layout expects equal height and width")
    return (1, 2) * height + (0,) * time


def _evenly_spread(section: Sequence[int]) -> tuple[int, ...]:
    """At each pair the axis that is furthest behind its share, ties to the first, not the one just taken if possible;
    the last pair is time's."""
    share, closing = list(section), ()
    if len(share) not in (2, 3) or (len(share) == 3 and share[0] == 0):
        raise ValueError(
            f"mrope_section is {tuple(section)}; openPangu's layout expects height and width, or time, height and "
            "width with at least one pair for time"
        )
    if len(share) == 3:
        share[0] -= 1
        closing = (0,)
    taken, axes = [0] * len(share), []
    for _ in range(sum(share)):
        left = [axis for axis, count in enumerate(share) if taken[axis] < count]
        others = [axis for axis in left if not axes or axis != axes[-1]]
        axis = min(others or left, key=lambda a: taken[a] / share[a])
        taken[axis] += 1
        axes.append(axis)
    return (*axes, *closing)


# --- the numbers of one rope ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeSpec:
    """The validated, hashable numbers of a rope: what its table and its rotation depend on.

    ``pair_axes`` is the axis of positions that each pair takes (mRoPE), or None where positions have one axis.
    """

    rotary_dim: int
    base: float
    rope_type: str
    max_position: int
    params: tuple[tuple[str, Hashable], ...] = ()
    pair_axes: tuple[int, ...] | None = None

    @property
    def grows(self) -> bool:
        """Not a joint table: rows in one piece would move the pieces behind it."""
        return ROPE_TYPES[self.rope_type].grows and not self.factor_rows

    @cached_property
    def factor_rows(self) -> dict[float, int]:
        """The rows of each factor's piece in a joint table (linear scaling by several), in order: ``max_position``
        times the factor, as vLLM and sglang have it. Empty where the table is of one rope."""
        factors = dict(self.params).get("factor")
        if not isinstance(factors, tuple):
            return {}
        return {float(factor): math.ceil(self.max_position * factor) for factor in factors}

    def frequencies(self) -> Frequencies:
        """inv_freq, float32 ``[rotary_dim/2]`` on the CPU, and the factor on cos and sin.

        Raises:
            ValueError: the rope has several factors, and frequencies for each.
        """
        if self.factor_rows:
            raise ValueError(
                f"this rope has frequencies for each of its factors {list(self.factor_rows)}; see pieces()"
            )
        return self._frequencies()

    def _frequencies(self, **changes: float) -> Frequencies:
        function = ROPE_TYPES[self.rope_type].frequencies
        params = {**dict(self.params), **changes}
        return function(self.rotary_dim, self.base, max_position=self.max_position, **params)

    def pieces(self, rows: int) -> list[tuple[Tensor, float, int]]:
        """What a table is made of, piece after piece, each from position 0 on: inv_freq, the factor on cos and sin, and
        the piece's rows. A joint table is always whole; any other is one piece of ``rows``."""
        if not self.factor_rows:
            return [(*self._frequencies(), rows)]
        return [(*self._frequencies(factor=factor), count) for factor, count in self.factor_rows.items()]

    def table(self, rows: int) -> Tensor:
        """The table of :meth:`pieces`, float32 ``[rows, rotary_dim]`` on the CPU, cos half, then sin half."""
        pieces = self.pieces(rows)
        if len(pieces) == 1:
            return cos_sin_table(*pieces[0])
        table = torch.empty((sum(self.factor_rows.values()), self.rotary_dim), dtype=torch.float32, device="cpu")
        at = 0
        for inv_freq, scale, count in pieces:
            cos_sin_table(inv_freq, scale, count, out=table[at : at + count])
            at += count
        return table

    @cached_property
    def full_rows(self) -> int:
        """Positions that the rope is made for: types that stretch reach ``factor`` times the original length. Of a
        joint table, all its rows."""
        if self.factor_rows:
            return sum(self.factor_rows.values())
        params = dict(self.params)
        factor = params.get("factor")
        if params.get("seq_len") is not None:
            return max(self.max_position, params["seq_len"])
        if factor is None or self.rope_type in ("llama3", "longrope", "proportional"):
            return self.max_position
        original = params.get("original_max_position_embeddings") or self.max_position
        return max(self.max_position, math.ceil(original * factor))


def table_rows(spec: RopeSpec) -> int:
    """Rows that a table begins with: those the rope is made for, but no more than the limit; a joint one is whole,
    since each of its factors is served from the first position on."""
    limit = table_limit()
    return spec.full_rows if limit is None or spec.factor_rows else min(spec.full_rows, limit)


_limit: int | None = None
_limit_is_set = False


def set_table_limit(rows: int | None) -> None:
    """Begin new tables with at most ``rows`` rows, such as the serving length; they grow when a position asks for more,
    and no value ever depends on it. None: as many as the rope is made for. It overrides ``LIVE_ROPE_TABLE_LIMIT``.

    Raises:
        ValueError: ``rows`` is not a positive whole number.
    """
    global _limit, _limit_is_set
    _limit, _limit_is_set = _check_limit("rows", rows), True


def table_limit() -> int | None:
    """The rows that new tables begin with at most: what was set, else ``LIVE_ROPE_TABLE_LIMIT``, else None."""
    if _limit_is_set:
        return _limit
    text = os.environ.get("LIVE_ROPE_TABLE_LIMIT")
    if not text:
        return None
    return _check_limit("LIVE_ROPE_TABLE_LIMIT", int(text) if text.isdecimal() else text)


def _check_limit(name: str, rows: Any) -> int | None:
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows <= 0):
        raise ValueError(f"{name} is {rows!r}; expected a positive number of rows")
    return rows


def describe_key(key: tuple) -> str:
    """A cache key in words: ``(head size, spec, whether neox, dtype, ...)``."""
    head_size, spec, neox, dtype, *more = key
    params = ", ".join(
        f"{name}={value}"
        for name, value in spec.params
        if value is not None and (name == "factor" or not isinstance(value, tuple))
    )
    words = [
        f"{spec.rope_type} rope of {spec.rotary_dim} of {head_size}",
        f"base {spec.base:g}",
        f"{spec.max_position} positions",
        "neox" if neox else "gptj",
        str(dtype).removeprefix("torch."),
        *([params] if params else []),
        *([f"{len(set(spec.pair_axes))} axes"] if spec.pair_axes else []),
        *map(str, more),
    ]
    return ", ".join(words)


def check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    return dtype


# Keys of a rope_scaling that say something else than a parameter of its type.
_BOOKKEEPING = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "mrope_section",
        "mrope_interleaved",
        "mrope_interleaved_glm",
        "mrope_layout",
        "xdrope_section",
        "finetuned",
    }
)
_POSITIVE = frozenset(
    {
        "alpha",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "long_factor",
        "low_freq_factor",
        "original_max_position_embeddings",
        "short_factor",
    }
)


def normalize_rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float,
    rope_scaling: Mapping[str, Any] | None = None,
    partial_rotary_factor: float = 1.0,
) -> RopeSpec:
    """The validated numbers of a rope; equal meaning gives an equal spec, whatever the order and spelling.

    Args:
        rope_scaling: type and parameters as in a ``config.json``, nested lists and dicts welcome; None is the default.
        partial_rotary_factor: below 1, ``rotary_dim`` is multiplied by it.

    Raises:
        ValueError, TypeError: naming the argument, its value and what was expected; an unknown type lists the known,
            a missing or unknown parameter of a type is named.
    """
    if rope_scaling is not None and not isinstance(rope_scaling, Mapping):
        raise TypeError(f"rope_scaling is {rope_scaling!r}; expected a dict or None")
    frozen = None if rope_scaling is None else _freeze(rope_scaling)
    try:
        return _normalize(head_size, rotary_dim, max_position, base, frozen, partial_rotary_factor)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        raise TypeError(
            f"head_size={head_size!r}, rotary_dim={rotary_dim!r}, max_position={max_position!r}, base={base!r}, "
            f"rope_scaling={rope_scaling!r}: expected numbers, and numbers, strings, lists and dicts in rope_scaling"
        ) from None


def _freeze(value: Any) -> Hashable:
    """``value`` hashable, with its type where ``==`` would not tell: True from 1."""
    if isinstance(value, Mapping):
        return "dict", tuple(sorted((str(key), _freeze(part)) for key, part in value.items()))
    if isinstance(value, (list, tuple)):
        return "list", tuple(map(_freeze, value))
    return type(value).__name__, value


def _thaw(frozen: tuple) -> Any:
    kind, value = frozen
    if kind == "dict":
        return {key: _thaw(part) for key, part in value}
    return tuple(map(_thaw, value)) if kind == "list" else value


@lru_cache(maxsize=4096, typed=True)
def _normalize(
    head_size: int, rotary_dim: int, max_position: int, base: float, frozen: tuple | None, partial_rotary_factor: float
) -> RopeSpec:
    for name, value in (("head_size", head_size), ("rotary_dim", rotary_dim), ("max_position", max_position)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; expected an int")
        if value <= 0:
            raise ValueError(f"{name} is {value}; expected a positive number")
    _check_number("base", base, positive=True)
    _check_number("partial_rotary_factor", partial_rotary_factor, positive=True)
    if partial_rotary_factor > 1.0:
        raise ValueError(f"partial_rotary_factor is {partial_rotary_factor}; expected a number up to 1")
    if partial_rotary_factor < 1.0:
        rotary_dim = int(rotary_dim * partial_rotary_factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        raise ValueError(f"rotary_dim is {rotary_dim}; expected an even number from 2 to head_size {head_size}")
    scaling = {} if frozen is None else _thaw(frozen)
    name = scaling.get("rope_type", scaling.get("type", "default" if frozen is None else None))
    if name is None and set(scaling) <= _BOOKKEEPING:
        name = "default"
    kind = _SPELLINGS.get(name, name)
    layers = [key for key, value in scaling.items() if isinstance(value, dict)]
    if name is None and layers:
        raise ValueError(f"rope_scaling has a rope for each layer type; expected one of those of {', '.join(layers)}")
    if kind not in ROPE_TYPES:
        known = ", ".join(sorted((*ROPE_TYPES, *_SPELLINGS)))
        raise ValueError(f"rope_type of rope_scaling is {name!r}; known are {known}")
    older = scaling.get("type", name)
    if _SPELLINGS.get(older, older) != kind:
        raise ValueError(f"type of rope_scaling is {older!r}, but its rope_type is {name!r}; expected one of them")
    theta = scaling.get("rope_theta")
    if theta is not None and theta != base:
        raise ValueError(f"rope_theta of rope_scaling is {theta!r}, but base is {base!r}; expected the same number")
    said = scaling.get("partial_rotary_factor")
    if said is not None:
        _check_number("partial_rotary_factor of rope_scaling", said, positive=True)
    if kind == "proportional":
        rotary_dim = _proportional_width(head_size, rotary_dim, said, scaling)
    elif said is not None and int(head_size * said) != rotary_dim:
        raise ValueError(
            f"partial_rotary_factor of rope_scaling is {said}, but rotary_dim is {rotary_dim}; expected "
            f"{int(head_size * said)} for head_size {head_size}"
        )
    params = _parameters(kind, scaling, rotary_dim, base, max_position)
    return RopeSpec(rotary_dim, float(base), kind, max_position, params, _pair_axes(name, scaling, rotary_dim))


def _proportional_width(head_size: int, rotary_dim: int, said: float | None, scaling: dict[str, Any]) -> int:
    """The width of a proportional rope: the whole head's; the share of it that turns is said in one of three ways."""
    if "rope_proportion" in scaling:
        return rotary_dim
    share = rotary_dim / head_size if said is None else said
    if rotary_dim < head_size and int(head_size * share) != rotary_dim:
        if said is not None:
            raise ValueError(f"partial_rotary_factor of rope_scaling is {said}, but rotary_dim is {rotary_dim}")
        share = math.nextafter(share, 1.0)  # the quotient was rounded down
    scaling["rope_proportion"] = share
    return head_size


def _parameters(
    kind: str, scaling: dict[str, Any], rotary_dim: int, base: float, max_position: int
) -> tuple[tuple[str, Hashable], ...]:
    """The parameters of a type, checked against its function's signature, with the defaults filled in."""
    known = ROPE_TYPES[kind].parameters
    for name, value in scaling.items():
        if name not in (known.keys() | _BOOKKEEPING | ROPE_TYPES[kind].unused) and value is not None:
            expected = ", ".join(known) or "none"
            raise ValueError(f"rope_scaling of type {kind!r} has the parameter {name}={value!r}; known are {expected}")
    params = {}
    for name, parameter in known.items():
        value = scaling.get(name)
        if value is None:
            if parameter.default is parameter.empty:
                raise _lacks(kind, name)
            value = parameter.default
        elif parameter.annotation.startswith("int"):
            if type(value) is float and value.is_integer():
                value = int(value)
            if type(value) is not int:
                raise TypeError(f"{name} of rope_scaling is {value!r}; expected an int")
            _check_number(f"{name} of rope_scaling", value, positive=True)
        elif parameter.annotation.startswith("Sequence") or (
            isinstance(value, tuple) and parameter.annotation.endswith("Sequence[float]")
        ):
            if not isinstance(value, tuple):
                raise TypeError(f"{name} of rope_scaling is {value!r}; expected a list of numbers")
            for number in value:
                _check_number(f"{name} of rope_scaling", number, name in _POSITIVE)
        elif parameter.annotation in ("bool", "str"):
            if type(value).__name__ != parameter.annotation:
                raise TypeError(f"{name} of rope_scaling is {value!r}; expected a {parameter.annotation}")
        else:
            _check_number(f"{name} of rope_scaling", value, name in _POSITIVE)
        params[name] = value
    if ROPE_TYPES[kind].check is not None:
        ROPE_TYPES[kind].check(rotary_dim, base, max_position, params)
    return tuple(sorted(params.items()))


def _check_number(name: str, value: Any, positive: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; expected a number")
    finite = abs(value) <= sys.float_info.max  # an int may be too large for math.isfinite
    if not finite or (positive and value <= 0):
        raise ValueError(f"{name} is {value!r}; expected a {'positive, ' if positive else ''}finite number")


def _pair_axes(name: str, scaling: dict[str, Any], rotary_dim: int) -> tuple[int, ...] | None:
    """The axis of each pair, if the rope has positions of several axes."""
    if name == "axial":
        return _axial_axes(scaling.get("layout") or "rows first", rotary_dim)
    key = "xdrope_section" if name == "xdrope" else "mrope_section"
    section = scaling.get(key)
    if section is None:
        flags = [flag for flag in ("mrope_interleaved", "mrope_interleaved_glm", "mrope_layout") if scaling.get(flag)]
        if name in ("mrope", "xdrope", "openpangu") or flags:
            raise _lacks(name, key)
        return None
    whole = isinstance(section, tuple) and all(type(n) is int and n >= 0 for n in section)
    if not whole or 2 * sum(section) != rotary_dim:
        raise ValueError(f"{key} is {section!r}; expected whole numbers that sum to rotary_dim/2 = {rotary_dim // 2}")
    if scaling.get("mrope_interleaved_glm"):
        layout = "glm"
    else:
        layout = scaling.get("mrope_layout", "interleaved" if scaling.get("mrope_interleaved") else "chunked")
    if name == "openpangu":
        if layout not in ("interleaved", "pangu"):
            raise ValueError(
                f"mrope_interleaved of rope_scaling is {scaling.get('mrope_interleaved')!r}; "
                "type 'openpangu' expects True"
            )
        layout = "pangu"
    return mrope_pair_axes(section, layout)


def cos_sin_table(inv_freq: Tensor, scale: float, rows: int, start: int = 0, out: Tensor | None = None) -> Tensor:
    """Rows ``start`` to ``start + rows`` of the table: float32 ``[rows, 2 * len(inv_freq)]``, cos half, then sin half;
    written to ``out`` if given.

    Nothing of the table's size lives beside it, and a row has the same bits whichever rows are built with it.
    """
    half = inv_freq.numel()
    table = torch.empty((rows, 2 * half), dtype=torch.float32, device="cpu") if out is None else out
    cos, sin = table[:, :half], table[:, half:]
    positions = torch.arange(start, start + rows, dtype=torch.float32, device="cpu")
    angles = torch.mul(positions[:, None], inv_freq, out=sin)
    torch.cos(angles, out=cos)
    torch.sin(angles, out=sin)
    if scale != 1.0:
        table *= scale
    return table
