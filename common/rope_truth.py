"""What the RoPE tensors of any module should be: found by running again the code that made them.

Nothing of any model library is imported: modules are known by what they carry. The sources, most certain first: a live
module's own derivation; the module's class, called again with the arguments that its attributes still hold; the same with
the arguments that its model's own constructor passes; the config; and the defaults of arguments that left no trace.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from common.cache_liveness import LiveBuffers, born_clean, tensor_fault
from common.rope_config import RopeArguments, layer_types, read_rope_config
from common.rope_frequencies import RopeSpec, normalize_rope

# Names that such tensors have: inverse frequencies, cos and sin tables, apart or joined, complex tables.
FREQUENCIES = re.compile(r"(^|_)inv_freqs?$|^freq$|^inv_timescale$")
COS = re.compile(r"(^|_)cos(_cached|_cache|_table)?$|^cos_cached_total$")
SIN = re.compile(r"(^|_)sin(_cached|_cache|_table)?$|^sin_cached_total$")
JOINED = re.compile(r"cos_sin(_cache|_table)?$|^embed_positions$")
_COMPLEX = re.compile(r"^freqs_c(is|i)$|^(pos|neg)_freqs$|^freqs$|^freqs_complex$")
OWNER = re.compile(r"[Rr]otary|ROTARY|Ro[Pp][Ee]|ROPE|(^|_)rope|[Pp]os_?[Ee]mbed|[Pp]osition(al)?_?[Ee]mbed")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_NOT_TEXT = {"vision", "visual", "image", "img", "video", "audio", "speech", "acoustic", "vit"}


@dataclass(frozen=True)
class Slot:
    """A tensor's place in a module: a buffer, a plain attribute, or an item of a list, tuple or dict."""

    module: nn.Module
    attribute: str
    item: Hashable = None

    @property
    def name(self) -> str:
        return self.attribute if self.item is None else f"{self.attribute}[{self.item!r}]"

    def get(self) -> Tensor | None:
        held = _places(self.module).get(self.attribute)
        if self.item is not None:
            try:
                held = held[self.item]
            except (TypeError, KeyError, IndexError):
                return None
        return held if isinstance(held, Tensor) else None

    def put(self, tensor: Tensor) -> None:
        held = self.module._buffers if self.attribute in self.module._buffers else vars(self.module)
        if self.item is None:
            held[self.attribute] = tensor
        elif isinstance(held[self.attribute], tuple):
            items = list(held[self.attribute])
            items[self.item] = tensor
            held[self.attribute] = type(held[self.attribute])(items)
        else:
            held[self.attribute][self.item] = tensor


@dataclass(frozen=True)
class Truth:
    """What a tensor should be: any of ``values``, of which a repair writes the first.

    ``assumed``: the default arguments on which they rest and that nothing bears out; empty where they are certain.
    """

    source: str
    values: tuple[Tensor, ...]
    assumed: str = ""


def rope_slots(module: nn.Module) -> list[Slot]:
    """The RoPE tensors that ``module`` itself holds: those of the usual names, and in a class whose name says that it is
    about rotary embeddings every floating or complex one that no checkpoint brings."""
    if isinstance(module, LiveBuffers):
        return [Slot(module, name) for name in module._shapes]
    return [slot for slot in _slots(module) if _is_rope(slot)]


def holds_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(_slots(module), None) is not None


def _places(module: nn.Module) -> dict[str, Any]:
    own = {n: v for n, v in vars(module).items() if n not in ("_buffers", "_parameters", "_modules")}
    return {**own, **module._buffers}


def _slots(module: nn.Module) -> Iterator[Slot]:
    """Every tensor that ``module`` itself holds, but for parameters; buffers that are None are places too."""
    for name, held in _places(module).items():
        if isinstance(held, Tensor) or name in module._buffers:
            yield Slot(module, name)
        elif isinstance(held, (list, tuple)) and held and all(isinstance(t, Tensor) for t in held):
            yield from (Slot(module, name, i) for i in range(len(held)))
        elif isinstance(held, dict) and held and all(isinstance(t, Tensor) for t in held.values()):
            yield from (Slot(module, name, key) for key in held)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {slot.name: value for slot in _slots(module) if (value := slot.get()) is not None}


