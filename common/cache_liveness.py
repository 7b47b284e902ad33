"""Dead or alive? The guard for process-wide caches of modules, and the base class of modules that rebuild themselves.

Nothing here knows of RoPE. A cached module is shared by every model that asks for its key, and any of them can
ruin it for the rest: move it to meta, free its storage, cast it, fill it with garbage. What is left is still a
tensor of the right shape, so nothing downstream notices. The rule is: whoever is about to use a derived buffer
checks in O(1) that it is still what was derived, and rebuilds it if not.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger("live_rope")

_STAMPS = itertools.count(1)
_LOCK = threading.RLock()
_CACHES: dict[str, LiveCache] = {}
_LENDERS: dict[str, Any] = {}  # caches of tensors that are lent out: with nbytes, clear(device) and report()
_LIVE_MODULES: weakref.WeakSet[LiveBuffers] = weakref.WeakSet()
_OWNERS: dict[Hashable, weakref.WeakSet[LiveBuffers]] = {}  # derivation -> the modules that hold its values


def _forget_parents_lock() -> None:
    """A forked child has one thread; a lock that another thread held at the fork would never be released."""
    global _LOCK
    _LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents_lock)


class DeadBufferError(RuntimeError):
    """A derived buffer cannot be right and cannot be rebuilt where it was noticed."""


def born_clean(build: Callable[..., Any], *args: Any) -> Any:
    """Return ``build(*args)`` as run in a thread of its own.

    Autocast, inference and grad mode, dispatch and function modes (fake tensors, a default device), functorch and
    tracing state all belong to a thread, so a fresh one has none of them, whatever surrounds the caller.
    """

    result: Future[Any] = Future()

    def run() -> None:
        try:
            with torch.no_grad():
                result.set_result(build(*args))
        except BaseException as error:  # noqa: BLE001 - raised again where the caller waits
            result.set_exception(error)

    try:
        threading.Thread(target=run, name="live-rope-build").start()
    except RuntimeError:  # no more threads to be had, or the interpreter is shutting down
        run()
    return result.result()


_set_eval_frame = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_set_eval_frame = getattr(_set_eval_frame, "set_eval_frame", lambda callback: callback)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, never traced by ``torch.compile``: what ``torch.compiler.disable`` does, without the second that
    importing the compiler takes."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before = _set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_eval_frame(before)

    return wrapper


# --- faults ---------------------------------------------------------------------------------------------------------


def tensor_fault(tensor: Tensor | None) -> str | None:
    """Why the memory of ``tensor`` is gone, or None. Reads no data; an empty tensor is alive."""
    if tensor is None:
        return "missing"
    if type(tensor) is not Tensor:
        if _is_fake(tensor):
            return "fake"
        if nn.parameter.is_lazy(tensor):  # it has no shape yet, and loses nothing
            return None
    if tensor.device.type == "meta":
        return "on meta"
    if tensor.layout != torch.strided or tensor.is_nested or tensor.numel() == 0:
        return None
    try:
        held = tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a subclass without a storage of its own keeps its memory elsewhere
        return None
    last = tensor.storage_offset() + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    reach = (last + 1) * tensor.element_size()
    if held == 0:
        return "storage freed"
    return f"storage too small: {held} of the {reach} bytes it reaches" if held < reach else None


def _is_fake(tensor: Tensor) -> bool:
    return any(kind.__name__ in ("FakeTensor", "FunctionalTensor") for kind in type(tensor).__mro__)


def find_dead_buffer(module: nn.Module) -> tuple[str, str] | None:
    """The first buffer of ``module`` (submodules included) whose memory is gone, as ``(name, fault)``, or None.

    Gone: on meta, missing (None), fake, or with a storage smaller than the bytes that shape, strides and offset
    reach. A :class:`LiveBuffers` also misses the derived buffers that were deleted. No data is read.
    """
    for path, part in module.named_modules():
        names = dict.fromkeys(part._buffers)
        if isinstance(part, LiveBuffers):
            names.update(dict.fromkeys(part._shapes))
        for name in names:
            fault = tensor_fault(part._buffers.get(name))
            if fault is not None:
                return (f"{path}.{name}" if path else name), fault
    return None


_MIX_SEED, _MIX_STEP = 0x9E3779B9, 0x9E3779B1
_BLOCK_WORDS = 1 << 18  # one block of the checksum's intermediates stays in the processor's cache


def row_checks(*tensors: Tensor) -> Tensor:
    """A checksum of each row's bits: int32 ``[rows]`` on the tensors' device.

    Args:
        tensors: float32 or int32 ``[rows, ...]`` each; their words follow one another within a row.

    ``check = seed + sum_j (w_j ^ (w_j >>> 15)) * m_j  (mod 2**32)`` with odd multipliers ``m_j``: any change of one
    word changes it, and so do, but for one case in 2**32, all others (sign flips, swapped halves, another table).
    """
    rows = tensors[0].shape[0]
    words = [t.detach().reshape(rows, -1).view(torch.int32) for t in tensors]
    device = words[0].device
    out = torch.full((rows,), _as_int32(_MIX_SEED), dtype=torch.int32, device=device)
    first = 0
    for part in words:
        width = part.shape[1]
        multipliers = [_as_int32(_MIX_STEP * (2 * j + 1)) for j in range(first, first + width)]
        weights = torch.tensor(multipliers, dtype=torch.int32, device=device)
        step = max(1, _BLOCK_WORDS // max(width, 1))
        for at in range(0, rows, step):
            block = part[at : at + step]
            mixed = (block >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(block).mul_(weights)
            out[at : at + step] += mixed.sum(dim=1, dtype=torch.int32)
        first += width
    return out


def _as_int32(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


# --- modules that rebuild themselves --------------------------------------------------------------------------------


class LiveBuffers(nn.Module):
    """A module whose buffers are a pure function of its constructor's arguments, and stay that function's value.

    A subclass implements :meth:`shapes`, :meth:`derive` and (to share memory with equal modules)
    :meth:`derivation`, and calls :meth:`build_buffers` at the end of its constructor. It then reads a buffer only
    through :meth:`live`. The buffers are registered as non-persistent.

    They keep their dtype through ``half()``, ``double()`` and ``to(dtype)``; ``to(device)``, ``to_empty(device)``
    and a loader that assigns tensors leave right values; ``to("meta")`` frees them; a copy, a pickle and
    ``torch.save`` carry the arguments and derive anew. What is remembered of a tensor is a number written on it and
    its version, address and size: neither a reference to it nor to its memory.
    """

    buffer_dtype = torch.float32
    learned: tuple[str, ...] = ()  # names of the parameters that derive() reads; a module that has any is never shared

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._reset()

    def _reset(self) -> None:
        self._fingerprints: dict[str, tuple] = {}
        self._storages: dict[str, int] = {}
        self._checks: dict[str, Tensor] = {}
        self._twins: dict[torch.device, LiveBuffers] = {}
        self._sole: tuple | None = None  # name and fingerprint where there is one buffer: what a lookup compares
        self._owned: Hashable | None = None
        self._asleep = False
        self.heals = 0

    # what a subclass says

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each derived buffer."""

    @abstractmethod
    def derive(self) -> dict[str, Tensor]:
        """The values of each derived buffer: contiguous CPU tensors. Called in a clean thread, under the lock: it must
        pass ``device`` and ``dtype`` to every factory and must not use another module of this kind."""

    def derivation(self) -> Hashable | None:
        """What the values depend on; modules that give the same share memory. None: never shared."""
        return None

    def checksum(self, tensor: Tensor) -> Tensor:
        """See :func:`row_checks`; a subclass may bring a faster way to the same numbers."""
        return row_checks(tensor)

    # building

    @untraced
    def build_buffers(self, device: torch.device | str | None = None) -> None:
        """Derive and register the buffers, on ``device`` or the default device."""
        self._shapes = self.shapes()
        device = torch.get_default_device() if device is None else torch.device(device)
        with _LOCK:
            _LIVE_MODULES.add(self)
            self._place(_with_index(device))

    def _place(self, device: torch.device) -> None:
        """Make the buffers right on ``device``, from an equal module if there is one."""
        self._twins.clear()
        if device.type == "meta":
            self._disown()
            self._sole, self._asleep = None, False
            self._fingerprints, self._checks = {}, {}
            meta = born_clean(lambda: {n: torch.empty(s, device="meta") for n, s in self._shapes.items()})
            for name, tensor in meta.items():
                self._register(name, tensor)
            return
        for name, tensor in self._values(device).items():
            self._adopt(name, tensor)
        self._own()

    def _values(self, device: torch.device) -> dict[str, Tensor]:
        """Right values on ``device``: views of an equal module's memory, or derived and moved there."""
        key = self.derivation()
        for other in list(_OWNERS.get((key, str(device)), ())) if key is not None else ():
            # verified: its memory may have been overwritten without a trace. The tensors that were looked at, since
            # an owner that asks no lock may put others in their place meanwhile
            shared = {n: other._buffers.get(n) for n in self._shapes}
            there = all(isinstance(b, Tensor) and b.device == device for b in shared.values())
            if other is not self and there and all(other._fault(n, b, True) is None for n, b in shared.items()):
                self._checks = other._checks
                return born_clean(lambda shared=shared: {n: b.detach() for n, b in shared.items()})

        def build() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            derived = self.derive()
            checks = {n: self.checksum(t) for n, t in derived.items()}
            return {n: t.to(device) for n, t in derived.items()}, checks

        values, self._checks = born_clean(build)
        return values

    def _register(self, name: str, tensor: Tensor) -> None:
        """Put ``tensor`` where ``self.<name>`` finds it, whatever was assigned under that name."""
        self.__dict__.pop(name, None)
        self._parameters.pop(name, None)
        self._modules.pop(name, None)
        self._buffers[name] = tensor
        self._non_persistent_buffers_set.add(name)

    def _adopt(self, name: str, tensor: Tensor) -> None:
        """Register ``tensor``, known to be right, and remember how to know it again."""
        if self._buffers.get(name) is not tensor:
            self._register(name, tensor)
        stamp = getattr(tensor, "_live_stamp", None)
        if stamp is None or self._fingerprints.get(name, (None,))[0] != stamp:
            stamp = tensor._live_stamp = next(_STAMPS)
        self._fingerprints[name] = (*_facts(tensor), *self._sources())
        storage = tensor.untyped_storage()
        self._storages[name] = storage._live_stamp = getattr(storage, "_live_stamp", None) or next(_STAMPS)
        self._sole = (name, *self._fingerprints[name]) if len(self._shapes) == 1 and not self.learned else None
        self._asleep = False

    def _own(self) -> None:
        """Offer the buffers to equal modules on the same device."""
        key = self.derivation()
        buffer = next((b for b in map(self._buffers.get, self._shapes) if b is not None), None)
        if key is None or buffer is None:
            return
        for empty in [k for k, owners in _OWNERS.items() if not owners]:
            del _OWNERS[empty]
        owned = (key, str(buffer.device))
        if self._owned != owned:
            self._disown()
            self._owned = owned
            _OWNERS.setdefault(owned, weakref.WeakSet()).add(self)

    def _disown(self) -> None:
        owned, self._owned = self._owned, None
        owners = _OWNERS.get(owned)
        if owners is not None:
            owners.discard(self)
            if not owners:
                _OWNERS.pop(owned, None)

    def _sources(self) -> tuple:
        """The present values of the parameters that :meth:`derive` reads, as checksums: loaders write them through
        ``.data``, which leaves no other trace."""
        if not self.learned:
            return ()
        return born_clean(lambda: tuple(_content(getattr(self, name, None)) for name in self.learned))

    # the check

    def live(self, name: str, device: torch.device | None = None) -> Tensor:
        """The derived buffer ``name``, right; on ``device`` if one is given, else where it lies.

        Unchanged costs five attribute reads and no data. A changed one is compared by value: equal is accepted,
        anything else is rebuilt with one warning, in the same tensor and memory where that is possible.
        """
        state = self.__dict__  # an attribute read on an nn.Module costs as much as the rest of this
        try:
            buffer = state["_buffers"][name]
            stamp, version, address, size = state["_fingerprints"][name]
            if (
                buffer._live_stamp == stamp
                and buffer._version == version
                and buffer.data_ptr() == address
                and buffer.nbytes == size
                and (device is None or buffer.device == device)
            ):
                return buffer
        except (AttributeError, KeyError, ValueError, RuntimeError, NotImplementedError):
            pass  # missing, foreign, fake, following parameters: told apart in _revive
        return self._revive(name, device)

    def intact(self) -> bool:
        """Whether every derived buffer is right. One unchanged since it was last known right is not read; one that
        changed is compared by value."""
        buffers = self._buffers
        try:
            for name, known in self._fingerprints.items():
                buffer = buffers[name]
                if _facts(buffer) != known and self._fault(name, buffer) is not None:
                    return False
        except (AttributeError, KeyError, RuntimeError, NotImplementedError):
            return False
        return bool(self._fingerprints)

    @untraced
    def fault(self, *, verify: bool = False) -> tuple[str, str] | None:
        """The first derived buffer that is not right, as ``(name, fault)``. A changed one is compared by value and
        accepted if equal; ``verify`` compares the unchanged ones too."""
        with _LOCK:
            for name in self._shapes:
                fault = self._fault(name, self._buffers.get(name), verify)
                if fault is not None:
                    return name, fault
        return None

    def _fault(self, name: str, buffer: Tensor | None, verify: bool = False) -> str | None:
        """What is wrong with ``buffer``, found under ``name``. The caller goes on with the tensor that it asked about:
        what lies under the name may be another one by then."""
        with _LOCK:
            gone = "missing" if not isinstance(buffer, Tensor) else tensor_fault(buffer)
            if gone is not None:
                return gone
            try:
                odd = (
                    buffer.layout != torch.strided
                    or buffer.is_nested
                    or buffer.is_neg()
                    or (buffer.numel() and not buffer.data_ptr())
                )
            except (RuntimeError, NotImplementedError, ValueError):  # batched by functorch, nested, lazy ...
                odd = True
            if odd:
                return f"replaced by a {type(buffer).__name__} whose values are not those of its memory"
            if buffer.is_inference():
                return "an inference tensor: its changes would leave no trace"
            sources = self._sources()
            now = (*_facts(buffer), *sources)
            known, shape = self._fingerprints.get(name), self._shapes[name]
            if known is not None and known[4:] != sources:
                return "a parameter that it is derived from changed"
            if buffer.dtype != self.buffer_dtype:
                return f"cast: {buffer.dtype} instead of {self.buffer_dtype}"
            if tuple(buffer.shape) != shape or not buffer.is_contiguous():
                return f"reshaped: {tuple(buffer.shape)} with strides {buffer.stride()} instead of {shape}"
            if now == known and not verify:
                return None
            wrong = born_clean(self._wrong_rows, name, buffer)
            if wrong is None:
                self._adopt(name, buffer)
            return wrong

    def _wrong_rows(self, name: str, buffer: Tensor) -> str | None:
        checks = self._checks.get(name)
        if checks is None:
            checks = self._checks[name] = self.checksum(self.derive()[name])
        wrong = self.checksum(buffer).to(checks.device) != checks
        if not bool(wrong.any()):
            return None
        row = int(wrong.nonzero()[0])
        values = buffer[row].detach().to("cpu").reshape(-1)[:3].tolist()
        return f"values changed: {int(wrong.sum())} of {wrong.numel()} rows, first row {row} begins {values}"

    @untraced
    def _revive(self, name: str, device: torch.device | None) -> Tensor:
        with _LOCK:
            buffer = self._buffers.get(name)
            at = buffer.device if isinstance(buffer, Tensor) else None
            if device is not None and at is not None and at.type != "meta" and at != device:
                return self._twin(device).live(name)
            if self._asleep:
                logger.info("%s: waking %s", type(self).__name__, name)
                return self._rebuild(device)[name]
            fault = self._fault(name, buffer)
            return buffer if fault is None else self.heal(name, fault, device)[name]

    @untraced
    def heal(self, name: str, fault: str, device: torch.device | None = None) -> dict[str, Tensor]:
        """Rebuild every derived buffer, with one warning that says what was wrong with ``name``; the right tensors."""
        with _LOCK:
            self.heals += 1
            if not fault.startswith("a parameter"):  # following a parameter is no accident
                logger.warning("%s: rebuilding buffer %s (%s)", type(self).__name__, name, fault)
            return self._rebuild(device)

    def _rebuild(self, device: torch.device | None) -> dict[str, Tensor]:
        """Make every derived buffer right again: where it lies if its memory is ours, else anew; the right tensors."""
        present = [b for b in map(self._buffers.get, self._shapes) if isinstance(b, Tensor)]
        if device is None or (present and present[0].device.type == device.type and device.index is None):
            real = [b.device for b in present if b.device.type != "meta" and not _is_fake(b)]
            device = real[0] if real else (device or torch.device("cpu"))
        values = self._values(device)

        def restore() -> None:
            for name, value in values.items():
                buffer = self._buffers.get(name)
                if self._made(buffer, name, device):
                    storage = buffer.untyped_storage()
                    if (
                        getattr(storage, "_live_stamp", None) != self._storages[name]
                        or storage.nbytes() < value.nbytes
                        or buffer.dtype != value.dtype
                    ):
                        buffer.data = value  # its memory is gone or a stranger's
                    else:
                        buffer.set_(storage, 0, value.shape, value.stride())
                        if buffer.data_ptr() != value.data_ptr():
                            buffer.copy_(value)
                    values[name] = buffer

        born_clean(restore)
        for name, value in values.items():
            self._adopt(name, value)
        self._own()
        return values

    def _made(self, buffer: Tensor | None, name: str, device: torch.device) -> bool:
        """Whether ``buffer`` is the tensor that we registered, and lies on ``device``: no other is written to."""
        known = self._fingerprints.get(name)
        if not isinstance(buffer, Tensor) or known is None or getattr(buffer, "_live_stamp", None) != known[0]:
            return False
        return buffer.device == device and not _is_fake(buffer) and not buffer.is_inference()

    def _twin(self, device: torch.device) -> LiveBuffers:
        """An equal module on ``device``, for the models there: this one stays where its other owners use it."""
        device = _with_index(device)
        if device not in self._twins:
            twin = type(self).__new__(type(self))
            twin.__setstate__({**self.__getstate__(), "_home": str(device)})
            self._twins[device] = twin
        return self._twins[device]

    # moves, casts, copies

    @untraced
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LiveBuffers:
        """Follow ``fn`` (``to``, ``cuda``, ``half``, ``to_empty``, ``share_memory`` ...) to its device, not its dtype."""
        ours = {id(b) for b in map(self._buffers.get, self._shapes) if b is not None}
        super()._apply(lambda tensor: tensor if id(tensor) in ours else fn(tensor), recurse)
        with _LOCK:
            for name in self._shapes:
                buffer = self._buffers.get(name)
                here = buffer.device if isinstance(buffer, Tensor) else torch.device("cpu")
                target, in_place = _destination(fn, here)
                if target != here:
                    self._place(_with_index(target))
                    break
                if target.type != "meta" and not self._asleep:
                    buffer = self.live(name)
                    if in_place:
                        fn(buffer)
                        self.live(name)
        return self

    def _replicate_for_data_parallel(self) -> LiveBuffers:
        """A replica has tensors of its own, and knows them by itself."""
        replica = super()._replicate_for_data_parallel()
        replica._reset()
        return replica

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        first = next((b for b in map(self._buffers.get, self._shapes) if isinstance(b, Tensor)), None)
        state["_home"] = str(first.device) if first is not None else "cpu"
        state["_buffers"] = {n: b for n, b in dict(self._buffers).items() if n not in self._shapes}
        for name in ("_fingerprints", "_sole", "_storages", "_checks", "_twins", "_owned", "_asleep", "heals"):
            state.pop(name, None)
        return state

    @untraced
    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        home = torch.device(state.pop("_home", "cpu"))
        super().__setstate__(state)
        self._reset()
        with _LOCK:
            _LIVE_MODULES.add(self)
            self._place(home if _available(home) else torch.device("cpu"))

    # memory

    def release_memory(self, device: torch.device | None = None) -> None:
        """Free the bytes of the derived buffers (those on ``device`` only, if given); the next use derives them again into
        the same tensors. Where a view, an array or a rotation that is running still holds the memory, it is freed as
        soon as that lets go."""
        with _LOCK:
            for twin in self._twins.values():
                twin.release_memory(device)
            if not self._lies_on(device):
                return
            for name, shape in self._shapes.items():
                buffer = self._buffers.get(name)
                if not isinstance(buffer, Tensor) or tensor_fault(buffer) is not None:
                    continue
                empty = born_clean(_without_memory, shape, buffer.dtype, buffer.device)
                if self._made(buffer, name, buffer.device):
                    buffer.data = empty  # the memory itself is not cut: others may be reading it
                else:  # a stranger's tensor is his, we only let go of it
                    self._register(name, empty)
            self._disown()
            self._checks = {}
            self._asleep = True

    def _lies_on(self, device: torch.device | None) -> bool:
        return any(_is_on(self._buffers.get(name), device) for name in self._shapes)

    def invalidate_memory(self) -> None:
        """Forget that the buffers are right: the next use compares their values before it trusts them."""
        with _LOCK:
            self._sole = None
            for name, known in self._fingerprints.items():
                self._fingerprints[name] = (known[0], -1, *known[2:])


