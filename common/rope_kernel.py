"""The one rotation op: the CPU kernel, the GPU kernel and a plain-torch fallback behind one function.

``rotate`` takes a table; ``live_rotate`` takes a module that knows how to get a right one. In plain eager code both
call the kernel straight away. Under ``torch.compile``, autograd, functorch or a dispatch mode they go through ops of
``torch.ops.live_rope``; the op of ``live_rotate`` takes the module's handle instead of its table, so that a table that
dies neither recompiles nor breaks a graph: it is checked, healed and grown when the op runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
import threading
import weakref
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from common import cache_liveness
from common.cache_liveness import DeadBufferError, logger, tensor_fault


class DeadRowError(DeadBufferError):
    """A row of the table is not what it was when it was derived; nothing was written."""

    def __init__(self, position: int) -> None:
        super().__init__(
            f"the table's row {position} is not a rotation, or not the one that was derived: the table was overwritten. "
            "Nothing was rotated; rebuild the table"
        )
        self.position = position


class PositionError(IndexError):
    """A position has no row in the table; nothing was written."""

    def __init__(self, position: int, rows: int) -> None:
        super().__init__(f"position {position} is outside the table's {rows} rows")
        self.position, self.rows = position, rows


# --- the C library --------------------------------------------------------------------------------------------------

_WANTED = os.environ.get("LIVE_ROPE_KERNEL", "auto")
if _WANTED not in ("auto", "c", "torch", "triton"):
    raise ValueError(f"LIVE_ROPE_KERNEL must be auto, c, torch or triton, got {_WANTED!r}")

_ABI = 1
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL = struct.Struct("@6q 2P6q 2P6q 4i P3q P2i 2P3q P d P 2q")  # rope_call of csrc/rope_kernel.c
_Q, _Q_OUT, _K, _K_OUT, _POSITIONS, _PAIR_AXIS, _COS, _SIN, _CHECKS = 6, 7, 14, 15, 24, 28, 30, 31, 35  # its addresses
_BAD = 38  # bad_position, all in words of 8 bytes


def _load() -> ctypes.CDLL | None:
    """The compiled kernel, or None with one line in the log that says why the plain-torch path is taken."""
    if _WANTED in ("torch", "triton"):
        return None
    here = Path(__file__).parent
    why = "it was not built (no C compiler at installation)"
    for path in (here / f"_rope_kernel{suffix}" for suffix in EXTENSION_SUFFIXES):
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
                if library.rope_abi() != _ABI:
                    why = f"{path.name} is of another version; reinstall the package"
                    continue
            except OSError as error:
                why = str(error)
                continue
            library.rope_rotate.argtypes = [ctypes.c_void_p]
            library.rope_row_checks.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 4 + [ctypes.c_void_p]
            library.rope_row_checks.argtypes += [ctypes.c_int32, ctypes.c_void_p]
            library.rope_row_checks.restype = None
            return library
    if _WANTED == "c":
        raise ImportError(f"LIVE_ROPE_KERNEL=c, but the C kernel cannot be used: {why}")
    logger.info("the C kernel cannot be used, rotating with plain torch: %s", why)
    return None


def _torch_pool() -> int:
    """The address of GOMP_parallel in the OpenMP runtime that torch runs its own loops with, or 0: our loops then run
    in the same pool of threads instead of beside it."""
    folder = Path(torch.__file__).parent
    names = [p for pattern in ("lib/lib*omp*.so*", "../torch.libs/lib*omp*.so*") for p in folder.glob(pattern)]
    for path in names:
        try:
            runtime = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD if hasattr(os, "RTLD_NOLOAD") else 0)
            return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_functorch_level = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", lambda: None)
_tracing = getattr(torch._C, "_is_tracing", torch.jit.is_tracing)


def _load_calls(library: ctypes.CDLL | None) -> ModuleType | None:
    """The library as the Python module of csrc/rope_call.c, where that was built and torch has the C table it needs."""
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if table is None or not hasattr(library, "PyInit__rope_kernel"):
        return None
    spec = spec_from_file_location("common._rope_kernel", library._name)
    calls = module_from_spec(spec)
    spec.loader.exec_module(calls)
    found = calls.connect(
        table, Tensor, nn.Parameter, torch.empty_like, torch.contiguous_format, torch.is_grad_enabled, _dispatch_modes,
        _tracing, _functorch_level, vars(forward_ad), torch._C._increment_version, torch.get_num_threads,
    )  # fmt: skip
    return calls if found else None


_library = _load()
_pool = _torch_pool() if _library is not None else 0
_calls = _load_calls(_library)
# (module, positions, query, key, inplace) -> the rotated query and key of a RopeTable's forward; or None, with nothing
# written, where the call is not a plain one of right arguments and a right table: then `live_rotate` sees to it
short_way: Callable | None = None
if _calls is not None:
    _calls.set_pool(_pool)
    short_way = _calls.rotate_live
_forked = False


def _after_fork() -> None:
    """The pool's threads stayed in the parent, and waiting for them would never end."""
    global _pool, _forked, _registering
    _pool, _forked = 0, True
    if _calls is not None:
        _calls.set_pool(0)
    _registering = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def row_checks(table: Tensor) -> Tensor:
    """:func:`common.cache_liveness.row_checks` of a table, by the C kernel where that can be."""
    if _library is None or not table.is_cpu or table.dtype != torch.float32 or table.dim() != 2 or table.stride(1) != 1:
        return cache_liveness.row_checks(table)
    rows, width = table.shape
    half, step = width // 2, table.stride(0)
    out = torch.empty(rows, dtype=torch.int32, device="cpu")
    cos = table.data_ptr()
    _library.rope_row_checks(
        cos, cos + 4 * half, step, step, rows, half, out.data_ptr(), torch.get_num_threads(), _pool or None
    )
    return out


