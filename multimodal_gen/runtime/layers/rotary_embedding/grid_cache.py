"""The cache of position grids: built once for a geometry and device, lent to each caller as a tensor of its own.

What is handed out shares the cached memory only until somebody writes to it (PyTorch's copy-on-write storages), so a
caller that overwrites, frees, casts or moves what it was given harms nobody: neither the next caller nor one that
already holds its own. Lending costs about a microsecond for cos and sin together.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.cache_liveness import born_clean, register_lender

DEFAULT_LIMIT = 1 << 30  # bytes held by one cache

_len_dispatch_stack: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_len_function_stack: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)


def _quiet() -> bool:
    """Whether nothing around the caller changes what a factory or an in-place copy does."""
    return not (
        torch.is_inference_mode_enabled()
        or _len_function_stack()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    )


def traced() -> bool:
    """Whether tensors made now belong to a trace, an export or a fake-tensor mode: they must not meet cached ones."""
    return torch.compiler.is_compiling() or _len_dispatch_stack() > 0


def table_device(device: torch.device) -> torch.device:
    """Where per-axis tables are computed: on the CPU, for the same bits everywhere, but in place inside a trace
    and on meta."""
    return device if traced() or device.type == "meta" else torch.device("cpu")


def cleanly(build: Callable[..., Any], *args: Any) -> Any:
    """``build(*args)`` with the same result whatever surrounds the caller; inside a trace it is traced."""
    if traced():
        return build(*args)
    if not _quiet():
        return born_clean(build, *args)
    with torch.no_grad():
        return build(*args)


_CPU = torch.device("cpu")


class _Entry:
    """Cached tensors, and how to know that they are untouched."""

    __slots__ = ("marks", "nbytes", "tensors", "used")

    def __init__(self, tensors: tuple[Tensor, ...]):
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        self.tensors = tensors
        self.marks = [(tensor, tensor._version, size) for tensor, size in zip(tensors, sizes)]
        self.nbytes = sum(sizes)
        self.used = 0

    def intact(self) -> bool:
        for tensor, version, size in self.marks:
            if tensor._version != version or tensor.is_meta or tensor.untyped_storage().nbytes() != size:
                return False
        return True


class _Seen(NamedTuple):
    positions: Tensor
    address: int
    token: int


class GridCache:
    """Bounded by the bytes held, the least recently used grids go first; safe under threads and forks.

    Args:
        name: what reports call it.
        limit: bytes that may be held; a grid larger than that is built anew for each caller.
    """

    def __init__(self, name: str, limit: int = DEFAULT_LIMIT):
        self.name = name
        self.limit = limit
        self._entries: dict[Hashable, _Entry] = {}
        self._seen: dict[Hashable, tuple[_Seen, ...]] = {}
        self._tokens = 0
        self.nbytes = self.uses = self.misses = self.drops = 0
        self.build_seconds = 0.0
        self._make_locks()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._make_locks)

    def _make_locks(self) -> None:
        self._lock = threading.Lock()  # held for dictionary operations only
        self._building = threading.RLock()  # one build at a time: two threads never build one grid twice

    def grid(
        self, form: Callable[..., tuple[Tensor, ...]], *args: Hashable, device: torch.device
    ) -> tuple[Tensor, ...]:
        """``form(*args, device)``, a pure function of hashable arguments, which are the key."""
        if traced() or device.type == "meta":
            return cleanly(form, *args, device)
        return self._get((form, args, device), lambda: form(*args, device))

    def at_positions(
        self, form: Callable[..., tuple[Tensor, ...]], positions: Tensor, *args: Hashable
    ) -> tuple[Tensor, ...]:
        """``form(positions, *args)``, with the content of ``positions`` in the key.

        Not cached where reading that content would make the device wait: anywhere but on the CPU.
        """
        if not positions.is_cpu or traced():
            return cleanly(form, positions, *args)
        key = (form, args, self._token(positions), _CPU)
        return self._get(key, lambda: form(positions, *args))

    def _get(self, key: Hashable, build: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        entry = self._entries.get(key)
        if entry is None or not entry.intact():
            entry = self._build(key, build)
        self.uses = entry.used = self.uses + 1
        return lend(entry.tensors)

    def _build(self, key: Hashable, build: Callable[[], tuple[Tensor, ...]]) -> _Entry:
        with self._building:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None:
                    if entry.intact():
                        return entry
                    self._drop(key)
                    self.drops += 1
                self.misses += 1
            started = time.perf_counter()
            tensors = cleanly(build)
            self.build_seconds += time.perf_counter() - started
            entry = _Entry(tensors)
            with self._lock:
                if entry.nbytes <= self.limit:
                    self._shrink(self.limit - entry.nbytes)
                    self._entries[key] = entry
                    self.nbytes += entry.nbytes
            return entry

    def _drop(self, key: Hashable) -> int:
        entry = self._entries.pop(key)
        self.nbytes -= entry.nbytes
        return entry.nbytes

    def _shrink(self, limit: int) -> None:
        for key, _ in sorted(self._entries.items(), key=lambda item: item[1].used):
            if self.nbytes <= limit:
                break
            self._drop(key)

    def set_limit(self, limit: int) -> None:
        """Hold at most ``limit`` bytes from now on."""
        if limit < 0:
            raise ValueError(f"limit must be a number of bytes >= 0, got {limit}")
        with self._lock:
            self.limit = limit
            self._shrink(limit)

    def clear(self, device: torch.device | None = None) -> int:
        """Drop the grids on ``device``, or all; the bytes dropped. What callers hold stays theirs."""
        with self._lock:
            if _lies_on(_CPU, device):
                self._seen = {}
            return sum(self._drop(key) for key in list(self._entries) if _lies_on(key[-1], device))

    @property
    def hits(self) -> int:
        return self.uses - self.misses

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[tuple[Hashable, tuple[Tensor, ...]]]:
        """The keys and the cached tensors themselves: for reports and tests, not for use."""
        with self._lock:
            return [(key, entry.tensors) for key, entry in self._entries.items()]

    def report(self) -> dict[str, Any]:
        """See `common.cache_liveness.cache_report`."""
        with self._lock:
            entries = [
                {
                    "key": f"{form.__name__.strip('_')} {' '.join(map(str, rest))}",
                    "bytes": entry.nbytes,
                    "device": str(device),
                    "owners": 0,
                    "heals": 0,
                }
                for (form, *rest, device), entry in self._entries.items()
            ]
            return {
                "entries": entries,
                "hits": self.hits,
                "misses": self.misses,
                "drops": {"changed": self.drops} if self.drops else {},
                "build_seconds": self.build_seconds,
            }

    def _token(self, positions: Tensor) -> int:
        """A number that stands for the content of ``positions`` in a key."""
        if not positions.is_contiguous():
            positions = positions.contiguous()
        kind = (positions.dtype, positions.shape)
        address, nbytes = positions.data_ptr(), positions.nbytes
        for seen in self._seen.get(kind, ()):
            if _compare(seen.address, address, nbytes) == 0:
                return seen.token
        copy = cleanly(positions.clone)
        with self._lock:
            self._tokens += 1
            newest = _Seen(copy, copy.data_ptr(), self._tokens)
            self._seen[kind] = (newest, *self._seen.pop(kind, ())[:7])  # a new tuple: others may be reading the old one
            while len(self._seen) > 32:
                del self._seen[next(iter(self._seen))]
            return self._tokens


_compare = (ctypes.PyDLL(None) if os.name == "posix" else ctypes.cdll.msvcrt).memcmp
_compare.argtypes, _compare.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int


def lend(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors of the caller's own with the values of ``tensors``: one memory until somebody writes."""
    if torch.is_inference_mode_enabled():  # an inference tensor could never be saved for a backward pass
        with torch.inference_mode(False):
            return _lend(tensors)
    return _lend(tensors)