def _without_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    nothing = torch.empty(1, dtype=dtype, device=device)
    tensor = nothing.expand(shape)
    nothing.untyped_storage().resize_(0)
    return tensor


def _content(tensor: Tensor | None) -> tuple:
    fault = tensor_fault(tensor)
    if fault is not None:
        return (fault,)
    values = tensor.detach() if tensor.element_size() >= 4 else tensor.detach().float()
    return tuple(row_checks(values.reshape(-1, values.shape[-1] if values.dim() else 1)).tolist())


def _facts(tensor: Tensor) -> tuple:
    """What tells a tensor from its earlier and later selves: our mark on it, version, address, size. A tensor without
    the mark (fake, perhaps) is a stranger's, and not asked for the rest."""
    stamp = getattr(tensor, "_live_stamp", None)
    return (None,) if stamp is None else (stamp, tensor._version, tensor.data_ptr(), tensor.nbytes)


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` means the current device of the calling thread: say which, before another thread allocates there."""
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    module = getattr(torch, device.type, None)
    current = getattr(module, "current_device", None)
    return torch.device(device.type, current()) if current is not None and module.is_available() else device


def _available(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    module = getattr(torch, device.type, None)
    return module is not None and module.is_available() and (device.index or 0) < module.device_count()


def _destination(fn: Callable[[Tensor], Tensor], here: torch.device) -> tuple[torch.device, bool]:
    """Where ``fn`` takes a float32 tensor that lies on ``here``, and whether it works on the tensor itself."""
    probe = torch.zeros(1, dtype=torch.float32, device=here)
    try:
        moved = fn(probe)
    except NotImplementedError:  # data cannot leave meta, but the values are known: ask where a real one would go
        moved = fn(torch.zeros(1, dtype=torch.float32, device="cpu"))
    return moved.device, moved is probe


# --- caches of modules ----------------------------------------------------------------------------------------------


class LiveCache(MutableMapping[Hashable, nn.Module]):
    """A process-wide cache of shared modules: a mapping that counts, and that can hold its entries weakly.

    Args:
        name: how reports and warnings call it.
        describe: a key in words, for reports.
    """

    def __init__(self, name: str, describe: Callable[[Hashable], str] = str) -> None:
        self.name, self.describe = name, describe
        self.hits = self.misses = 0
        self.drops: Counter[str] = Counter()
        self.build_seconds = 0.0
        self._hold({})
        _CACHES[name] = self

    def _hold(self, entries: MutableMapping[Hashable, nn.Module]) -> None:
        self._entries = entries
        self.get = entries.get  # a lookup is one call of the mapping's own method

    def set_weak(self, weak: bool = True) -> None:
        """Hold entries only as long as somebody else does (``weak``), or for ever."""
        with _LOCK:
            self._hold(weakref.WeakValueDictionary(self._entries) if weak else dict(self._entries))

    def __getitem__(self, key: Hashable) -> nn.Module:
        return self._entries[key]

    def __setitem__(self, key: Hashable, module: nn.Module) -> None:
        self._entries[key] = module

    def __delitem__(self, key: Hashable) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"LiveCache({self.name!r}, {dict(self._entries)!r})"


def get_live_entry(cache: MutableMapping[Hashable, nn.Module], key: Hashable) -> nn.Module | None:
    """The module that ``cache`` holds for ``key`` if it is alive and right, else None.

    A module is shared by every model that asked for its key, so one model's teardown kills it for all later ones: a
    dead entry is dropped, with one warning that names key, buffer and fault. Only while the default device is meta
    is it returned as it is, because then the layers of one model under construction are meant to share it; the
    default device is asked for only then, being dearer than all the rest.
    """
    counted = type(cache) is LiveCache
    entry = (cache._entries if counted else cache).get(key)
    if entry is None:
        return None
    try:
        state = entry.__dict__
        name, stamp, version, address, size = state["_sole"]
        buffer = state["_buffers"][name]
        if (
            buffer._live_stamp == stamp
            and buffer._version == version
            and buffer.data_ptr() == address
            and buffer.nbytes == size
        ):
            if counted:
                cache.hits += 1
            return entry
    except (AttributeError, KeyError, TypeError, RuntimeError, NotImplementedError):
        pass  # several buffers, none, or one that is gone: told apart below
    if entry.intact() if isinstance(entry, LiveBuffers) else find_dead_buffer(entry) is None:
        if counted:
            cache.hits += 1
        return entry
    if torch.get_default_device().type == "meta":
        return entry
    with _LOCK:
        if isinstance(entry, LiveBuffers):
            fault = None if entry._asleep else entry.fault()
        else:
            fault = find_dead_buffer(entry)
        if fault is None:  # asleep, and woken by its use; or healed by another thread meanwhile
            if isinstance(cache, LiveCache):
                cache.hits += 1
            return entry
        if cache.get(key) is entry:  # not another thread's fresh one
            del cache[key]
            logger.warning("dropping the cached module for key %s: buffer %s (%s)", key, *fault)
            if isinstance(cache, LiveCache):
                cache.drops[fault[1].split(":")[0]] += 1
    return None


@untraced
def get_or_build(
    cache: MutableMapping[Hashable, nn.Module], key: Hashable, build: Callable[[], nn.Module]
) -> nn.Module:
    """The live entry for ``key``, built once however many threads ask; nothing is cached when ``build`` raises."""
    entry = get_live_entry(cache, key)
    if entry is not None:
        return entry
    with _LOCK:
        entry = get_live_entry(cache, key)
        if entry is None:
            started = time.perf_counter()
            entry = build()
            cache[key] = entry
            if isinstance(cache, LiveCache):
                took = time.perf_counter() - started
                cache.misses += 1
                cache.build_seconds += took
                logger.info("%s: built %s in %.3f s", cache.name, cache.describe(key), took)
    return entry


def register_lender(name: str, cache: Any) -> None:
    """Let the functions below see a cache of tensors that belongs to no module: ``cache.nbytes``, ``cache.clear(device)``
    which drops what lies there (or everything) and gives the bytes, and ``cache.report()``, an entry of
    :func:`cache_report`. What it lent out is the callers' own, so nothing of it is ever in use."""
    _LENDERS[name] = cache


def _table_bytes() -> int:
    """Bytes of all derived buffers, one memory counted once."""
    storages: dict[tuple[str, int], int] = {}
    for module in list(_LIVE_MODULES):
        for name in module._shapes:
            buffer = module._buffers.get(name)
            if isinstance(buffer, Tensor) and tensor_fault(buffer) is None:
                storage = buffer.untyped_storage()
                storages[str(buffer.device), storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _freed(what: str, act: Callable[[], None], device: torch.device | None = None) -> int:
    """Run ``act`` under the lock and clear the lenders; the bytes that both freed."""
    with _LOCK:
        before = _table_bytes()
        act()
        freed = before - _table_bytes() + sum(cache.clear(device) for cache in _LENDERS.values())
    logger.info("%s: %d bytes freed", what, freed)
    return freed


def evict_unused() -> int:
    """Drop the entries that only their cache holds; the bytes freed. A lookup meanwhile waits, or keeps its entry."""
    gc.collect()  # what a discarded model holds through a reference cycle is held by nobody

    def act() -> None:
        for cache in _CACHES.values():
            for key in cache:
                module = cache._entries.pop(key, None)
                if module is None:
                    continue
                held = weakref.ref(module)
                del module
                module = held()  # still here without the cache: some model holds it
                if module is not None:
                    cache._entries[key] = module

    return _freed("evict_unused", act)


def clear_caches() -> int:
    """Empty every cache; the bytes freed (tables that models still hold stay theirs)."""

    def act() -> None:
        for cache in _CACHES.values():
            cache._entries.clear()

    return _freed("clear_caches", act)


def set_caches_weak(weak: bool = True) -> int:
    """Let every cache hold its entries only as long as some model does (``weak``), or for ever (the default); the bytes
    freed."""
    with _LOCK:
        before = _table_bytes()
        for cache in _CACHES.values():
            cache.set_weak(weak)
        return before - _table_bytes()


def release_memory(device: torch.device | str | None = None) -> int:
    """Free the bytes of all derived buffers and lent tensors (on ``device`` only, if given); the bytes freed.

    Modules and tensors keep their identity; the next use derives the same bits again into the same tensors, at another
    address: a captured CUDA graph must be captured anew, or see :func:`invalidate_memory` and :func:`restore_memory`.
    """
    wanted = None if device is None else torch.device(device)

    def act() -> None:
        for module in list(_LIVE_MODULES):
            module.release_memory(wanted)

    return _freed("release_memory", act, wanted)


def invalidate_memory(device: torch.device | str | None = None) -> int:
    """Say that memory (on ``device`` only, if given) may have lost its contents while addresses stayed, as after an
    engine unmapped and mapped its pages again: the next use compares the values before it trusts them, and writes what
    is wrong anew at the same address. The bytes freed: those of lent tensors, which are built anew."""
    wanted = None if device is None else torch.device(device)

    def act() -> None:
        for module in list(_LIVE_MODULES):
            if module._lies_on(wanted):
                module.invalidate_memory()

    return _freed("invalidate_memory", act, wanted)


def restore_memory(device: torch.device | str | None = None) -> int:
    """Compare every derived buffer (on ``device`` only, if given) now and make right what is not, asleep ones included;
    how many modules had to be rebuilt. For what uses a table without asking its module, such as a captured graph."""
    wanted = None if device is None else torch.device(device)
    rebuilt = 0
    with _LOCK:
        for module in list(_LIVE_MODULES):
            if not module._lies_on(wanted):
                continue
            fault = None if module._asleep else module.fault(verify=True)
            if fault is not None:
                module.heal(*fault)
            elif module._asleep:
                module._rebuild(None)
            else:
                continue
            rebuilt += 1
    logger.info("restore_memory: %d modules rebuilt", rebuilt)
    return rebuilt


def _is_on(buffer: Tensor | None, wanted: torch.device | None) -> bool:
    if not isinstance(buffer, Tensor) or buffer.device.type == "meta":
        return False
    return wanted is None or (
        buffer.device == wanted if wanted.index is not None else buffer.device.type == wanted.type
    )


def cache_report() -> dict[str, Any]:
    """What the process-wide caches hold and what happened to them; ``format_report`` puts it in words.

    Per cache: ``entries`` (key in words, bytes, device, owners beside the cache, heals), ``hits``, ``misses``,
    ``drops`` by fault, ``build_seconds``. Entries that share memory each say its bytes; ``bytes`` counts it once, with
    all derived buffers in the process, of modules in no cache too, and ``heals`` are those of all these modules.
    """
    nobodys = object()
    uncounted = sys.getrefcount(nobodys)  # the variable and, in some releases of Python, the argument
    with _LOCK:
        caches = {}
        for name, cache in _CACHES.items():
            entries = []
            for key in cache:
                module = cache.get(key)
                if module is None:
                    continue
                buffers = [b for b in module.buffers() if isinstance(b, Tensor)]
                weak = isinstance(cache._entries, weakref.WeakValueDictionary)
                entries.append(
                    {
                        "key": cache.describe(key),
                        "bytes": sum(b.untyped_storage().nbytes() for b in buffers if b.device.type != "meta"),
                        "device": str(buffers[0].device) if buffers else "none",
                        "owners": sys.getrefcount(module) - uncounted - (not weak),
                        "heals": getattr(module, "heals", 0),
                    }
                )
            caches[name] = {
                "entries": entries,
                "hits": cache.hits,
                "misses": cache.misses,
                "drops": dict(cache.drops),
                "build_seconds": cache.build_seconds,
            }
        caches.update({name: cache.report() for name, cache in _LENDERS.items()})
        return {
            "caches": caches,
            "bytes": _table_bytes() + sum(cache.nbytes for cache in _LENDERS.values()),
            "heals": sum(module.heals for module in list(_LIVE_MODULES)),
        }


def format_report(report: Mapping[str, Any] | None = None) -> str:
    """:func:`cache_report` as text, a line per cache and per entry."""
    report = cache_report() if report is None else report
    lines = [f"{report['bytes']:,} bytes of derived buffers, {report['heals']} heals"]
    for name, cache in report["caches"].items():
        drops = ", ".join(f"{n} {fault}" for fault, n in cache["drops"].items()) or "none"
        lines.append(
            f"{name}: {len(cache['entries'])} entries, {cache['hits']} hits, {cache['misses']} misses, "
            f"built in {cache['build_seconds']:.3f} s, dropped: {drops}"
        )
        lines += [
            f"  {e['key']}: {e['bytes']:,} bytes on {e['device']}, {e['owners']} owners, {e['heals']} heals"
            for e in cache["entries"]
        ]
    return "\n".join(lines)
