"""use_live_rope: swap the rotary modules of a transformers model for live ones, in place and reversibly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.cache_liveness import born_clean
from common.rope_config import read_rope_config
from common.rope_frequencies import RopeSpec
from srt.layers.rotary_embedding.base import RotaryEmbedding
from srt.layers.rotary_embedding.factory import get_rope_from_config

_ROTARY_NAME = re.compile(r"Rotary|RoPE|Rope")
# Attributes of theirs that a model's code or a user may look at.
_KEPT = ("attention_scaling", "config", "layer_types", "max_seq_len_cached", "original_max_seq_len", "rope_type")
_FIRST_ROWS = 4096  # a table begins with these and grows


@dataclass
class SwapReport:
    """What :func:`use_live_rope` did: ``swapped`` paths; ``kept`` ones with the reason; ``healed``, those of the swapped
    whose buffers held other values than their config gives. ``undo()`` swaps back."""

    swapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    healed: list[str] = field(default_factory=list)
    _originals: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put the model's own modules back, as they were when they were swapped."""
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()

    def __str__(self) -> str:
        lines = [f"{len(self.swapped)} rotary modules swapped: {', '.join(self.swapped) or 'none'}"]
        lines += [f"kept {path}: {why}" for path, why in self.kept.items()]
        lines += [f"healed {path}: its buffers held other values than its config gives" for path in self.healed]
        return "\n".join(lines)


def use_live_rope(model: nn.Module, *, max_position: int | None = None) -> SwapReport:
    """Swap every rotary module of ``model`` (a transformers model, or any module that holds some) for a live one.

    The new modules keep the interface, ``(x, position_ids[, layer_type]) -> cos, sin``, and give the same bits. They
    stay right whatever becomes of the model (casts, meta, ``to_empty``, freed storages, loaders that leave buffers
    unfilled, writes behind PyTorch's back), in compiled graphs too, and their tables are shared by all models of the
    process that ask for the same numbers; none can harm another's.

    A module is swapped only if ours is known to be equal: a fresh one of its class, built from its config, is compared
    with ours position by position. Otherwise it stays, and the report says why.

    Args:
        max_position: positions that the tables begin with, where they may grow.
    """
    report = SwapReport()
    done: dict[int, LiveRotaryEmbedding] = {}
    for path, owner, name, module, config in list(_rotary_modules(model)):
        try:
            if id(module) not in done:
                done[id(module)] = _counterpart(module, config, max_position)
        except _Unequal as reason:
            report.kept[path] = str(reason)
            continue
        if done[id(module)].healed:
            report.healed.append(path)
        report._originals.append((owner, name, module))
        report.swapped.append(path)
        setattr(owner, name, done[id(module)])
    return report


class _Unequal(ValueError):
    """Why a rotary module is not known to be equal to one of ours."""


def _rotary_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module, Any]]:
    """Path, owner, name, module and config of each rotary module; the config may be that of a module around it."""
    configs: dict[str, Any] = {}
    for path, owner in model.named_modules(remove_duplicate=False):
        configs[path] = getattr(owner, "config", None) or configs.get(path.rpartition(".")[0])
        for name, module in owner._modules.items():
            kind = type(module).__name__
            ours = isinstance(module, (LiveRotaryEmbedding, RotaryEmbedding))
            if _ROTARY_NAME.search(kind) and "Attention" not in kind and not ours:
                yield (
                    f"{path}.{name}" if path else name,
                    owner,
                    name,
                    module,
                    getattr(module, "config", None) or configs[path],
                )


# --- the live module --------------------------------------------------------------------------------------------------

_LAYOUTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "halves": lambda cos, sin: (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)),
    "pairs": lambda cos, sin: (cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)),
    "once": lambda cos, sin: (cos, sin),
    "sin first": lambda cos, sin: (sin, cos),
    "halves of each axis": lambda cos, sin: (_twice_each(cos), _twice_each(sin)),
}


def _twice_each(table: Tensor) -> Tensor:
    rows, columns = table.chunk(2, dim=-1)
    return torch.cat((rows, rows, columns, columns), -1)


@dataclass(frozen=True)
class _Form:
    """How a class takes positions and gives cos and sin."""

    axis: int | None  # the dimension of position_ids along which position axes lie; None where there is one axis
    layout: str  # a key of _LAYOUTS, or "complex"
    float32: bool  # cos and sin come in float32, whatever the dtype of x


# The rope of each layer type (of None where all layers share one): for sequences up to a length, and for longer ones.
_Ropes = dict[str | None, list[tuple[RotaryEmbedding, int | None]]]


