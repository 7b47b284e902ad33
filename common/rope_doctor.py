"""Is this model's RoPE right? Checks and repairs the RoPE buffers of any model, ours or not, and guards foreign caches.

What a buffer should be is found by :mod:`common.rope_truth`; where nothing is known of it, it is held against the
mathematics that any such buffer obeys. The report says which was used.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from common.cache_liveness import LiveBuffers, born_clean, find_dead_buffer, get_live_entry, tensor_fault
from common.rope_truth import COS, FREQUENCIES, JOINED, OWNER, SIN, Slot, Truth, Truths, holds_tensors, rope_slots

_ROWS = 4096  # rows of a table looked at together: reductions, not tables, go to the host
_VERDICTS = ("right", "degraded", "wrong", "dead", "unverified")
_SMALLER = {
    torch.complex128: (torch.complex64,),
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
    torch.float32: (torch.bfloat16, torch.float16),
}
_ADVICE = "repair_model, or load the model again"
_ADVICE_CAST = "repair_model, and keep these buffers in float32 when the model is cast"


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
        """The report in JSON's types: an ``error`` that is not finite is None."""
        findings = [asdict(f) | {"error": f.error if math.isfinite(f.error) else None} for f in self.findings]
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
    return born_clean(_checked, model, config)


def _checked(model: nn.Module, config: Any) -> Report:
    report = Report([_examine(path, slot, truth) for path, slot, truth in _with_truths(model, config)])
    seen = {(f.module, f.buffer) for f in report.findings}
    storing = {f.module for f in report.findings}
    report.computed = [
        path
        for path, module in model.named_modules()
        if path and path not in storing and OWNER.search(type(module).__name__) and not holds_tensors(module)
    ]
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
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
    return born_clean(_repaired, model, config)


def _repaired(model: nn.Module, config: Any) -> Report:
    done = Report()
    replaced: dict[int, tuple[Tensor, Tensor]] = {}  # what one tensor under two names was and became
    for path, slot, truth in _with_truths(model, config):
        verdict = _examine(path, slot, truth).verdict
        if truth is None or verdict in ("right", "unverified") or (truth.assumed and verdict != "degraded"):
            continue
        old = slot.get()
        tied = old is not None and id(old) in replaced
        if tied:
            slot.put(replaced[id(old)][1])
        if not tied or _examine(path, slot, truth).verdict != "right":
            _rewrite(slot, truth.values[0], _home(model))
        if old is not None and slot.get() is not old:
            replaced[id(old)] = old, slot.get()
        done.findings.append(_examine(path, slot, truth))
    return done


def _with_truths(model: nn.Module, config: Any) -> Iterator[tuple[str, Slot, Truth | None]]:
    """Each RoPE tensor of ``model`` with the path of its module and what it should be."""

    def accepts(value: Tensor | None, truth: Truth) -> bool:
        return tensor_fault(value) is None and _best_of("", "", value, truth).verdict == "right"

    truths = Truths(model, config, accepts)
    for path, module in model.named_modules():
        slots = rope_slots(module)
        known = truths.of(path, module, slots) if slots else {}
        for slot in slots:
            if slot.get() is not None or slot.name in known or isinstance(module, LiveBuffers):  # else not yet made
                yield path, slot, known.get(slot.name)


def _home(model: nn.Module) -> torch.device:
    """Where the model's memory is."""
    tensors = (*model.parameters(), *model.buffers())
    return next((t.device for t in tensors if t.device.type != "meta"), torch.device("cpu"))


def _rewrite(slot: Slot, expected: Tensor, home: torch.device) -> None:
    module, value = slot.module, slot.get()
    if isinstance(module, LiveBuffers):
        module.live(slot.name)
        fault = module.fault(verify=True)
        if fault is not None:
            module.heal(*fault)
        return
    with torch.no_grad():
        if (
            value is not None
            and tensor_fault(value) is None
            and value.dtype == expected.dtype
            and value.shape == expected.shape
            and not value.is_inference()
            and all(stride or size == 1 for size, stride in zip(value.shape, value.stride()))  # not expanded
        ):
            value.copy_(expected)
            return
        device = value.device if value is not None and value.device.type != "meta" else home
        slot.put(expected.to(device).clone())


