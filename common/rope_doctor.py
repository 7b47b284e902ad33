"""Is this model's RoPE right? Checks and repairs the RoPE buffers of any model, ours or not, and guards foreign caches.

Nothing of any model library is imported: modules are known by what they carry. A buffer's truth is looked for in this
order: a live module's own derivation; the module's own way of deriving, run anew in a clean thread; the model's config;
and the mathematics that any such buffer obeys. The report says which was used.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from common.cache_liveness import LiveBuffers, born_clean, find_dead_buffer, get_live_entry, tensor_fault
from common.rope_config import layer_types, read_rope_config
from common.rope_frequencies import RopeSpec, normalize_rope

# Names that such buffers have: inverse frequencies, cos and sin tables, apart or joined, complex tables.
_FREQUENCIES = re.compile(r"(^|_)inv_freqs?$|^freq$|^inv_timescale$")
_COS = re.compile(r"(^|_)cos(_cached|_cache|_table)?$|^cos_cached_total$")
_SIN = re.compile(r"(^|_)sin(_cached|_cache|_table)?$|^sin_cached_total$")
_JOINED = re.compile(r"cos_sin(_cache|_table)?$|^embed_positions$")
_COMPLEX = re.compile(r"^freqs_c(is|i)$|^(pos|neg)_freqs$|^freqs$|^freqs_complex$")
_OWNER = re.compile(r"rotary|rope|posembed|pos_embed|positionembed", re.IGNORECASE)
_ROWS = 4096  # rows of a table looked at together: reductions, not tables, go to the host

_VERDICTS = ("right", "degraded", "wrong", "dead", "unverified")


@dataclass(frozen=True)
class Finding:
    """What the doctor found of one buffer.

    ``verdict``: ``right``; ``dead`` (no memory); ``wrong`` (other values); ``degraded`` (the values after a cast to a
    smaller dtype); ``unverified`` (nothing to hold it against). ``truth``: what it was held against. ``error``: the
    largest difference, and ``where`` it first shows. ``cause``: what most likely happened. ``advice``: what to do.
    """

    module: str
    buffer: str
    verdict: str
    truth: str = ""
    error: float = 0.0
    where: str = ""
    cause: str = ""
    advice: str = ""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.buffer}" if self.module else self.buffer


@dataclass
class Report:
    """One finding for each RoPE buffer of a model; text and dict alike."""

    findings: list[Finding] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)  # RoPE modules that store no tensor: each forward computes anew

    @property
    def verdict(self) -> str:
        """The worst of all: ``wrong`` if any buffer is wrong, dead or degraded; ``unverified`` if any could not be
        checked, or no RoPE was found; else ``right``."""
        verdicts = {finding.verdict for finding in self.findings}
        if verdicts & {"wrong", "dead", "degraded"}:
            return "wrong"
        if "unverified" in verdicts or not (verdicts or self.computed):
            return "unverified"
        return "right"

    def to_dict(self) -> dict[str, Any]:
        findings = [asdict(finding) for finding in self.findings]
        return {"verdict": self.verdict, "findings": findings, "computed": self.computed}

    def __str__(self) -> str:
        lines = [f"{'buffer':<52}{'verdict':<12}{'held against':<14}{'error':>9}"]
        for f in self.findings:
            lines.append(f"{_shortened(f.path, 50):<52}{f.verdict:<12}{f.truth:<14}{f.error:>9.1e}")
            for label, text in (("at", f.where), ("cause", f.cause), ("do", f.advice)):
                if text and f.verdict != "right":
                    lines.append(f"    {label}: {text}")
        counts = ", ".join(f"{n} {v}" for v in _VERDICTS if (n := sum(f.verdict == v for f in self.findings)))
        lines += [f"{_shortened(path, 50):<52}stores nothing: computed at each forward" for path in self.computed]
        lines.append(f"RoPE of this model: {self.verdict.upper()} ({counts or 'no RoPE buffer found'})")
        return "\n".join(lines)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[-(width - 3) :]


def check_model(model: nn.Module, *, config: Any = None) -> Report:
    """Check every RoPE buffer of ``model``, and name every other non-persistent buffer whose memory is gone.

    Args:
        model: any module: transformers, diffusers, vLLM- or sglang-shaped, remote code, or bare.
        config: the model's config, object or dict, if it does not carry one.
    """
    report = Report()
    for path, module, found in _rope_modules(model):
        truths = _truths(module, found, config if config is not None else getattr(model, "config", None))
        for name in found:
            report.findings.append(_examine(path, module, name, truths.get(name)))
    seen = {(f.module, f.buffer) for f in report.findings}
    storing = {f.module for f in report.findings}
    report.computed = [
        path
        for path, module in model.named_modules()
        if path and path not in storing and _OWNER.search(type(module).__name__) and not _holds_tensors(module)
    ]
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            fault = tensor_fault(buffer) if buffer is not None else None
            if fault is not None and (path, name) not in seen:
                report.findings.append(_dead(path, name, fault, "memory"))
    return report


def repair_model(model: nn.Module, *, config: Any = None) -> Report:
    """Rewrite the dead, wrong and degraded RoPE buffers of ``model`` with right values, in place where there is memory,
    on their device, in the dtype that they are derived in.

    Returns:
        a report of what was done: a finding for each buffer that was rewritten, its verdict afterwards. What could not
        be verified is not touched.
    """
    done = Report()
    for path, module, found in _rope_modules(model):
        truths = _truths(module, found, config if config is not None else getattr(model, "config", None))
        for name in found:
            finding = _examine(path, module, name, truths.get(name))
            if finding.verdict not in ("dead", "wrong", "degraded") or truths.get(name) is None:
                continue
            _rewrite(module, name, truths[name][1], _home(model))
            done.findings.append(_examine(path, module, name, truths[name]))
    return done


# --- which modules and buffers -----------------------------------------------------------------------------------------


def _rope_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    for path, module in model.named_modules():
        names = [n for n in module._buffers if _is_rope(module, n)]
        if isinstance(module, LiveBuffers):
            names = list(module._shapes)
        attributes = (n for n, v in vars(module).items() if isinstance(v, Tensor) and _is_rope(module, n))
        found = list(dict.fromkeys((*names, *attributes)))
        if found:
            yield path, module, found


def _holds_tensors(module: nn.Module) -> bool:
    own = (*module.parameters(), *module.buffers(), *vars(module).values())
    return any(isinstance(value, Tensor) for value in own)


def _is_rope(module: nn.Module, name: str) -> bool:
    if name.startswith("_"):
        return False
    if _FREQUENCIES.search(name) or _JOINED.search(name) or _COMPLEX.search(name):
        return name not in ("freqs", "freq", "embed_positions") or bool(_OWNER.search(type(module).__name__))
    return bool((_COS.search(name) or _SIN.search(name)) and name not in module._parameters)


def _value(module: nn.Module, name: str) -> Tensor | None:
    value = module._buffers[name] if name in module._buffers else vars(module).get(name)
    return value if isinstance(value, Tensor) else None


def _home(model: nn.Module) -> torch.device:
    """Where the model's memory is."""
    tensors = (*model.parameters(), *model.buffers())
    return next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))


