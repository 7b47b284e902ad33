"""use_live_rope: the rotary modules of a transformers model, swapped for live ones that models share."""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor, nn

from common.cache_liveness import LiveBuffers, LiveCache, born_clean, get_or_build

_ROTARY_NAME = re.compile(r"Rotary|RoPE|Rope")
_ROPE_CACHE = LiveCache("srt.transformers")


@dataclass
class SwapReport:
    """What :func:`use_live_rope` did: ``swapped`` paths, and ``kept`` ones with the reason. ``undo()`` swaps back."""

    swapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    _originals: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put the model's own modules back, as they were when they were swapped."""
        for parent, name, module in self._originals:
            setattr(parent, name, module)
        self._originals.clear()

    def __str__(self) -> str:
        lines = [f"{len(self.swapped)} rotary modules swapped: {', '.join(self.swapped) or 'none'}"]
        lines += [f"kept {path}: {why}" for path, why in self.kept.items()]
        return "\n".join(lines)


def use_live_rope(model: nn.Module) -> SwapReport:
    """Swap every rotary module of ``model``, a transformers model, for a live one, in place.

    The live module is of a subclass of the swapped one's class and returns what that returns, cos and sin from ``x``
    and ``position_ids`` (and ``layer_type``), to the bit. Its frequencies are checked in O(1) at each forward, stay
    float32 under casts, and are shared by all models whose rotary module has the same class and numbers: tearing one
    model down, ``to_empty`` or a cast changes nothing for another. A model that was loaded with uninitialised
    frequencies is right afterwards.

    Returns:
        a report of what was swapped and what was kept, and why; its ``undo()`` swaps back.
    """
    report = SwapReport()
    for path, module in list(model.named_modules()):
        if not _ROTARY_NAME.search(type(module).__name__) or isinstance(module, LiveBuffers):
            continue
        why = _why_not(module)
        if why is not None:
            report.kept[path] = why
            continue
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        device = next(module.buffers()).device
        live = _shared_live_module(type(module), module.config)
        report._originals.append((parent, name, module))
        report.swapped.append(path)
        setattr(parent, name, live)
        if device != next(live.buffers()).device:
            live.to(device)
    return report


def _why_not(module: nn.Module) -> str | None:
    if not hasattr(module, "config"):
        return "it keeps no config to derive its frequencies from"
    if next(module.parameters(), None) is not None or next(module.children(), None) is not None:
        return "it holds parameters or other modules"
    buffers = dict(module.named_buffers())
    if not buffers:
        return "it holds no buffers"
    if _types(module) & {"dynamic"}:
        return "its frequencies follow the longest sequence that its model has seen, which cannot be shared"
    try:
        fresh = born_clean(type(module), module.config)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        return f"its class does not build from its config alone ({error})"
    if {n: b.shape for n, b in fresh.named_buffers()} != {n: b.shape for n, b in buffers.items()}:
        return "its class builds other buffers from its config than it holds"
    return None


def _types(module: nn.Module) -> set[str]:
    kind = getattr(module, "rope_type", "default")
    return set(kind.values()) if isinstance(kind, dict) else {kind}


def _shared_live_module(cls: type[nn.Module], config: Any) -> nn.Module:
    fresh = born_clean(cls, config)
    key = (
        cls.__module__,
        cls.__qualname__,
        tuple((name, tuple(b.reshape(-1).tolist()), b.shape) for name, b in fresh.named_buffers()),
        tuple(
            sorted((k, repr(v)) for k, v in vars(fresh).items() if "scaling" in k or "section" in k or k == "rope_type")
        ),
    )
    return get_or_build(_ROPE_CACHE, key, lambda: _build(cls, config, key))


def _build(cls: type[nn.Module], config: Any, key: Hashable) -> nn.Module:
    live = _live_class(cls).__new__(_live_class(cls))
    live.__dict__.update(vars(born_clean(cls, config)))
    live._buffers = {}
    live._shapes = {}
    live._key = key
    live._reset()
    live.build_buffers()
    return live


@cache
def _live_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``cls`` whose buffers are derived from its config by ``cls`` itself, and checked at each forward."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(b.shape) for name, b in born_clean(cls, self.config).named_buffers()}

    def derive(self) -> dict[str, Tensor]:
        return {name: b.float().contiguous() for name, b in cls(self.config).named_buffers()}

    def derivation(self) -> Hashable:
        return self._key

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for name in self._shapes:
            if self._buffers.get(name) is None or x.device.type != "meta":
                self.live(name)
        at = self._buffers[next(iter(self._shapes))].device
        live = self if at == x.device or x.device.type == "meta" else self._twin(x.device)
        if "longrope" not in _types(self):
            return cls.forward(live, x, *args, **kwargs)
        # longrope writes the frequencies of the call's length over its own: let it, in a copy
        scratch = cls.__new__(cls)
        scratch.__dict__.update(vars(live))
        scratch._buffers = {name: buffer.clone() for name, buffer in live._buffers.items()}
        return cls.forward(scratch, x, *args, **kwargs)

    def reduce(self, _: int) -> tuple:
        return _rebuilt, (cls, copy.deepcopy(self.config), self._key)

    namespace = {
        "shapes": shapes,
        "derive": derive,
        "derivation": derivation,
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
    }
    return type(f"Live{cls.__name__}", (LiveBuffers, cls), namespace)


def _rebuilt(cls: type[nn.Module], config: Any, key: Hashable) -> nn.Module:
    return _build(cls, config, key)