# --- judgement ----------------------------------------------------------------------------------------------------------


def _dead(path: str, name: str, fault: str, truth: str) -> Finding:
    cause = "meta" if "meta" in fault else "freed" if "storage" in fault else fault
    return Finding(path, name, "dead", truth, math.inf, "everywhere", cause, _ADVICE)


def _examine(path: str, slot: Slot, truth: Truth | None) -> Finding:
    name, value = slot.name, slot.get()
    if isinstance(slot.module, LiveBuffers) and slot.module._asleep:
        return Finding(path, name, "right", "derivation", cause="asleep: the next use derives it")
    fault = tensor_fault(value)
    if fault is not None:
        return _dead(path, name, fault, truth.source if truth else "memory")
    if type(value) not in (Tensor, nn.Parameter):
        return Finding(path, name, "unverified", advice=f"a {type(value).__name__}, which is not looked into")
    if truth is None:
        return _by_mathematics(path, slot, value)
    found = _best_of(path, name, value, truth)
    if found.verdict == "wrong" and truth.assumed:
        certain = _by_mathematics(path, slot, value)
        if certain.verdict == "wrong":
            return certain
        advice = f"other values than the default {truth.assumed} gives, which the module may not have been made with"
        return Finding(path, name, "unverified", truth.source, found.error, found.where, "", advice)
    if found.verdict == "degraded" and _made_small(slot, value):
        return Finding(path, name, "right", truth.source, found.error)
    return found


def _made_small(slot: Slot, table: Tensor) -> bool:
    """Whether a table was made in its small dtype, not cast to it: a cast would have taken its frequencies along."""
    if table.dim() == 1 or table.dtype not in (torch.bfloat16, torch.float16):
        return False
    frequencies = [s.get() for s in rope_slots(slot.module) if FREQUENCIES.search(s.name)]
    return any(f is not None and f.dtype.itemsize > table.dtype.itemsize for f in frequencies)


def _best_of(path: str, name: str, value: Tensor, truth: Truth) -> Finding:
    """Hold ``value`` against each of the values that are right, and say the best of it."""
    found = [_compared(path, name, value, expected, truth.source) for expected in truth.values]
    return min(found, key=lambda finding: _VERDICTS.index(finding.verdict))


def _compared(path: str, name: str, value: Tensor, expected: Tensor, source: str) -> Finding:
    if value.shape != expected.shape:
        shapes = f"shape {tuple(value.shape)}, not {tuple(expected.shape)}"
        return Finding(path, name, "unverified", source, 0.0, "", shapes, "")
    error, where, rounding = _difference(value, expected)
    if error == 0.0:
        return Finding(path, name, "right", source)
    for dtype in _SMALLER.get(expected.dtype, ()):
        if _difference(value, expected.to(dtype).to(expected.dtype))[0] == 0.0:
            cause = f"cast to {str(dtype).removeprefix('torch.')}"
            return Finding(path, name, "degraded", source, error, where, cause, _ADVICE_CAST)
    if rounding and value.dtype.itemsize >= expected.dtype.itemsize:
        return Finding(path, name, "right", source, error)
    return Finding(path, name, "wrong", source, error, where, _cause(value), _ADVICE)


def _rows(table: Tensor) -> Tensor:
    """``table`` as ``[rows, width]``; frequencies are one row."""
    return table.detach().reshape(-1, table.shape[-1]) if table.dim() > 1 else table.detach().reshape(1, -1)


def _wide(block: Tensor) -> Tensor:
    """A block in double precision, on its device where that has it."""
    block = block.cpu() if block.device.type == "mps" else block
    return block.to(torch.complex128 if block.is_complex() else torch.float64)