class LiveRotaryEmbedding(nn.Module):
    """A transformers model's rotary module on live, shared tables."""

    healed = False

    def __init__(self, ropes: _Ropes, form: _Form) -> None:
        super().__init__()
        self._form = form
        self._names: dict[str | None, list[str]] = {}
        self._limits: dict[str | None, int | None] = {}
        self._frequencies: dict[str, tuple[tuple[float, ...], float]] = {}
        self._longest: dict[str, int] = {}  # of dynamic ropes: the length that their frequencies are those of
        for kind, pair in ropes.items():
            self._limits[kind] = pair[0][1]
            self._names[kind] = []
            for rope, limit in pair:
                name = (kind or "rope") + ("" if len(pair) == 1 else "_long" if limit is None else "_short")
                self.add_module(name, rope)
                self._names[kind].append(name)
                self._know(name, rope.spec)
                if _is_dynamic(rope.spec):
                    self._longest[name] = rope.spec.max_position

    def _know(self, name: str, spec: RopeSpec) -> None:
        inv_freq, scale = born_clean(spec.frequencies)
        self._frequencies[name] = (tuple(inv_freq.tolist()), scale)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """As the module that it stands for: ``x`` gives dtype and device.

        Raises:
            IndexError: a position is negative, or beyond a table that may not grow.
            DeadBufferError: the table was ruined and cannot be rebuilt here.
        """
        kind = layer_type if layer_type in self._names else next(iter(self._names))
        names, limit = self._names[kind], self._limits[kind]
        name = names[-1] if limit is not None and bool(position_ids.max() >= limit) else names[0]
        rope, positions = self._modules[name], position_ids.to(x.device)
        axes = rope.spec.pair_axes
        if axes is not None:
            if self._form.axis == 0 and positions.dim() == 2:  # text: the same position on every axis
                positions = positions[None]
            positions = positions.movedim(self._form.axis, 0)
            positions = positions.expand(1 + max(axes), *positions.shape[1:])
        if self._form.layout == "complex":  # torch.polar rounds otherwise than cos and sin: no table has its bits
            angles, scale = self._angles(name, positions)
            return torch.polar(torch.ones_like(angles), angles) * scale
        if name in self._longest:
            self._follow(name, int(positions.max()) + 1)
        if name in self._longest or positions.is_floating_point():
            angles, scale = self._angles(name, positions)
            cos, sin = angles.cos() * scale, angles.sin() * scale
        else:
            cos, sin = cos_sin(rope, positions)
        if not self._form.float32:
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return _LAYOUTS[self._form.layout](cos, sin)

    def _follow(self, name: str, length: int) -> None:
        """Take the frequencies of the longest sequence so far, until one fits the original length, as transformers do."""
        spec, longest = self._modules[name].spec, self._longest[name]
        now = spec.max_position if length < spec.max_position else max(length, longest)
        if now != longest:
            self._longest[name] = now
            params = {**dict(spec.params), "seq_len": now}
            self._know(name, replace(spec, params=tuple(sorted(params.items()))))

    def _angles(self, name: str, positions: Tensor) -> tuple[Tensor, float]:
        """The angles of ``positions``, float32 ``[..., pairs]``, and the factor on cos and sin."""
        values, scale = self._frequencies[name]
        inv_freq = torch.tensor(values, dtype=torch.float32, device=positions.device)
        axes = self._modules[name].spec.pair_axes
        each = positions[..., None] if axes is None else positions[list(axes)].movedim(0, -1)
        return each.float() * inv_freq, scale


def _is_dynamic(spec: RopeSpec) -> bool:
    return spec.rope_type == "dynamic" and dict(spec.params)["alpha"] is None