# --- truth -------------------------------------------------------------------------------------------------------------

Truth = tuple[str, Tensor]


def _truths(module: nn.Module, names: list[str], config: Any) -> dict[str, Truth]:
    """For each buffer what it should be, with the source's name: the first source that has it in the right shape."""
    found: dict[str, Truth] = {}
    for source, derive in (
        ("derivation", _from_live_module),
        ("own method", _from_own_method),
        ("config", lambda m: _from_config(m, names, config)),
    ):
        missing = [name for name in names if name not in found]
        if not missing:
            break
        try:
            derived = born_clean(derive, module)
        except Exception:  # noqa: BLE001 - foreign code may raise anything: then the next source is asked
            continue
        for name in missing:
            value, present = derived.get(name), _value(module, name)
            if isinstance(value, Tensor) and (present is None or value.shape == present.shape) and _plausible(value):
                found[name] = (source, value)
    return found


def _plausible(value: Tensor) -> bool:
    return tensor_fault(value) is None and bool(
        torch.isfinite(torch.view_as_real(value) if value.is_complex() else value).all()
    )


def _from_live_module(module: nn.Module) -> dict[str, Tensor]:
    return module.derive() if isinstance(module, LiveBuffers) else {}


def _from_own_method(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module built anew from the arguments that the present one kept, or by the method it has for it."""
    values: dict[str, Tensor] = {}
    fresh = _built_anew(module)
    if fresh is not None:
        values.update({n: v for n, v in fresh._buffers.items() if v is not None})
        values.update({n: v for n, v in vars(fresh).items() if isinstance(v, Tensor)})
        return values
    # vLLM's and sglang's shape: methods that compute the table from attributes
    bare = copy.copy(module)
    compute = getattr(type(module), "_compute_cos_sin_cache", None)
    if compute is not None:
        with torch.device("cpu"):
            values["cos_sin_cache"] = compute(bare)
    frequencies = getattr(type(module), "_compute_inv_freq", None)
    if frequencies is not None and hasattr(module, "base"):
        with torch.device("cpu"):
            values["inv_freq"] = frequencies(bare, module.base)
    return values


def _built_anew(module: nn.Module) -> nn.Module | None:
    """``type(module)`` called with the arguments that its attributes still hold, if it takes nothing else."""
    if next(module.parameters(), None) is not None or isinstance(module, LiveBuffers):
        return None
    arguments = {}
    for name, parameter in list(inspect.signature(type(module).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or name == "device":
            continue
        for attribute in (name, f"_{name}", *_ALIASES.get(name, ())):
            if attribute in vars(module):
                arguments[name] = vars(module)[attribute]
                break
        else:
            if parameter.default is parameter.empty:
                return None
            # an argument with a default that left no trace may have been another: only its own table can tell
    if any(isinstance(value, (Tensor, nn.Module)) for value in arguments.values()):
        return None
    with torch.device("cpu"):
        return type(module)(**arguments)


_ALIASES = {
    "rope_theta": ("theta", "base"),
    "theta": ("base", "rope_theta"),
    "base": ("theta", "rope_theta"),
    "dim": ("rotary_dim", "head_dim"),
    "max_position_embeddings": ("max_seq_len_cached", "max_seq_len"),
}


def _from_config(module: nn.Module, names: list[str], config: Any) -> dict[str, Tensor]:
    """Frequencies and tables by the config that the module or its model carries."""
    config = getattr(module, "config", None) or config
    if config is None:
        return {}
    values: dict[str, Tensor] = {}
    kinds = layer_types(config)

    @cache
    def spec(kind: str | None) -> RopeSpec:
        numbers = read_rope_config(config, layer_type=kind, max_position=None)
        return normalize_rope(
            numbers.head_size, numbers.rotary_dim, numbers.max_position, numbers.base, numbers.rope_scaling
        )

    @cache
    def full_table(kind: str | None, rows: int) -> Tensor:
        return spec(kind).table(rows)

    for name in names:
        kind = next((k for k in kinds if name.startswith(k)), None)
        present = _value(module, name)
        if present is None:
            continue
        if _FREQUENCIES.search(name):
            values[name] = spec(kind).frequencies()[0]
            continue
        table = full_table(kind, present.shape[-2] if present.dim() > 1 else present.shape[0])
        half = table.shape[1] // 2
        if name == "embed_positions":  # GPT-J's table has the sines first
            table = table.roll(half, dims=1)
        part = table if _JOINED.search(name) else table[:, half:] if _SIN.search(name) else table[:, :half]
        values[name] = torch.cat((part, part), dim=1) if present.shape[-1] == 2 * part.shape[1] else part
        values[name] = values[name].reshape(present.shape) if values[name].numel() == present.numel() else values[name]
    return values


# --- judgement ----------------------------------------------------------------------------------------------------------


def _dead(path: str, name: str, fault: str, truth: str) -> Finding:
    cause = "meta" if "meta" in fault else "freed" if "storage" in fault else fault
    return Finding(path, name, "dead", truth, math.inf, "everywhere", cause, "repair_model, or load the model again")


def _examine(path: str, module: nn.Module, name: str, truth: Truth | None) -> Finding:
    value = _value(module, name)
    fault = tensor_fault(value)
    if fault is not None:
        return _dead(path, name, fault, truth[0] if truth else "memory")
    if truth is None:
        return _by_mathematics(path, name, value)
    source, expected = truth
    if value.shape != expected.shape:
        return Finding(
            path, name, "unverified", source, 0.0, "", f"shape {tuple(value.shape)}, not {tuple(expected.shape)}", ""
        )
    error, where = _difference(value, expected)
    if error == 0.0:
        verdict = (
            "degraded" if _is_smaller(value.dtype, expected.dtype) and not _survives(expected, value.dtype) else "right"
        )
        if verdict == "right":
            return Finding(path, name, "right", source)
    for dtype in (torch.bfloat16, torch.float16):
        if not value.is_complex() and _difference(value, expected.to(dtype).to(expected.dtype))[0] == 0.0:
            return Finding(
                path,
                name,
                "degraded",
                source,
                error,
                where,
                f"cast to {str(dtype).removeprefix('torch.')}",
                _ADVICE_CAST,
            )
    if _rounding_only(value, expected, error):
        return Finding(path, name, "right", source, error)
    return Finding(path, name, "wrong", source, error, where, _cause(value), "repair_model, or load the model again")


_ADVICE_CAST = "repair_model, and keep these buffers in float32 when the model is cast"


def _is_smaller(dtype: torch.dtype, than: torch.dtype) -> bool:
    return dtype.itemsize < than.itemsize


def _survives(expected: Tensor, dtype: torch.dtype) -> bool:
    return bool((expected.to(dtype).to(expected.dtype) == expected).all())


def _rounding_only(value: Tensor, expected: Tensor, error: float) -> bool:
    """Whether the difference is that of another order of float32 operations or another device's cosine."""
    if value.dtype != expected.dtype or not math.isfinite(error):
        return False
    if value.dim() == 1:  # frequencies: relative
        tiny = torch.finfo(torch.float32).tiny
        relative = ((value - expected.to(value.device)).abs() / expected.to(value.device).abs().clamp_min(tiny)).max()
        return float(relative) < 1e-6
    return error < 1e-6


def _difference(value: Tensor, expected: Tensor) -> tuple[float, str]:
    """The largest difference and the first place where there is one; block by block on the value's device."""
    largest, first = 0.0, ""
    rows = value.reshape(value.shape[0], -1) if value.dim() > 1 else value.reshape(1, -1)
    truth = expected.reshape(rows.shape)
    for at in range(0, len(rows), _ROWS):
        ours = rows[at : at + _ROWS].detach()
        theirs = truth[at : at + _ROWS].to(ours.device)
        kind = torch.complex128 if theirs.is_complex() else torch.float64
        gap = (ours.to(kind) - theirs.to(kind)).abs()
        gap = torch.where(torch.isnan(gap), math.inf, gap)
        worst = float(gap.max()) if gap.numel() else 0.0
        if worst > 0.0 and not first:
            row, column = (gap > 0).nonzero()[0].tolist()
            first = f"frequency {column}" if value.dim() == 1 else f"position {at + row}, column {column}"
        largest = max(largest, worst)
    return largest, first


def _cause(value: Tensor) -> str:
    """What most likely happened to a wrong buffer."""
    flat = torch.view_as_real(value) if value.is_complex() else value
    head = flat.reshape(-1)[: 1 << 20].double()
    if not bool(torch.isfinite(head).all()):
        return "uninitialised or overwritten: not finite"
    if not bool(head.any()):
        return "zero-filled"
    size = float(head.abs().max())
    if size > 1e3 or size < 1e-20 or bool((head[1:] == head[:-1]).all()):
        return "uninitialised: values that no such buffer has"
    return "other parameters, or overwritten: plausible values of another rope"


def _by_mathematics(path: str, name: str, value: Tensor) -> Finding:
    """What can be said without knowing the numbers: wrong for certain, or unverified."""
    if _FREQUENCIES.search(name) and value.dim() == 1:
        wrong = _frequencies_fault(value.detach().double().cpu())
    else:
        wrong = _table_fault(name, value)
    if wrong is not None:
        return Finding(path, name, "wrong", "mathematics", math.inf, wrong, _cause(value), "load the model again")
    return Finding(
        path,
        name,
        "unverified",
        "mathematics",
        0.0,
        "",
        "",
        "consistent in itself; give check_model the model's config",
    )


def _frequencies_fault(frequencies: Tensor) -> str | None:
    if not bool(torch.isfinite(frequencies).all()):
        return "not finite"
    if bool((frequencies < 0).any()) or not bool(frequencies.any()):
        return "frequencies are not positive"
    if float(frequencies.max()) > 1.0 + 1e-3:
        return f"a frequency of {float(frequencies.max()):.3g}, above 1"
    if bool((frequencies[1:] > frequencies[:-1] * (1 + 1e-6)).any()) and bool((frequencies > 0).all()):
        falls = frequencies[1:] > frequencies[:-1] * (1 + 1e-6)
        if int(falls.sum()) > 1:  # one rise is where a second axis begins
            return f"frequencies rise at {int(falls.nonzero()[0])}"
    return None


def _table_fault(name: str, value: Tensor) -> str | None:
    table = (torch.view_as_real(value) if value.is_complex() else value).detach()
    rows = table.reshape(table.shape[0], -1)
    for at in range(0, len(rows), _ROWS):
        block = rows[at : at + _ROWS]
        bad = ~torch.isfinite(block).all(dim=1)
        if bool(bad.any()):
            return f"position {at + int(bad.nonzero()[0])} is not finite"
        if value.is_complex():
            bad = (value.reshape(len(rows), -1)[at : at + _ROWS].abs() - 1).abs().amax(dim=1) > 1e-2
        elif _JOINED.search(name) and block.shape[1] % 2 == 0:
            first, second = block.double().chunk(2, dim=1)
            norm = first.square() + second.square()
            bad = (norm - norm[:, :1]).abs().amax(dim=1) > 1e-2 * norm[:, 0].clamp_min(1e-3)
            bad |= norm[:, 0] < 1e-6
        else:
            bad = block.abs().amax(dim=1) > 4
            bad |= (not _SIN.search(name)) & ~block.any(dim=1)
        if bool(bad.any()):
            return f"position {at + int(bad.nonzero()[0])} is no rotation"
    return None


def _rewrite(module: nn.Module, name: str, expected: Tensor, home: torch.device) -> None:
    if isinstance(module, LiveBuffers):
        module.live(name)
        fault = module.fault(verify=True)
        if fault is not None:
            module.heal(*fault)
        return
    value = _value(module, name)
    with torch.no_grad():
        if (
            value is not None
            and tensor_fault(value) is None
            and value.dtype == expected.dtype
            and value.shape == expected.shape
            and not value.is_inference()
        ):
            value.copy_(expected)
            return
        device = value.device if value is not None and value.device.type != "meta" else home
        fresh = expected.to(device).clone()
    if name in module._buffers:
        module._buffers[name] = fresh
    else:
        vars(module)[name] = fresh


# --- caches of engines that one cannot change ---------------------------------------------------------------------------


class GuardedCache(dict):
    """A dict of modules that never hands out a dead entry: to ``in``, ``[]`` and ``get`` a dead one is not there.

    Dead is what :func:`common.cache_liveness.get_live_entry` says, and an entry whose buffers were replaced, written to
    or moved in memory since it was put in. While the default device is meta, entries are handed out as they are.
    """

    def __init__(self, entries: Mapping[Hashable, nn.Module] = ()) -> None:
        super().__init__()
        self._marks: dict[Hashable, dict[str, tuple]] = {}
        for key, module in dict(entries).items():
            if find_dead_buffer(module) is None:
                self[key] = module

    def __setitem__(self, key: Hashable, module: nn.Module) -> None:
        super().__setitem__(key, module)
        self._marks[key] = _marks(module)

    def __delitem__(self, key: Hashable) -> None:
        super().__delitem__(key)
        self._marks.pop(key, None)

    def get(self, key: Hashable, default: Any = None) -> Any:
        module = super().get(key)
        if module is None:
            return default
        alive = get_live_entry(_Raw(self), key)
        if alive is None:
            return default
        if torch.get_default_device().type != "meta" and not isinstance(module, LiveBuffers):
            if self._marks.get(key) != _marks(module):
                del self[key]
                return default
        return alive

    def __contains__(self, key: Hashable) -> bool:
        return self.get(key) is not None

    def __getitem__(self, key: Hashable) -> nn.Module:
        module = self.get(key)
        if module is None:
            raise KeyError(key)
        return module


class _Raw:
    """The dict beneath a guarded one."""

    def __init__(self, cache: GuardedCache) -> None:
        self._cache = cache

    def get(self, key: Hashable) -> nn.Module | None:
        return dict.get(self._cache, key)

    def __delitem__(self, key: Hashable) -> None:
        del self._cache[key]


def _marks(module: nn.Module) -> dict[str, tuple]:
    marks = {}
    for name, buffer in module.named_buffers():
        if tensor_fault(buffer) is None and not buffer.is_inference():
            marks[name] = (buffer._version, buffer.data_ptr(), buffer.nbytes, buffer.dtype)
    return marks


def guard_cache(owner: Any, attribute: str | None = None) -> GuardedCache | Callable[[], None]:
    """Guard the module cache of an engine that one cannot change.

    Args:
        owner: a mapping, to get a guarded copy of it; or, with ``attribute``, the module or object that holds it, such
            as ``guard_cache(sglang.srt.layers.rotary_embedding.factory, "_ROPE_DICT")``.

    Returns:
        the guarded mapping; or, with ``attribute``, a function that puts the engine's own back.
    """
    if attribute is None:
        if not isinstance(owner, Mapping):
            raise TypeError(f"owner is {type(owner).__name__}; expected a mapping, or an object with attribute given")
        return GuardedCache(owner)
    own = getattr(owner, attribute)
    if not isinstance(own, MutableMapping):
        raise TypeError(f"{attribute} is {type(own).__name__}; expected a mutable mapping")
    guarded = GuardedCache(own)
    setattr(owner, attribute, guarded)

    def undo() -> None:
        own.clear()
        own.update(dict.items(guarded))
        setattr(owner, attribute, own)

    return undo