def _difference(value: Tensor, expected: Tensor) -> tuple[float, str, bool]:
    """The largest difference, the first place where there is one, and whether all of it is rounding: that of another
    order of operations, or of frequencies an ulp or two away as another device computes them, whose angles differ the
    more the larger they are, and in many rows, not in one. Block by block on the value's device."""
    largest, first, rounding = 0.0, "", True
    rows, truth = _rows(value), _rows(expected)
    speed = None if value.dim() == 1 else _speeds(truth)
    unit = 8 * torch.finfo(expected.dtype).eps
    turn = min(unit, 8 * torch.finfo(torch.float32).eps)  # however small the table's dtype, its angles were float32
    for at in range(0, len(rows), _ROWS):
        ours = _wide(rows[at : at + _ROWS])
        theirs = _wide(truth[at : at + _ROWS].to(value.device)).to(ours.device)
        gap = (ours - theirs).abs()
        gap = torch.where(torch.isnan(gap), math.inf, gap)
        worst = float(gap.max()) if gap.numel() else 0.0
        if worst == 0.0:
            continue
        if not first:
            row, column = (gap > 0).nonzero()[0].tolist()
            first = f"frequency {column}" if value.dim() == 1 else f"position {at + row}, column {column}"
        largest = max(largest, worst)
        bound = unit * theirs.abs()
        if speed is not None:
            step, begin = speed
            position = torch.arange(at, at + len(ours), dtype=torch.float64, device=ours.device)
            position = position if begin else torch.full_like(position, len(rows))
            bound += turn
            many = (gap > 0).double().mean(dim=0) > 1 / 8
            bound = bound + turn * position[:, None] * (step.to(ours.device) * many)
        rounding = rounding and bool((gap <= bound).all())
    return largest, first, rounding


def _speeds(table: Tensor) -> tuple[Tensor, bool]:
    """By how much the angle of each column grows from row to row, float64 ``[width]``, 1 (no rope turns faster) where
    that can't be told from the first two rows; and whether row 0 is position 0."""
    ones = torch.ones(table.shape[1], dtype=torch.float64)
    if len(table) < 2:
        return ones, True
    first, second = _wide(table[0].cpu()), _wide(table[1].cpu())
    if table.is_complex():
        return (second * first.conj()).angle().abs(), bool((first.angle().abs() < 1e-6).all())
    size = float(table[: min(len(table), _ROWS)].abs().max()) or 1.0
    share = (second / size).clamp(-1, 1)
    cosine, sine = (first / size - 1).abs() < 1e-6, first.abs() < 1e-6
    slowest = (share - torch.finfo(table.dtype).eps).clamp_min(-1).acos()  # a cosine near 1 has lost its angle
    speed = torch.where(cosine, slowest, torch.where(sine, share.asin().abs(), ones))
    return speed, bool((cosine | sine).all())


def _cause(value: Tensor) -> str:
    """What most likely happened to a wrong buffer."""
    flat = torch.view_as_real(value) if value.is_complex() else value
    head = flat.detach().reshape(-1)[: 1 << 20].double()
    if not bool(torch.isfinite(head).all()):
        return "uninitialised or overwritten: not finite"
    if not bool(head.any()):
        return "zero-filled"
    size = float(head.abs().max())
    if size > 1e3 or size < 1e-20 or bool((head[1:] == head[:-1]).all()):
        return "uninitialised: values that no such buffer has"
    return "other parameters, or overwritten: plausible values of another rope"


def _by_mathematics(path: str, slot: Slot, value: Tensor) -> Finding:
    """What can be said without knowing the numbers: wrong for certain, or unverified."""
    unusual = ""
    if value.dim() == 1 and FREQUENCIES.search(slot.name):
        frequencies = value.detach().double().cpu()
        wrong, unusual = _frequencies_fault(frequencies), _unusual(frequencies)
    else:
        wrong = _table_fault(slot, value)
    if wrong is not None:
        return Finding(path, slot.name, "wrong", "mathematics", math.inf, wrong, _cause(value), "load the model again")
    advice = f"{'' if unusual else 'consistent in itself; '}give check_model the model's config"
    return Finding(path, slot.name, "unverified", "mathematics", cause=unusual, advice=advice)


def _frequencies_fault(frequencies: Tensor) -> str | None:
    """What no model has; some turn backwards, faster than by 1 a position, or have their frequencies in another order."""
    if not bool(torch.isfinite(frequencies).all()):
        return "not finite"
    largest = float(frequencies.abs().max())
    if largest > 1e4:
        return f"a frequency of {largest:.3g}"
    return f"no frequency above {largest:.3g}" if largest < 1e-20 else None