def cos_sin(rope: RotaryEmbedding, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of ``positions`` (whole numbers of any shape; of several axes, ``[axes, ...]``), each float32
    ``[..., rotary_dim/2]``.

    They are read by rotating the vectors (1, 0): what guards a rotation then guards them too, also in a graph. ``rope``
    is of the neox style.
    """
    several = rope.spec.pair_axes is not None
    shape = positions.shape[1:] if several else positions.shape
    half, tokens = rope.rotary_dim // 2, shape.numel()
    unit = torch.zeros(rope.head_size, dtype=torch.float32, device=positions.device)
    unit[:half] = 1.0
    flat = positions.reshape(-1, 1, tokens) if several else positions.reshape(1, tokens)
    turned, _ = rope(flat, unit.expand(1, tokens, 1, rope.head_size))
    turned = turned.reshape(*shape, rope.head_size)
    return turned[..., :half], turned[..., half : 2 * half]


# --- finding the counterpart of a module ------------------------------------------------------------------------------


def _counterpart(module: nn.Module, config: Any, max_position: int | None) -> LiveRotaryEmbedding:
    """The live module that gives what ``module`` gives, or should give.

    Raises:
        _Unequal: it is not known to.
    """
    if next(module.parameters(), None) is not None:
        raise _Unequal("it has learned parameters")
    if set(module._buffers) - module._non_persistent_buffers_set:
        raise _Unequal("its buffers are part of the state dict")
    if config is None:
        raise _Unequal("neither it nor a module around it has a config")
    fresh = born_clean(_fresh, type(module), config)
    ropes = {kind: _ropes(config, kind, max_position) for kind in _layer_types(fresh)}
    form = born_clean(_find_form, fresh, ropes)
    if form is None:
        raise _Unequal("its cos and sin are not those of its config's rope")
    live = LiveRotaryEmbedding(ropes, form)
    live.healed = born_clean(_other_values, module, fresh)
    for name in _KEPT:
        if hasattr(module, name):
            setattr(live, name, getattr(module, name))
    return live.train(module.training)


def _fresh(kind: type[nn.Module], config: Any) -> nn.Module:
    try:
        with torch.device("cpu"):
            return kind(config)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise _Unequal(f"a fresh one cannot be built from its config ({type(error).__name__}: {error})") from error


def _other_values(module: nn.Module, fresh: nn.Module) -> bool:
    """Whether its buffers hold something else than its config gives, in whatever dtype they now are; not on meta."""
    expected = dict(fresh.named_buffers())
    return any(
        not buffer.is_meta
        and (name not in expected or not torch.equal(buffer.detach().cpu(), expected[name].to(buffer.dtype)))
        for name, buffer in module.named_buffers()
    )


def _layer_types(fresh: nn.Module) -> tuple[str | None, ...]:
    names = [name for name, _ in fresh.named_buffers()]
    kinds = tuple(n.removesuffix("_inv_freq") for n in names if n.endswith("_inv_freq") and "original" not in n)
    return kinds or (None,)


def _ropes(config: Any, kind: str | None, max_position: int | None) -> list[tuple[RotaryEmbedding, int | None]]:
    """The ropes of a layer type; the style is one for all, since only cos and sin are taken."""

    def rope(length: int | None) -> RotaryEmbedding:
        return get_rope_from_config(
            config, layer_type=kind, max_position=length, dtype=torch.float32, is_neox_style=True
        )

    try:
        longest = read_rope_config(config, layer_type=kind, is_neox_style=True).max_position
    except ValueError:  # it may only lack its length, which rope() then has
        longest = _FIRST_ROWS
    try:
        first = rope(min(max_position or _FIRST_ROWS, longest))
        if first.spec.factor_rows:
            raise _Unequal("its config has several linear factors, which transformers does not know")
        if first.spec.rope_type == "longrope":
            original = dict(first.spec.params)["original_max_position_embeddings"]
            return [(rope(original), original), (rope(None), None)]
        return [(first, None)]
    except (TypeError, ValueError) as error:
        raise _Unequal(f"its config is not understood ({error})") from error


def _find_form(fresh: nn.Module, ropes: _Ropes) -> _Form | None:
    """The form in which a live module gives the same bits as ``fresh``, if there is one."""
    several = {pair[0][0].spec.pair_axes is not None for pair in ropes.values()}
    if several == {False} and getattr(fresh, "mrope_section", None):
        return None
    for axis in (0, -1) if several == {True} else (None,):
        for layout in (*_LAYOUTS, "complex"):
            for float32 in (False, True):
                form = _Form(axis, layout, float32)
                live = LiveRotaryEmbedding(ropes, form)
                if all(_same_rope(fresh, live, kind, pair, axis) for kind, pair in ropes.items()):
                    return form
    return None


def _same_rope(
    fresh: nn.Module,
    live: LiveRotaryEmbedding,
    kind: str | None,
    pair: list[tuple[RotaryEmbedding, int | None]],
    axis: int | None,
) -> bool:
    """Whether both give the same bits for the rope of a layer type, on either side of its limit."""
    x = torch.zeros((1, 1, 8), dtype=torch.bfloat16, device="cpu")
    extra = () if kind is None else (kind,)
    lengths = [limit or rope.spec.full_rows for rope, limit in pair]
    if _is_dynamic(pair[0][0].spec):  # within, beyond, beyond and shorter, within again
        lengths = [lengths[0], 3 * lengths[0], 2 * lengths[0], lengths[0] - 1]
    for length in lengths:
        for positions in _probes(length, pair[0][0].spec.pair_axes, axis):
            try:
                theirs = fresh(x, positions, *extra)
            except (TypeError, ValueError, IndexError, RuntimeError, AttributeError):
                continue  # not how it takes positions
            if _equal(theirs, live(x, positions, *extra)):
                break
        else:
            return False
    return True


def _probes(length: int, axes: tuple[int, ...] | None, axis: int | None) -> list[Tensor]:
    """Positions to compare at, in the shapes in which a class may take them: the first ones and some up to ``length``,
    different on each axis."""
    far = torch.linspace(0, length - 1, 16, dtype=torch.float64, device="cpu").long()
    line = torch.cat((torch.arange(64, device="cpu").clamp(max=length - 1), far))
    if axes is None:
        return [torch.stack((line, line.flip(0)))]
    rows = torch.stack([line.roll(7 * a) for a in range(1 + max(axes))])
    return [rows[:, None]] if axis == 0 else [rows.T.contiguous(), rows.T.contiguous()[None]]


def _equal(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, tuple) != isinstance(ours, tuple):
        return False
    pairs = zip(*(value if isinstance(value, tuple) else (value,) for value in (theirs, ours)))
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
