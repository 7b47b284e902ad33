"""use_live_rope: swap the position embeddings of a diffusers model for live ones, in place and reversibly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from multimodal_gen.runtime.layers.rotary_embedding import pos_embed

# Constructor's arguments that diffusers' modules do not keep, read off what they do keep.
_FROM_STATE: dict[str, dict[str, Callable[[Any], Any]]] = {
    "AnimaRotaryEmbedding": {"head_dim": lambda m: 2 * m.inv_freq.shape[0]},
    "Cosmos3VLTextRotaryEmbedding": {"head_dim": lambda m: 2 * m.inv_freq.shape[0]},
    "CosmosRotaryPosEmbed": {"hidden_size": lambda m: m.dim_t + m.dim_h + m.dim_w},
    "HeliosRotaryPosEmbed": {"rope_dim": lambda m: (m.DT, m.DY, m.DX)},
    "MiniMaxH3VideoRotaryPosEmbed": {"dim": lambda m: 6 * m.inv_freq.shape[0]},
    "OmniGenSuScaledRotaryEmbedding": {
        "rope_scaling": lambda m: {"short_factor": m.short_factor, "long_factor": m.long_factor}
    },
    "SAMERotaryEmbedding": {"dim": lambda m: 2 * m.inv_freq.shape[0]},
    "StableAudio3RotaryEmbedding": {"dim": lambda m: 2 * m.inv_freq.shape[0]},
}
_RENAMED = {"RotaryEmbedding": "SAMERotaryEmbedding"}
_BASES = ("theta", "base", "rope_theta", "max_period")


@dataclass
class SwapReport:
    """What :func:`use_live_rope` did: ``swapped`` paths, and ``kept`` ones with the reason. ``undo()`` swaps back."""

    swapped: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    _originals: list[tuple[Any, str, Any]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put the model's own modules back, as they were when they were swapped."""
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()

    def __str__(self) -> str:
        lines = [f"{len(self.swapped)} position embeddings swapped: {', '.join(self.swapped) or 'none'}"]
        lines += [f"kept {path}: {why}" for path, why in self.kept.items()]
        return "\n".join(lines)


def use_live_rope(transformer: nn.Module) -> SwapReport:
    """Swap every position embedding of ``transformer`` (a transformer, controlnet, autoencoder or any module that holds
    some) for ours of the same name.

    The outputs stay equal to the bit. From then on the tables are float32 or wider whatever the model is cast to, lie
    where the latents do, survive `to_empty`, meta and offload, and are shared by all models of the process that ask
    for the same grid; none of them can harm another's.

    A module is swapped only if ours is known to be equal: what its constructor was given is read from its attributes
    and from the model's config, and the tables made from that are compared with those that it holds, unless they are
    on meta. Otherwise it stays, and the report says why.
    """
    report = SwapReport()
    done: dict[int, Any] = {}
    config = _config(transformer)
    for path, owner, name, module in list(_position_embeddings(transformer)):
        kind = type(module).__name__
        ours = getattr(pos_embed, _RENAMED.get(kind, kind), None)
        if ours is None:
            report.kept[path] = f"{kind} has no live counterpart"
            continue
        if id(module) not in done:
            try:
                done[id(module)] = _counterpart(module, ours, config)
            except _Unknown as reason:
                report.kept[path] = str(reason)
                continue
        report._originals.append((owner, name, module))
        setattr(owner, name, done[id(module)])
        report.swapped.append(path)
    return report


class _Unknown(ValueError):
    """Why it is not known what a module was constructed with."""


def _position_embeddings(model: nn.Module) -> Iterator[tuple[str, Any, str, Any]]:
    """Path, owner, name and value of each of diffusers' position embeddings, modules or not."""
    for path, owner in model.named_modules(remove_duplicate=False):
        plain = {name: value for name, value in vars(owner).items() if not name.startswith("_")}
        for name, value in [*owner._modules.items(), *plain.items()]:
            kind = type(value)
            if kind.__module__.startswith("diffusers.") and _is_position_embedding(kind):
                yield (f"{path}.{name}" if path else name), owner, name, value