# --- rotate ---------------------------------------------------------------------------------------------------------


def rotate(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    table: Tensor,
    *,
    is_neox_style: bool,
    sin: Tensor | None = None,
    pair_axis: Tensor | None = None,
    inverse: bool = False,
    inplace: bool = False,
    row_checks: Tensor | None = None,
    scale: float | None = None,
    head_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate ``query`` and ``key`` by the rows of ``table`` that ``positions`` name.

    Args:
        query: float32, bfloat16, float16 or float64, ``[tokens, heads, head_size]`` or ``[batch, seq, heads,
            head_size]``, any strides with a contiguous last dimension (others are copied, unless in place).
        key: likewise, with its own number of heads, or None.
        positions: int32 or int64: ``[seq]``, shared over a batch, or ``[batch, seq]``; with ``pair_axis``, ``[axes,
            seq]`` or ``[axes, batch, seq]``. None: token ``s`` takes row ``s``.
        table: float32 ``[rows, rotary_dim]``, cos in the first half of a row and sin in the second; or, with ``sin``,
            the cos ``[rows, rotary_dim/2]``. Elements of a head from ``rotary_dim`` on pass unrotated. No gradients
            flow to it.
        is_neox_style: pairs ``(i, i + rotary_dim/2)``; else ``(2i, 2i+1)``.
        pair_axis: uint8 ``[rotary_dim/2]``: the axis of ``positions`` that each pair takes.
        inverse: rotate back (the gradient's rotation).
        inplace: overwrite and return ``query`` and ``key``; else new contiguous tensors.
        row_checks: int32 ``[rows]``, see :func:`common.cache_liveness.row_checks`: each row used must match.
        scale: without ``row_checks``, each used pair must satisfy ``cos^2 + sin^2 = scale^2``.
        head_size: given, ``query`` and ``key`` are ``[tokens, heads * head_size]`` or ``[batch, seq, heads *
            head_size]`` instead.

    Returns:
        the rotated query and key, within 1 ulp of the float64 value rounded once to their dtype.

    Raises:
        PositionError (an IndexError): a position is negative or has no row. DeadRowError, DeadBufferError: the table
        is damaged, freed, on meta or fake. ValueError, TypeError: shapes or dtypes that do not fit. Nothing was
        written then. The GPU kernel cannot raise without waiting for the device: a token whose position has no row,
        or whose row is damaged, becomes NaN there.
    """
    if inplace:
        _check_gradients(query, key)
    rest = (positions, table, sin, pair_axis, row_checks, scale or 0.0, is_neox_style, inverse)
    if _plain(query, key, positions, table):
        return rotate_now(query, key, *rest, inplace, head_size)
    return _by_op(torch.ops.live_rope.rotate_ if inplace else torch.ops.live_rope.rotate, query, key, rest, head_size)


def _by_op(
    op: Callable, query: Tensor, key: Tensor | None, rest: tuple, head_size: int | None
) -> tuple[Tensor, Tensor | None]:
    """Call an op, whose heads have a dimension of their own, and whose key is never None in the result."""
    q, k = _with_heads(query, head_size), None if key is None else _with_heads(key, head_size)
    outputs = _Rotation.apply(op, q, k, *rest) if _transformed() else op(q, k, *rest)
    if outputs is None:  # in place
        return query, key
    return outputs[0].reshape(query.shape), None if key is None else outputs[1].reshape(key.shape)


def _with_heads(x: Tensor, head_size: int | None) -> Tensor:
    return x if head_size is None else x.unflatten(-1, (-1, head_size))


def _check_gradients(query: Tensor, key: Tensor | None) -> None:
    if torch.is_grad_enabled() and (query.requires_grad or (key is not None and key.requires_grad)):
        raise RuntimeError(
            "inplace=True overwrites a query or key that autograd needs; expected inplace=False, or torch.no_grad()"
        )


_empty_like, _CONTIGUOUS, _threads = torch.empty_like, torch.contiguous_format, torch.get_num_threads
_increment_version = torch.autograd.graph.increment_version
_storage_address = getattr(
    torch._C, "_data_address", lambda tensor: tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
)


class _Call(threading.local):
    """A thread's rope_call as it was last packed, and all that was looked at to pack it."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_CALL.size)
        self.address = ctypes.addressof(self.buffer)
        self.words = memoryview(self.buffer).cast("B").cast("Q")
        self.layout: tuple | None = None
        self.dense = False  # query and key are contiguous: so is what empty_like makes, without being told


_call = _Call()


def rotate_now(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    table: Tensor,
    sin: Tensor | None,
    pair_axis: Tensor | None,
    row_checks: Tensor | None,
    scale: float,
    neox: bool,
    inverse: bool,
    inplace: bool,
    head_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``rotate`` on real tensors: check the arguments, choose the kernel.

    For one token nearly all the time goes into reading the tensors' attributes here. So a call stays packed, and where
    all that the checks depend on is as it was, only addresses are new.
    """
    if query.is_meta:
        return (query, key) if inplace else (_contiguous_like(query), None if key is None else _contiguous_like(key))
    if inplace and key is not None and key.data_ptr() == query.data_ptr() and key.numel() and query.numel():
        raise ValueError("query and key begin at the same memory; inplace=True would rotate it twice")
    layout = (
        type(table), table.dtype, table.is_cpu, table.shape, table.stride(), table.storage_offset(),
        table.untyped_storage().nbytes(), query.dtype, query.is_cpu, query.shape, query.stride(),
        key if key is None else (key.dtype, key.is_cpu, key.shape, key.stride()),
        positions if positions is None else (positions.dtype, positions.is_cpu, positions.shape, positions.stride()),
        row_checks if row_checks is None else (row_checks.dtype, row_checks.is_cpu, row_checks.shape, row_checks.stride()),
        sin if sin is None else _facts(sin), pair_axis if pair_axis is None else _facts(pair_axis),
        scale, neox, inverse, inplace, head_size, _threads(), _pool, _library,
    )  # fmt: skip
    if _call.layout != layout:
        _call.layout = None
        done = _pack(query, key, positions, table, sin, pair_axis, row_checks, scale, neox, inverse, inplace, head_size)
        if done is not None:
            return done
        _call.layout = layout
    words = _call.words
    if inplace:
        q_out, k_out = query, key
    elif _call.dense:
        q_out, k_out = _empty_like(query), None if key is None else _empty_like(key)
    else:
        q_out, k_out = _contiguous_like(query), None if key is None else _contiguous_like(key)
    words[_Q], words[_Q_OUT] = query.data_ptr(), q_out.data_ptr()
    if key is not None:
        words[_K], words[_K_OUT] = key.data_ptr(), k_out.data_ptr()
    if positions is not None:
        words[_POSITIONS] = positions.data_ptr()
    if pair_axis is not None:
        words[_PAIR_AXIS] = pair_axis.data_ptr()
    if row_checks is not None:
        words[_CHECKS] = row_checks.data_ptr()
    words[_COS] = cos = _read_address(table)
    words[_SIN] = cos + 2 * table.shape[1] if sin is None else _read_address(sin)
    status = _library.rope_rotate(_call.address)
    if status:
        position = ctypes.c_int64(words[_BAD]).value
        if status == 1:
            raise PositionError(position, table.shape[0])
        if status == 2:
            raise DeadRowError(position)
        raise ValueError(
            f"the kernel refused query {tuple(query.shape)} with table {tuple(table.shape)}; expected query, key and "
            "positions whose storage is not freed, and no axis in pair_axis that positions do not have"
        )
    if inplace:  # tell autograd, which may have saved them
        _increment_version(query)
        if key is not None:
            _increment_version(key)
    return q_out, k_out


def _facts(tensor: Tensor) -> tuple:
    return (
        type(tensor), tensor.dtype, tensor.is_cpu, tensor.shape, tensor.stride(), tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
    )  # fmt: skip


def _pack(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    table: Tensor,
    sin: Tensor | None,
    pair_axis: Tensor | None,
    row_checks: Tensor | None,
    scale: float,
    neox: bool,
    inverse: bool,
    inplace: bool,
    head_size: int | None,
) -> tuple[Tensor, Tensor | None] | None:
    """Check the arguments and pack them into this thread's call, all but the addresses; or the result, where another
    kernel, or copies of some arguments, had to be taken."""
    dtype = query.dtype
    code = _DTYPES.get(dtype)
    if code is None and dtype != torch.float64:
        raise TypeError(f"query is {dtype}; expected torch.float32, bfloat16, float16 or float64")
    q_shape, q_strides, ready = _layout(query, "query", head_size)
    batch, seq, heads, size = q_shape
    rows, width, row_stride = _check_table(table, "table", query)
    sin_stride = row_stride
    if sin is not None:
        sin_rows, sin_width, sin_stride = _check_table(sin, "sin", query)
        if (sin_rows, sin_width) != (rows, width):
            raise ValueError(f"sin has shape {tuple(sin.shape)}; expected that of cos, {tuple(table.shape)}")
        width *= 2
    if width % 2 or not 0 < width <= size:
        raise ValueError(f"the table is {width} wide; expected an even width of at most the head size {size}")
    if key is None:
        k_heads, k_strides = 0, (0, 0, 0)
    else:
        k_shape, k_strides, k_ready = _layout(key, "key", head_size)
        k_heads, ready = k_shape[2], ready and k_ready
        if k_shape[0] != batch or k_shape[1] != seq or k_shape[3] != size:
            raise ValueError(
                f"key has shape {tuple(key.shape)}; expected that of query {tuple(query.shape)} but for the heads"
            )
        if key.dtype != dtype or key.device != query.device:
            raise ValueError(f"key is {key.dtype} on {key.device}; expected {dtype} on {query.device} as query")
    position_strides = _check_positions(positions, pair_axis, batch, seq, width, query.dim() - (head_size is None))
    if row_checks is not None and (row_checks.dtype != torch.int32 or row_checks.shape != (rows,)):
        raise ValueError(f"row_checks is {row_checks.dtype} {tuple(row_checks.shape)}; expected int32 [{rows}]")
    if inplace:
        _check_writable(query, "query")
        if key is not None:
            _check_writable(key, "key")
    rest = (scale, neox, inverse, inplace)
    if code is None or _library is None or not query.is_cpu:
        q, k = _with_heads(query, head_size), None if key is None else _with_heads(key, head_size)
        q, k = _other_kernel(query)(q, k, positions, table, sin, pair_axis, row_checks, *rest)
        return (query, key) if inplace else (q.view(query.shape), None if k is None else k.view(key.shape))
    others = (positions, pair_axis, row_checks)
    if not (ready and all(x is None or x.is_cpu for x in others) and _dense(pair_axis) and _dense(row_checks)):
        if not inplace:
            query, key = query.contiguous(), None if key is None else key.contiguous()
        positions, pair_axis, row_checks = (None if x is None else x.cpu().contiguous() for x in others)
        return rotate_now(query, key, positions, table, sin, pair_axis, row_checks, *rest, head_size)
    q_out_strides, k_out_strides = (
        (q_strides, k_strides) if inplace else ((seq * n * size, n * size, size) for n in (heads, k_heads))
    )
    _call.dense = _dense(query) and _dense(key)
    bits = 0 if positions is None else 64 if positions.dtype is torch.int64 else 32
    _CALL.pack_into(
        _call.buffer, 0,
        batch, seq, width, size, heads, k_heads,
        0, 0, *q_strides, *q_out_strides, 0, 0, *k_strides, *k_out_strides,
        code, not neox, inverse, bits, 0, *position_strides, 0, 1 if pair_axis is None else positions.shape[0],
        _threads(), 0, 0, row_stride, sin_stride, rows, 0, scale, _pool, 0, 0,
    )  # fmt: skip
    return None


def _dense(x: Tensor | None) -> bool:
    return x is None or x.is_contiguous()


def _contiguous_like(x: Tensor) -> Tensor:
    return _empty_like(x, memory_format=_CONTIGUOUS)


def _layout(x: Tensor, name: str, head_size: int | None) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """``(batch, seq, heads, size)``, the strides of the first three, and whether the last dimension is contiguous."""
    shape, strides = x.shape, x.stride()
    dims, ready = len(shape), strides[-1:] == (1,) or x.numel() == 0
    if head_size is None:
        if dims == 3:
            return (1, *shape), (0, *strides[:2]), ready
        if dims == 4:
            return shape, strides[:3], ready
        raise ValueError(
            f"{name} has shape {tuple(shape)}; expected [tokens, heads, size] or [batch, seq, heads, size]"
        )
    if dims not in (2, 3) or shape[-1] % head_size:
        raise ValueError(
            f"{name} has shape {tuple(shape)}; expected [tokens, heads * {head_size}] or [batch, seq, heads * "
            f"{head_size}]"
        )
    heads = shape[-1] // head_size
    if dims == 2:
        return (1, shape[0], heads, head_size), (0, strides[0], head_size), ready
    return (*shape[:2], heads, head_size), (*strides[:2], head_size), ready


def _check_table(table: Tensor, name: str, query: Tensor) -> tuple[int, int, int]:
    """Rows, width and row stride of a table that can be right for ``query``."""
    device = query.device
    fault = tensor_fault(table)
    if fault is not None:
        raise DeadBufferError(f"{name} is dead ({fault}) while query lies on {device}; rebuild it")
    if table.device != device:
        raise ValueError(f"{name} lies on {table.device}; expected {device}, where query lies")
    if table.dtype != torch.float32 or table.dim() != 2:
        raise ValueError(f"{name} is {table.dtype} {tuple(table.shape)}; expected float32 [rows, width]")
    step, unit = table.stride()
    if unit != 1 and table.shape[1] > 1:
        raise ValueError(f"{name} has strides {table.stride()}; expected a contiguous last dimension")
    return *table.shape, step


def _read_address(tensor: Tensor) -> int:
    """Where ``tensor`` begins, for reading: ``data_ptr()`` is for writing too, and so copies a copy-on-write tensor."""
    return _storage_address(tensor) + tensor.storage_offset() * tensor.element_size()


def _check_positions(
    positions: Tensor | None, pair_axis: Tensor | None, batch: int, seq: int, width: int, dims: int
) -> tuple[int, int, int]:
    """The strides of ``positions`` over axes, batch and sequence; ``dims`` is 2 for tokens, 3 for batch and sequence."""
    if positions is None:
        if pair_axis is not None:
            raise ValueError("pair_axis was given without positions; expected positions of several axes")
        return 0, 0, 0
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"positions are {positions.dtype}; expected torch.int32 or torch.int64")
    shape, strides = positions.shape, positions.stride()
    axis = 0
    if pair_axis is not None:
        if pair_axis.dtype != torch.uint8 or pair_axis.shape != (width // 2,):
            raise ValueError(f"pair_axis is {pair_axis.dtype} {tuple(pair_axis.shape)}; expected uint8 [{width // 2}]")
        if shape:
            axis, shape, strides = strides[0], shape[1:], strides[1:]
    if shape == (seq,):
        return axis, 0, strides[0]
    if dims == 3 and shape == (batch, seq):
        return axis, *strides
    expected = f"[{seq}]" if dims == 2 else f"[{seq}] or [{batch}, {seq}]"
    raise ValueError(f"positions have shape {tuple(positions.shape)}; expected {expected} (after the axes, if any)")


def _check_writable(tensor: Tensor, name: str) -> None:
    """In place needs a contiguous last dimension, and elements that do not overlap."""
    if tensor.is_contiguous():
        return
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; inplace=True expects a contiguous last dimension")
    reach = 0  # of the dimensions nearer together: the offset of their last element
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride <= reach:
            raise ValueError(f"{name} has strides {tensor.stride()}: its elements overlap; expected inplace=False")
        reach += stride * (size - 1)


# --- other kernels ----------------------------------------------------------------------------------------------------


def _other_kernel(query: Tensor) -> Callable:
    """Triton's on a GPU (or where it was asked for), else plain torch."""
    asked = _WANTED == "triton" or (_WANTED == "auto" and query.device.type in ("cuda", "xpu"))
    if asked and query.dtype in _DTYPES:
        return _triton_kernel() or _rotate_plainly
    return _rotate_in_a_thread if _forked else _rotate_plainly


@functools.cache
def _triton_kernel() -> Callable | None:
    try:
        from common.rope_kernel_triton import rotate_by_triton
    except ImportError as error:
        if _WANTED == "triton":
            raise ImportError(f"LIVE_ROPE_KERNEL=triton, but triton cannot be imported: {error}") from error
        logger.info("triton cannot be imported, rotating on the GPU with plain torch: %s", error)
        return None
    return rotate_by_triton


def _rotate_in_a_thread(query, *arguments):
    """In a forked child torch's own operators wait for ever for the threads of the parent; a fresh thread starts its own."""

    def rotated():
        with torch.inference_mode(query.is_inference()):
            return _rotate_plainly(query, *arguments)

    return cache_liveness.born_clean(rotated)


def _rotate_plainly(query, key, positions, table, sin, pair_axis, row_checks, scale, neox, inverse, inplace):
    """Plain torch, on any device: float64 arithmetic, rounded once, after the same checks as the C kernel's."""
    cos, sin = _rows(query, positions, table, sin, pair_axis, row_checks, scale)
    cos, sin = cos.unsqueeze(-2), (-sin if inverse else sin).unsqueeze(-2)
    width = 2 * cos.shape[-1]

    def turn(x: Tensor) -> Tensor:
        part = x[..., :width].to(cos.dtype)
        a, b = part.chunk(2, dim=-1) if neox else (part[..., ::2], part[..., 1::2])
        turned = (a * cos - b * sin, b * cos + a * sin)
        turned = (torch.cat(turned, dim=-1) if neox else torch.stack(turned, dim=-1).flatten(-2)).to(x.dtype)
        if inplace:
            x[..., :width] = turned
            return x
        return torch.cat((turned, x[..., width:]), dim=-1).contiguous()

    return turn(query), None if key is None else turn(key)


def _rows(query, positions, table, sin, pair_axis, row_checks, scale):
    """cos and sin of each token, ``[(batch,) seq, width/2]``, from rows that were checked; float64 where there is."""
    device, rows = query.device, table.shape[0]
    half = table.shape[1] if sin is not None else table.shape[1] // 2
    cos, sin = (table.detach(), sin.detach()) if sin is not None else table.detach().split(half, dim=1)
    index = (
        torch.arange(query.shape[-3], dtype=torch.int64, device=device)
        if positions is None
        else positions.to(device=device, dtype=torch.int64)
    )
    if index.numel():
        low, high = (int(bound) for bound in torch.aminmax(index))
        if low < 0 or high >= rows:
            raise PositionError(low if low < 0 else high if positions is not None else rows, rows)
    cos, sin = cos[index], sin[index]
    wrong = None
    if row_checks is not None and index.numel():
        found = cache_liveness.row_checks(cos.reshape(-1, half), sin.reshape(-1, half))
        wrong = found != row_checks.to(device)[index.reshape(-1)]
    wide = torch.float32 if device.type == "mps" else torch.float64
    cos, sin = cos.to(wide), sin.to(wide)
    if row_checks is None and scale > 0:
        norm = (cos.square() + sin.square()).reshape(-1, half) / scale**2
        wrong = ~((norm - 1).abs() <= 1e-3).all(dim=1)
    if wrong is not None and bool(wrong.any()):
        raise DeadRowError(int(index.reshape(-1)[wrong.nonzero()[0, 0]]))
    if pair_axis is not None:
        if int(pair_axis.max()) >= index.shape[0]:
            raise ValueError(f"pair_axis names axis {int(pair_axis.max())}; positions have {index.shape[0]}")
        choice = pair_axis.to(device=device, dtype=torch.int64).expand(1, *cos.shape[1:])
        cos, sin = cos.gather(0, choice)[0], sin.gather(0, choice)[0]
    return cos, sin


# --- when the kernel may be called straight away ---------------------------------------------------------------------

_TENSORS = (Tensor, nn.Parameter)
_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


def _plain(query: Tensor, key: Tensor | None, positions: Tensor | None, table: Tensor | None = None) -> bool:
    """Whether nothing but a kernel has to see this call: no trace, gradient, mode, transform or tensor subclass."""
    if torch.compiler.is_compiling() or type(query) not in _TENSORS:
        return False
    if key is not None and type(key) not in _TENSORS:
        return False
    if positions is not None and type(positions) not in _TENSORS:
        return False
    if table is not None and type(table) not in _TENSORS and tensor_fault(table) is None:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or (key is not None and key.requires_grad)):
        return False
    if _dispatch_modes() or _tracing():
        return False
    return _functorch_level() is None and getattr(forward_ad, "_current_level", -1) < 0


def _transformed() -> bool:
    """Whether functorch or forward-mode differentiation is at work."""
    if torch.compiler.is_compiling():
        if _forward_level() >= 0:
            raise NotImplementedError("jvp and its like do not work inside torch.compile: rotate in eager there")
        return False
    return _functorch_level() is not None or _forward_level() >= 0


@torch.compiler.assume_constant_result
def _forward_level() -> int:
    return getattr(forward_ad, "_current_level", -1)


# --- live modules -----------------------------------------------------------------------------------------------------

_MODULES: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_registering = threading.Lock()


def register_live(module: nn.Module, *identity: object) -> int:
    """A handle by which an op finds ``module`` when it runs; it does not keep the module alive.

    ``identity``: all that ``rotate_now`` depends on, each with a ``repr`` that says its value. The handle follows from
    it, so that a compiled graph in another process finds a module that rotates alike, or none, but never another one.
    Without it the handle is a random number.
    """
    seed = repr(identity).encode() if identity else os.urandom(16)
    handle = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "big") >> 2
    with _registering:
        while handle in _MODULES:
            handle += 1
        _MODULES[handle] = module
    return handle


def live_rotate(
    module: nn.Module,
    positions: Tensor | None,
    query: Tensor,
    key: Tensor | None,
    *,
    inplace: bool = False,
    head_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``module.rotate_now(positions, query, key)``, directly or by the op that finds the module when it runs.

    A graph that may leave this process (``torch.export``, ``torch.jit.trace``) must not hold a handle: it is given
    ``module.rotate_exported(positions, query, key)``, which makes the table an input of the graph.

    Args: as :func:`rotate`'s; ``head_size`` is passed on to ``rotate_now`` where it is given.
    """
    if inplace:
        _check_gradients(query, key)
    if _plain(query, key, positions):
        if head_size is None:
            return module.rotate_now(positions, query, key, inplace=inplace)
        return module.rotate_now(positions, query, key, inplace=inplace, head_size=head_size)
    if _exporting() or (not torch.compiler.is_compiling() and _tracing()):  # dynamo cannot trace the question
        q, k = _with_heads(query, head_size), None if key is None else _with_heads(key, head_size)
        q, k = module.rotate_exported(positions, q, k, inplace=inplace)
        return (query, key) if inplace else (q.reshape(query.shape), None if key is None else k.reshape(key.shape))
    op = torch.ops.live_rope.rotate_live_ if inplace else torch.ops.live_rope.rotate_live
    return _by_op(op, query, key, (positions, module._handle, False), head_size)


def _module(handle: int) -> nn.Module:
    module = _MODULES.get(handle)
    if module is None:
        raise DeadBufferError(
            f"the rotary module of handle {handle} is gone: a compiled graph outlived the model it was compiled for, or "
            "was carried to another process; compile it again"
        )
    return module


# --- ops --------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("live_rope::rotate_live", mutates_args=())
def _rotate_live(
    query: Tensor, key: Tensor | None, positions: Tensor | None, handle: int, inverse: bool
) -> tuple[Tensor, Tensor]:
    q, k = _module(handle).rotate_now(positions, query, key, inverse=inverse)
    return q, query.new_empty(0) if k is None else k


@torch.library.custom_op("live_rope::rotate_live_", mutates_args=("query", "key"))
def _rotate_live_(query: Tensor, key: Tensor | None, positions: Tensor | None, handle: int, inverse: bool) -> None:
    _module(handle).rotate_now(positions, query, key, inplace=True, inverse=inverse)


@torch.library.custom_op("live_rope::rotate", mutates_args=())
def _rotate(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    table: Tensor,
    sin: Tensor | None,
    pair_axis: Tensor | None,
    row_checks: Tensor | None,
    scale: float,
    neox: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    q, k = rotate_now(query, key, positions, table, sin, pair_axis, row_checks, scale, neox, inverse, False)
    return q, query.new_empty(0) if k is None else k


@torch.library.custom_op("live_rope::rotate_", mutates_args=("query", "key"))
def _rotate_(
    query: Tensor,
    key: Tensor | None,
    positions: Tensor | None,
    table: Tensor,
    sin: Tensor | None,
    pair_axis: Tensor | None,
    row_checks: Tensor | None,
    scale: float,
    neox: bool,
    inverse: bool,
) -> None:
    rotate_now(query, key, positions, table, sin, pair_axis, row_checks, scale, neox, inverse, True)


def _fake(query: Tensor, key: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(0) if key is None else key.new_empty(key.shape)


_rotate_live.register_fake(_fake)
_rotate.register_fake(_fake)
_rotate_live_.register_fake(lambda *_: None)
_rotate_.register_fake(lambda *_: None)


def _remember(ctx, inputs: tuple, output: object) -> None:
    """Keep what the gradient's rotation needs: all inputs but query and key."""
    _, key, *rest = inputs
    ctx.has_key = key is not None
    ctx.slots = [isinstance(value, Tensor) for value in rest]
    ctx.plain = [None if slot else value for slot, value in zip(ctx.slots, rest)]
    ctx.save_for_backward(*(value for slot, value in zip(ctx.slots, rest) if slot))
    ctx.modules = [_MODULES.get(value) for value in rest if type(value) is int]  # the backward needs them alive


def _remembered(ctx) -> list:
    saved = iter(ctx.saved_tensors)
    return [next(saved) if slot else value for slot, value in zip(ctx.slots, ctx.plain)]


def _gradients(op: Callable) -> Callable:
    def backward(ctx, grad_query: Tensor, grad_key: Tensor):
        rest = _remembered(ctx)
        rest[-1] = not rest[-1]  # the gradient turns back
        q, k = op(grad_query, grad_key if ctx.has_key else None, *rest)
        return q, k if ctx.has_key else None, *[None] * len(rest)

    return backward


def _sample_by_sample(op: Callable) -> Callable:
    def batched(info, in_dims: tuple, *inputs: object):
        samples = [
            op(*(value if dim is None else value.select(dim, i) for value, dim in zip(inputs, in_dims)))
            for i in range(info.batch_size)
        ]
        return tuple(torch.stack(outputs) for outputs in zip(*samples)), (0, 0)

    return batched


for _op, _packet in ((_rotate_live, torch.ops.live_rope.rotate_live), (_rotate, torch.ops.live_rope.rotate)):
    _op.register_autograd(_gradients(_packet), setup_context=_remember)
    _op.register_vmap(_sample_by_sample(_packet))


class _Rotation(torch.autograd.Function):
    """An op under functorch's transforms and forward-mode differentiation, for which an op has no rules of its own:
    it would leave the tangents out. A rotation is linear, so that tangents turn as their primals do."""

    @staticmethod
    def forward(op, query, key, *rest):
        if not op.default._schema.returns:
            raise RuntimeError(
                "inplace=True does not work under vmap, grad, jvp and their like; expected inplace=False"
            )
        return op(query, key, *rest)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.op, *inputs = inputs
        _remember(ctx, inputs, output)
        ctx.save_for_forward(*(value for value in inputs[2:] if isinstance(value, Tensor)))

    @staticmethod
    def backward(ctx, grad_query, grad_key):
        op = functools.partial(_Rotation.apply, ctx.op)
        return None, *_gradients(op)(ctx, grad_query, grad_key)

    @staticmethod
    def jvp(ctx, _, query, key, *rest):
        return _Rotation.apply(ctx.op, query, key, *_remembered(ctx))

    @staticmethod
    def vmap(info, in_dims, op, *inputs):
        return _sample_by_sample(functools.partial(_Rotation.apply, op))(info, in_dims[1:], *inputs)