def _lend(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    try:
        return tuple([tensor._lazy_clone() for tensor in tensors])
    except (AttributeError, RuntimeError):  # no copy-on-write in this release or on this device: copy now
        return tuple([tensor.clone() for tensor in tensors])


def _lies_on(device: torch.device, wanted: torch.device | None) -> bool:
    return wanted is None or device == wanted or (wanted.index is None and device.type == wanted.type)


GRIDS = GridCache("multimodal_gen.grids")
AXES = GridCache("multimodal_gen.axes", limit=1 << 26)  # the small per-axis tables that grids are filled from
for _cache in (GRIDS, AXES):
    register_lender(_cache.name, _cache)


# --- memory of results ----------------------------------------------------------------------------------------------

_PAGE, _HUGE_PAGE = mmap.PAGESIZE, 1 << 21
_ADVISE_HUGE_PAGES = 14  # MADV_HUGEPAGE


def _madvise() -> Callable[[int, int, int], int] | None:
    advise = (
        getattr(ctypes.CDLL(None), "madvise", None) if os.name == "posix" and os.uname().sysname == "Linux" else None
    )
    if advise is not None:
        advise.argtypes, advise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return advise


_advise = _madvise()


def empty_result(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory for a grid, in huge pages where the system offers them: first touching a large grid page
    by page takes three times as long as filling it. A grid of few huge pages is made to start with one, for which its
    storage is up to one longer; what is never touched takes no memory."""
    if _advise is None or device.type != "cpu" or traced():
        return torch.empty(shape, dtype=dtype, device=device)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if not _HUGE_PAGE <= nbytes < 8 * _HUGE_PAGE:
        out = torch.empty(shape, dtype=dtype, device=device)
    else:
        storage = torch.empty(nbytes + _HUGE_PAGE, dtype=torch.uint8, device=device)
        offset = -storage.data_ptr() % _HUGE_PAGE
        out = storage[offset : offset + nbytes].view(dtype).view(shape)
    if nbytes >= _HUGE_PAGE:
        start = out.data_ptr() & -_PAGE
        _advise(start, out.data_ptr() + nbytes - start, _ADVISE_HUGE_PAGES)
    return out