def _is_position_embedding(kind: type) -> bool:
    if kind.__name__ == "RotaryEmbedding":
        return kind.__module__.endswith("autoencoder_same")
    words = ("Rotary", "Rope", "RoPE", "EmbedND")
    return any(word in kind.__name__ for word in words) or kind.__name__.endswith("PosEmbed")


def _config(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", {})
    return dict(config) if isinstance(config, Mapping) else {}


def _counterpart(module: Any, ours: type, config: dict[str, Any]) -> Any:
    """Our module for theirs, its attributes taken over.

    Raises:
        _Unknown: no combination of what is known reproduces the tables that ``module`` holds.
    """
    kept = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not callable(value) and not _tensors(value)
    }
    known, unknown = _arguments(module, ours, kept)
    tables = _tensors({**vars(module), **getattr(module, "_buffers", {})})
    tables = {name: table for name, table in tables.items() if not table.is_meta}
    for missing in _guesses(ours, unknown, config):
        try:
            arguments = {**known, **missing}
            if tables and not _reproduces(type(module), arguments, tables):
                continue
            live = ours(**arguments)
        except (TypeError, ValueError, RuntimeError):
            continue
        for name, value in kept.items():
            setattr(live, name, value)
        return live.train(module.training) if isinstance(live, nn.Module) else live
    named = ", ".join(unknown) or "its arguments"
    raise _Unknown(f"its tables are not those of any known {named}")


def _arguments(module: Any, ours: type, kept: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The constructor's arguments that ``module`` tells, and the names of those that it does not."""
    known, unknown = {}, []
    from_state = _FROM_STATE.get(ours.__name__, {})
    for name in inspect.signature(ours.__init__).parameters:
        if name == "self":
            continue
        if name in from_state:
            known[name] = from_state[name](module)
        elif name in kept:
            known[name] = kept[name]
        else:
            unknown.append(name)
    return known, unknown


def _guesses(ours: type, unknown: list[str], config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Values for the unknown arguments, the likeliest first: the config's by that name, the default, and for a base any
    number of the config."""
    parameters = inspect.signature(ours.__init__).parameters
    likely = {name: config[name] for name in unknown if config.get(name) is not None}
    rest = [name for name in unknown if name not in likely]
    if all(parameters[name].default is not inspect.Parameter.empty for name in rest):
        yield likely
        yield {}
    for base in (name for name in unknown if name in _BASES):
        numbers = {float(v) for v in config.values() if isinstance(v, (int, float)) and v > 1}
        for number in sorted(numbers):
            yield {**likely, base: number}
    if "fhw_dim" in unknown:
        for value in config.values():
            if isinstance(value, (list, tuple)) and len(value) == 3:
                yield {**likely, "fhw_dim": tuple(value)}


def _reproduces(kind: type, arguments: dict[str, Any], tables: dict[str, Tensor]) -> bool:
    """Whether diffusers' constructor makes ``tables`` of ``arguments`` (in the dtype that they have now)."""
    names = inspect.signature(kind.__init__).parameters
    with torch.device("cpu"):
        made = kind(**{name: value for name, value in arguments.items() if name in names})
    fresh = _tensors({**vars(made), **getattr(made, "_buffers", {})})
    return all(
        name in fresh
        and fresh[name].shape == table.shape
        and torch.equal(fresh[name].to(table.dtype), table.detach().cpu())
        for name, table in tables.items()
        if table.is_complex() or table.is_floating_point()
    )


def _tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors in ``value`` (lists, tuples and dicts of them, a module's own dicts left out), by path."""
    if isinstance(value, Tensor):
        return {name: value}
    items: list[tuple[Any, Any]] = []
    if isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    elif isinstance(value, dict):
        items = [(k, v) for k, v in value.items() if not str(k).startswith("_")]
    return {path: t for key, item in items for path, t in _tensors(item, f"{name}.{key}").items()}