def _unusual(frequencies: Tensor) -> str:
    """What few models have: frequencies that are not positive and falling from 1, once for each axis."""
    steps = frequencies.diff()
    if float(frequencies.min()) < 0:
        return "unlike most ropes: some frequencies are negative"
    if float(frequencies.max()) > 1 + 1e-3:
        return f"unlike most ropes: a frequency of {float(frequencies.max()):.3g}, above 1"
    rises = (steps > 1e-6 * frequencies[:-1]).nonzero().flatten()
    if len(rises) > 2:  # where a second and a third axis begin
        return f"unlike most ropes: frequencies rise at {int(rises[0]) + 1}"
    still = (frequencies == 0).nonzero().flatten()
    if len(still) and bool(frequencies[int(still[0]) :].any()):  # still pairs are a head's last
        return f"unlike most ropes: frequency {int(still[0])} is 0"
    return ""


def _table_fault(slot: Slot, value: Tensor) -> str | None:
    """What no table of rotations has: values that are not finite, pairs that are not rotations, positions that do not
    follow one another. Of a tensor whose name says nothing only the first is known."""
    rows, pairings = _rows(value), _pairings(slot, value)
    eps = torch.finfo(value.dtype).eps
    table = value.is_complex() or any(kind.search(slot.attribute) for kind in (COS, SIN, JOINED))
    for at in range(0, len(rows), _ROWS):
        block = rows[at : at + _ROWS]
        bad = ~torch.isfinite(torch.view_as_real(block).flatten(1) if block.is_complex() else block).all(dim=1)
        if bool(bad.any()):
            return f"position {at + int(bad.nonzero()[0])} is not finite"
        if table and not pairings:
            bad = block.abs().amax(dim=1) > 4
            bad |= (not SIN.search(slot.name)) & ~block.any(dim=1)
            if bool(bad.any()):
                return f"position {at + int(bad.nonzero()[0])} is no rotation"
    if table and not bool(rows.any()):
        return "nothing but zeros"
    faults = [_norms_fault(pairs, len(rows), eps) or _steps_fault(pairs, len(rows), eps) for pairs in pairings]
    return faults[0] if faults and all(faults) else None


_Pairs = Callable[[int, int], Tensor]


def _pairings(slot: Slot, value: Tensor) -> list[_Pairs]:
    """Functions that give rows ``[first, last)`` of a table as complex128 ``cos + i sin``, one for each way in which a
    table of this name may hold its pairs; none where a tensor holds none."""
    if value.is_complex():
        return [lambda first, last: _wide(_rows(value)[first:last])]
    if JOINED.search(slot.name) and value.shape[-1] % 2 == 0:
        return [
            lambda first, last: torch.complex(*_wide(_rows(value)[first:last]).chunk(2, dim=1)),
            lambda first, last: torch.view_as_complex(_wide(_rows(value)[first:last]).unflatten(1, (-1, 2))),
        ]
    for mine, other in (("cos", "sin"), ("sin", "cos")):
        if (COS if mine == "cos" else SIN).search(slot.name):
            partner = Slot(slot.module, slot.attribute.replace(mine, other), slot.item).get()
            if partner is None or tensor_fault(partner) is not None or type(partner) is not Tensor:
                return []
            if (partner.shape, partner.dtype, partner.device) != (value.shape, value.dtype, value.device):
                return []
            both = (value, partner) if mine == "cos" else (partner, value)
            return [lambda first, last, both=both: torch.complex(*(_wide(_rows(t)[first:last]) for t in both))]
    return []


def _norms_fault(pairs: _Pairs, rows: int, eps: float) -> str | None:
    """Where pairs are not of the length that they have in row 0, all scaled alike: a table may have a scale, and columns
    that it leaves empty."""
    first = pairs(0, 1).abs()
    size, column = first.max(dim=1)
    for at in range(0, rows, _ROWS):
        norm = pairs(at, at + _ROWS).abs()
        scale = norm[:, column] / size
        bad = (norm - first * scale).abs().amax(dim=1) > max(5e-3, 2 * eps) * size * scale[:, 0]
        length = norm[:, column[0]]
        bad |= (length < 1e-3) | (length > 1e3)
        if bool(bad.any()):
            return f"position {at + int(bad.nonzero()[0])} is no rotation"
    return None