def _is_rope(slot: Slot) -> bool:
    module, name, value = slot.module, slot.attribute, slot.get()
    if value is not None and not _is_numbers(value):
        return False
    owner = bool(OWNER.search(type(module).__name__))
    if COS.search(name) or SIN.search(name) or JOINED.search(name):
        return name != "embed_positions" or owner
    if FREQUENCIES.search(name) or _COMPLEX.search(name):
        return not name.startswith("_") and (name not in ("freqs", "freq") or owner)
    if not owner or name.startswith("_") or value is None or value.numel() < 2:
        return False
    return name not in module._buffers or name in module._non_persistent_buffers_set  # else a checkpoint brings it


def _is_numbers(value: Tensor) -> bool:
    """Whether a tensor is a dense array of at least one dimension and element, of a dtype that one can calculate with."""
    dense = value.layout == torch.strided and not value.is_nested
    return dense and value.dtype in _DTYPES and value.dim() > 0 and value.numel() > 0


# --- running the code again -------------------------------------------------------------------------------------------

_Values = dict[str, tuple[Tensor, ...]]


class Truths:
    """Finds the truth about the tensors of a model's modules.

    Args:
        model: the whole model, whose constructor may be run again (on meta) to learn what it passes to its parts.
        config: its config, where the model does not carry it.
        accepts: says whether a tensor's values are those of a truth; what is cheap to find out is enough then.
    """

    def __init__(self, model: nn.Module, config: Any, accepts: Callable[[Tensor | None, Truth], bool]) -> None:
        self._modules = dict(model.named_modules())
        self._config, self._accepts = config, accepts
        self._calls: dict[str, dict[str, _Arguments]] = {}

    def of(self, path: str, module: nn.Module, slots: list[Slot]) -> dict[str, Truth]:
        """The truth about each slot of ``module``, found at ``path``; slots of which nothing is known are left out."""
        if isinstance(module, LiveBuffers):
            return self._fitting("derivation", slots, _tried(lambda: {n: (t,) for n, t in module.derive().items()}))
        arguments = _tried(_kept_arguments, module)
        complete = arguments is not None and not arguments.assumed
        own = _tried(_rebuilt, module, slots, arguments) if complete else None
        truths = self._fitting("own method", slots, own or _tried(_from_methods, module))
        if all(s.name in truths and self._accepts(s.get(), truths[s.name]) for s in slots):
            return truths
        for ancestor in self._ancestors(path):
            calls = self._calls_of(ancestor)
            passed = calls.get(path[len(ancestor) :].lstrip("."))
            if passed is not None:
                truths.update(self._fitting("construction", slots, _tried(_rebuilt, module, slots, passed)))
                break
        rest = [s for s in slots if s.name not in truths]
        if rest and (config := self._config_of(path, module)) is not None:
            truths.update(self._fitting("config", rest, _tried(_from_config, rest, config)))
            rest = [s for s in rest if s.name not in truths]
        if rest and arguments and arguments.assumed:
            assumed = self._assumed(module, slots, arguments)
            truths.update({s.name: assumed[s.name] for s in rest if s.name in assumed})
        return truths

    def _fitting(self, source: str, slots: list[Slot], values: _Values | None) -> dict[str, Truth]:
        found = {}
        for slot in slots:
            present = slot.get()
            fit = [
                v
                for v in (values or {}).get(slot.name, ())
                if _plausible(v) and (present is None or v.shape == present.shape)
            ]
            if fit:
                found[slot.name] = Truth(source, tuple(fit))
        return found

    def _ancestors(self, path: str) -> list[str]:
        """The paths above ``path``, the root's first."""
        parts = path.split(".") if path else []
        return [a for i in range(len(parts)) if (a := ".".join(parts[:i])) in self._modules]

    def _calls_of(self, path: str) -> dict[str, _Arguments]:
        """What the constructor of the module at ``path`` passes to its RoPE modules, by their paths below it."""
        if path not in self._calls:
            self._calls[path] = _tried(_recorded_calls, self._modules[path]) or {}
        return self._calls[path]

    def _config_of(self, path: str, module: nn.Module) -> Any:
        """The module's own config, else that of the nearest module above it, if it is not that of another modality."""
        own = _tried(getattr, module, "config", None)
        if own is not None:
            return own
        for ancestor in reversed(self._ancestors(path)):
            config = _tried(getattr, self._modules[ancestor], "config", None)
            if config is not None:
                break
        else:
            ancestor, config = "", None
        config = config if self._config is None else self._config
        below = re.split(r"[._]", (path if self._config is not None else path[len(ancestor) :]).lower())
        return None if _NOT_TEXT & set(below) else config

    def _assumed(self, module: nn.Module, slots: list[Slot], arguments: _Arguments) -> dict[str, Truth]:
        """The tensors by the defaults of arguments that left no trace. A default is borne out for a slot where another
        slot, whose values depend on it too, has the values that it gives."""
        values = _tried(_rebuilt, module, slots, arguments)
        truths = self._fitting("own method", slots, values)
        right = {s.name for s in slots if s.name in truths and self._accepts(s.get(), truths[s.name])}
        depending = {name: set(truths) for name in arguments.assumed}
        borne_out = set()
        for name, default in arguments.assumed.items():
            if isinstance(default, bool) or not isinstance(default, (int, float)):
                continue  # what a value that cannot be varied does is not known
            other = arguments.varied(name, type(default)(2 * default + 2))
            changed = _tried(_rebuilt, module, slots, other) or {}
            same = {n for n, t in truths.items() if n in changed and _equal(t.values[0], changed[n][0])}
            depending[name] = set(truths) - same
            if right & depending[name]:
                borne_out.add(name)
        found = {}
        for slot, truth in truths.items():
            open_ = [n for n in arguments.assumed if slot in depending[n] and n not in borne_out]
            said = ", ".join(f"{n}={arguments.assumed[n]!r}" for n in open_)
            found[slot] = Truth(truth.source, truth.values, said)
        return found


def _tried(find: Callable[..., Any], *arguments: Any) -> Any:
    """``find(*arguments)`` in a clean thread, or None: foreign code may raise anything, then the next source is asked."""

    def run() -> Any:
        with _undisturbed():
            return find(*arguments)

    try:
        return born_clean(run)
    except (Exception, SystemExit):  # noqa: BLE001
        return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Foreign code within sees the usual default dtype, and leaves that and the random numbers as they were."""
    dtype, state = torch.get_default_dtype(), random.getstate()
    try:
        with torch.random.fork_rng(devices=()):
            if dtype != torch.float32:
                torch.set_default_dtype(torch.float32)
            yield
    finally:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        random.setstate(state)


def _plausible(value: Tensor) -> bool:
    return tensor_fault(value) is None and bool(
        torch.isfinite(torch.view_as_real(value) if value.is_complex() else value).all()
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


@dataclass(frozen=True)
class _Arguments:
    """Arguments of a constructor, and the defaults among them that the object left no trace of."""

    positional: tuple
    named: dict[str, Any]
    assumed: dict[str, Any]

    def varied(self, name: str, value: Any) -> _Arguments:
        return _Arguments(self.positional, {**self.named, name: value}, self.assumed)


_ALIASES = {
    "rope_theta": ("theta", "base"),
    "theta": ("base", "rope_theta"),
    "base": ("theta", "rope_theta"),
    "dim": ("rotary_dim", "head_dim"),
    "max_position_embeddings": ("max_seq_len_cached", "max_seq_len"),
}


def _arguments(module: nn.Module) -> _Arguments | None:
    """The arguments of ``type(module)``, as the module's attributes still hold them; None where one is lost."""
    if next(module.parameters(), None) is not None:
        return None
    named, assumed = {}, {}
    for name, parameter in list(inspect.signature(type(module).__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or name == "device":
            continue
        for attribute in (name, f"_{name}", *_ALIASES.get(name, ())):
            if attribute in vars(module):
                named[name] = vars(module)[attribute]
                break
        else:
            if parameter.default is parameter.empty:
                return None
            assumed[name] = parameter.default
    return _Arguments((), named, assumed)


def _kept_arguments(module: nn.Module) -> _Arguments | None:
    """:func:`_arguments`, if a module that is made with them keeps the same: else an attribute is no longer what was
    passed under its name, but what became of it."""
    arguments = _arguments(module)
    if arguments is None:
        return None
    named = _copied(arguments).named
    again = _arguments(_built(module, _Arguments((), named, arguments.assumed)))
    return arguments if again is not None and again.named == named else None


def _copied(arguments: _Arguments) -> _Arguments:
    """Arguments that a constructor may change."""
    given = (*arguments.positional, *arguments.named.values())
    if any(isinstance(value, (Tensor, nn.Module)) for value in given):
        raise TypeError("made from tensors or modules")
    return copy.deepcopy(arguments)


def _built(module: nn.Module, arguments: _Arguments) -> nn.Module:
    """``type(module)`` called again on the CPU."""
    with torch.device("cpu"):
        return type(module)(*arguments.positional, **arguments.named)


def _settled(module: nn.Module, arguments: _Arguments) -> tuple[nn.Module, _Values]:
    """``type(module)`` called again, and those of its tensors that are not random."""
    state = torch.get_rng_state()
    fresh = _built(module, _copied(arguments))
    values: _Values = {name: (tensor.clone(),) for name, tensor in _tensors(fresh).items()}
    if not torch.equal(torch.get_rng_state(), state):
        other = _tensors(_built(module, _copied(arguments)))
        values = {name: value for name, value in values.items() if name in other and _equal(value[0], other[name])}
    return fresh, values


def _rebuilt(module: nn.Module, slots: list[Slot], arguments: _Arguments) -> _Values:
    """The tensors of a module built anew, brought to where forwards have brought the present one."""
    fresh, values = _settled(module, arguments)
    for kind, positions, keywords in _long_forwards(module):
        with torch.device("cpu"):
            fresh.forward(torch.zeros(1, dtype=torch.float32), torch.tensor([[positions]]), **keywords)
        for name, tensor in _tensors(fresh).items():
            if kind == "longrope":  # each forward chooses between the two
                values[name] = (*values.get(name, ()), tensor)
            else:
                values[name] = (tensor,)
    tables = [s for s in slots if s.name in values and (COS.search(s.name) or SIN.search(s.name))]
    rows = max((_rows(t) for s in tables if (t := s.get()) is not None), default=0)
    if tables and rows != _rows(values[tables[0].name][0]) and hasattr(fresh, "_set_cos_sin_cache"):
        fresh._set_cos_sin_cache(seq_len=rows, device=torch.device("cpu"), dtype=torch.float32)
        values.update({name: (tensor,) for name, tensor in _tensors(fresh).items()})
    lazy = [s for s in slots if s.item is not None and s.name not in values]
    if lazy:  # tables, one for each axis, that the first forward makes
        axes = sum(s.attribute == lazy[0].attribute for s in lazy)
        with torch.device("cpu"):
            fresh.forward(torch.zeros(1, axes, dtype=torch.int64))
        values.update({name: (tensor,) for name, tensor in _tensors(fresh).items()})
    return values


def _rows(table: Tensor) -> int:
    return table.shape[-2] if table.dim() > 1 else 0


def _long_forwards(module: nn.Module) -> Iterator[tuple[str, int, dict[str, str]]]:
    """The positions to run a fresh module of transformers' with, so that it follows a sequence's length as the present
    one did: the rope type, the position, and keywords of the forward."""
    kinds = getattr(module, "rope_type", None)
    for layer, kind in kinds.items() if isinstance(kinds, Mapping) else ((None, kinds),):
        keywords = {} if layer is None else {"layer_type": layer}
        seen = getattr(module, "max_seq_len_cached", None)
        if layer is not None:
            seen = getattr(module, f"{layer}_max_seq_len_cached", seen)
        if seen is None or not isinstance(kind, str):
            continue
        if kind == "longrope":
            yield kind, 1 << 30, keywords
        elif "dynamic" in kind and int(seen) > int(getattr(module, "original_max_seq_len", seen)):
            yield kind, int(seen) - 1, keywords


def _from_methods(module: nn.Module) -> _Values:
    """vLLM's and sglang's shape: methods that compute the table from attributes. It is kept in the module's ``dtype``."""
    values: _Values = {}
    bare = copy.copy(module)
    for name, held in vars(module).items():  # what the methods assign must not reach the module
        vars(bare)[name] = copy.copy(held) if isinstance(held, (dict, list, set)) else held
    compute = getattr(type(module), "_compute_cos_sin_cache", None)
    if compute is not None:
        with torch.device("cpu"):
            table = compute(bare)
        kept, dtype = module._buffers.get("cos_sin_cache"), getattr(module, "dtype", None)
        if isinstance(table, Tensor):
            values["cos_sin_cache"] = (table.to(dtype) if kept is not None and kept.dtype == dtype else table,)
    frequencies = getattr(type(module), "_compute_inv_freq", None)
    if frequencies is not None and hasattr(module, "base"):
        if list(inspect.signature(frequencies).parameters)[1:] == ["base"]:
            with torch.device("cpu"):
                values["inv_freq"] = (frequencies(bare, module.base),)
    return values


def _recorded_calls(model: nn.Module) -> dict[str, _Arguments]:
    """The arguments that the constructor of ``model``, run again on meta, passes to its RoPE modules."""
    wanted = {path: type(part) for path, part in model.named_modules() if part is not model and rope_slots(part)}
    codes = {kind: getattr(inspect.unwrap(kind.__init__), "__code__", None) for kind in set(wanted.values())}
    calls: list[tuple[nn.Module, _Arguments]] = []

    def watch(frame, event, _):
        if event != "call" or frame.f_code not in known:
            return
        code, held = frame.f_code, frame.f_locals
        names, rest, keywords = inspect.getargs(code)
        made = held[names[0]]
        if codes.get(type(made)) is code:
            positional = [held[n] for n in names[1 : code.co_argcount]] + list(held.get(rest, ()))
            named = {n: held[n] for n in names[code.co_argcount :]} | dict(held.get(keywords, {}))
            places = dict(zip(names[1 : code.co_argcount], range(code.co_argcount)))
            if "device" in places:
                positional[places["device"]] = torch.device("cpu")
            if "device" in named:
                named["device"] = torch.device("cpu")
            calls.append((made, _Arguments(tuple(positional), named, {})))

    known = {code for code in codes.values() if code is not None}
    build = _constructor(model)
    before = sys.getprofile()
    sys.setprofile(watch)  # of this thread alone
    try:
        with torch.device("meta"):
            again = build()
    finally:
        sys.setprofile(before)
    made = {id(part): arguments for part, arguments in calls}
    parts = dict(again.named_modules())
    return {
        path: made[id(parts[path])]
        for path, kind in wanted.items()
        if path in parts and type(parts[path]) is kind and id(parts[path]) in made
    }


def _constructor(model: nn.Module) -> Callable[[], nn.Module]:
    """A call that makes ``model`` anew from the config that it carries, as transformers and diffusers do."""
    kind, config = type(model), getattr(model, "config", None)
    if isinstance(config, Mapping) and hasattr(kind, "from_config"):
        return lambda: kind.from_config(copy.deepcopy(dict(config)))
    if config is None or isinstance(config, Mapping):
        raise TypeError(f"{kind.__name__} does not say how it is made")
    return lambda: kind(copy.deepcopy(config))


def _from_config(slots: list[Slot], config: Any) -> _Values:
    """Frequencies and tables by a config."""
    values: _Values = {}
    kinds = layer_types(config)

    @cache
    def read(kind: str | None) -> RopeArguments:
        return read_rope_config(config, layer_type=kind, max_position=None)

    @cache
    def spec(kind: str | None) -> RopeSpec:
        numbers = read(kind)
        return normalize_rope(
            numbers.head_size, numbers.rotary_dim, numbers.max_position, numbers.base, numbers.rope_scaling
        )

    @cache
    def full_table(kind: str | None, rows: int) -> Tensor:
        return spec(kind).table(rows)

    for slot in slots:
        name, present = slot.name, slot.get()
        kind = next((k for k in kinds if name.startswith(k)), None)
        if present is None or slot.item is not None:
            continue
        if FREQUENCIES.search(name):
            values[name] = (spec(kind).frequencies()[0],)
            continue
        if not (COS.search(name) or SIN.search(name) or JOINED.search(name) or _COMPLEX.search(name)):
            continue
        table = full_table(kind, present.shape[-2] if present.dim() > 1 else present.shape[0])
        half = table.shape[1] // 2
        if _COMPLEX.search(name):
            if present.is_complex():
                values[name] = (torch.complex(table[:, :half], table[:, half:]),)
            continue
        if name == "embed_positions":  # GPT-J's table has the sines first
            table = table.roll(half, dims=1)
        part = table if JOINED.search(name) else table[:, half:] if SIN.search(name) else table[:, :half]
        if present.shape[-1] == 2 * part.shape[1]:
            if not read(kind).is_neox_style:
                continue  # its code may repeat each element or the whole
            part = torch.cat((part, part), dim=1)
        values[name] = (part.reshape(present.shape) if part.numel() == present.numel() else part,)
    return values