def _steps_fault(pairs: _Pairs, rows: int, eps: float) -> str | None:
    """Where a table of consecutive positions breaks off: each row turns from the one before as that did from its own. A
    table that begins with position 0 may begin anew, and any may go on at another position, as the lines of an image do.
    Nothing is said of a table in which that is not the rule."""
    if rows < 16:
        return None
    near = max(1e-3, 4 * eps)
    begins = bool(((pairs(0, 1) / pairs(0, 1).abs().clamp_min(1e-12) - 1).abs() < near).all())
    broken: list[int] = []
    for at in range(0, rows, _ROWS):
        first = max(at - 3, 0)
        turned = pairs(first, at + _ROWS + 3)
        turned = turned / turned.abs().clamp_min(1e-12)
        step = turned[1:] * turned[:-1].conj()
        position = torch.arange(first, first + len(step), dtype=torch.float64, device=step.device)[:, None]
        reach = near + 1e-6 * position * (1e-3 + step.angle().abs())
        changed = ((step[1:] - step[:-1]).abs() > reach[:-1]).any(dim=1)
        resumed = ((step[2:] - step[:-2]).abs() <= reach[:-2]).all(dim=1)
        changed[:-1] &= ~resumed
        changed[1:] &= ~resumed
        if begins:
            start = ((turned - 1).abs() < near).all(dim=1)
            changed &= ~(start[2:] | start[1:-1] | start[:-2])
        found = (first + 1 + changed.nonzero().flatten()).tolist()
        broken += [row for row in found if at <= row < at + _ROWS]
        if len(broken) > max(3, rows // 10):
            return None
    return f"position {broken[0] + (broken[0] > 1)} does not follow the one before" if broken else None


# --- caches of engines that one cannot change ---------------------------------------------------------------------------


class GuardedCache(UserDict):
    """A mapping of modules that never hands out a dead entry: a dead one is not there, for every way of asking.

    Dead is what :func:`common.cache_liveness.get_live_entry` says, and an entry whose buffers were replaced, written to
    or moved in memory since it was put in. While the default device is meta, entries are handed out as they are.
    ``data`` is the plain dict beneath.
    """

    def __init__(self, entries: Mapping[Hashable, nn.Module] = ()) -> None:
        self._marks: dict[Hashable, dict[str, tuple]] = {}
        alive = {key: module for key, module in dict(entries).items() if find_dead_buffer(module) is None}
        super().__init__(alive)

    def __setitem__(self, key: Hashable, module: nn.Module) -> None:
        self.data[key], self._marks[key] = module, _marks(module)

    def __delitem__(self, key: Hashable) -> None:
        del self.data[key]
        self._marks.pop(key, None)

    def __getitem__(self, key: Hashable) -> nn.Module:
        module = get_live_entry(self.data, key)
        if module is None:
            raise KeyError(key)
        if torch.get_default_device().type != "meta" and not isinstance(module, LiveBuffers):
            if self._marks.get(key) != _marks(module):
                del self[key]
                raise KeyError(key)
        return module

    def __contains__(self, key: Hashable) -> bool:
        return self.get(key) is not None

    def get(self, key: Hashable, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[Hashable]:
        return iter([key for key in list(self.data) if key in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __or__(self, other: Mapping[Hashable, nn.Module]) -> GuardedCache:
        return type(self)({**self, **other})

    def __ior__(self, other: Mapping[Hashable, nn.Module]) -> GuardedCache:
        self.update(other)
        return self

    def __ror__(self, other: Mapping[Hashable, nn.Module]) -> GuardedCache:
        return type(self)({**other, **self})

    def __reduce__(self) -> tuple:
        return type(self), (dict(self.items()),)

    def copy(self) -> GuardedCache:
        return type(self)(self)

    __copy__ = copy


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
        own.update(guarded)
        setattr(owner, attribute, own)

    return undo
