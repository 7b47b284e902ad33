"""The one rotation op: the CPU kernel, the GPU kernel and a plain-torch fallback behind one function.

``rotate`` takes a table; ``live_rotate`` takes a module that knows how to get a right one. In plain eager code both
call the kernel straight away. Under ``torch.compile``, autograd, functorch or a dispatch mode they go through ops of
``torch.ops.live_rope``; the op of ``live_rotate`` takes the module's handle instead of its table, so that a table that
dies neither recompiles nor breaks a graph: it is checked, healed and grown when the op runs.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import struct
import threading
import weakref
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor, nn

from common import cache_liveness
from common.cache_liveness import DeadBufferError, tensor_fault

logger = logging.getLogger("live_rope")


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

_ABI = 1
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL = struct.Struct("@6q 2P6q 2P6q 4i P3q P2i 2P3q P d P 2q")  # rope_call of csrc/rope_kernel.c
_BAD = struct.Struct("@2q")
_local = threading.local()


def _load() -> ctypes.CDLL | None:
    """The compiled kernel, or None with one line in the log that says why the plain-torch path is taken."""
    wanted = os.environ.get("LIVE_ROPE_KERNEL", "auto")
    if wanted not in ("auto", "c", "torch", "triton"):
        raise ValueError(f"LIVE_ROPE_KERNEL must be auto, c, torch or triton, got {wanted!r}")
    if wanted == "torch":
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
    if wanted == "c":
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


_library = _load()
_pool = _torch_pool() if _library is not None else 0


def _after_fork() -> None:
    """The pool's threads stayed in the parent, and waiting for them would never end."""
    global _pool
    _pool = 0


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
) -> tuple[Tensor, Tensor | None]:
    """Rotate ``query`` and ``key`` by the rows of ``table`` that ``positions`` name.

    Args:
        query: float32, bfloat16, float16 or float64, ``[tokens, heads, head_size]`` or ``[batch, seq, heads,
            head_size]``, any strides with a contiguous last dimension (others are copied, unless in place).
        key: likewise, with its own number of heads, or None.
        positions: int32 or int64: ``[seq]``, shared over a batch, or ``[batch, seq]``; with ``pair_axis``, ``[axes,
            seq]`` or ``[axes, batch, seq]``. None: token ``s`` takes row ``s``.
        table: float32 ``[rows, rotary_dim]``, cos in the first half of a row and sin in the second; or, with ``sin``,
            the cos ``[rows, rotary_dim/2]``. Elements of a head from ``rotary_dim`` on pass unrotated.
        is_neox_style: pairs ``(i, i + rotary_dim/2)``; else ``(2i, 2i+1)``.
        pair_axis: uint8 ``[rotary_dim/2]`` on the CPU: the axis of ``positions`` that each pair takes.
        inverse: rotate back (the gradient's rotation).
        inplace: overwrite and return ``query`` and ``key``; else new contiguous tensors.
        row_checks: int32 ``[rows]``, see :func:`common.cache_liveness.row_checks`: each row used must match.
        scale: without ``row_checks``, each used pair must satisfy ``cos^2 + sin^2 = scale^2``.

    Returns:
        the rotated query and key, within 1 ulp of the float64 value rounded once to their dtype.

    Raises:
        PositionError (an IndexError): a position is negative or has no row. DeadRowError, DeadBufferError: the table
        is damaged, freed, on meta or fake. ValueError, TypeError: shapes or dtypes that do not fit. Nothing was
        written then.
    """
    if _plain(query, key, table):
        if inplace and torch.is_grad_enabled() and (query.requires_grad or (key is not None and key.requires_grad)):
            raise RuntimeError(_GRAD_INPLACE)
        return _rotate_now(
            query, key, positions, table, sin, pair_axis, row_checks, scale or 0.0, is_neox_style, inverse, inplace
        )
    if inplace:
        if torch.is_grad_enabled() and (query.requires_grad or (key is not None and key.requires_grad)):
            raise RuntimeError(_GRAD_INPLACE)
        torch.ops.live_rope.rotate_(
            query, key, positions, table, sin, pair_axis, row_checks, scale or 0.0, is_neox_style, inverse
        )
        return query, key
    q, k = torch.ops.live_rope.rotate(
        query, key, positions, table, sin, pair_axis, row_checks, scale or 0.0, is_neox_style, inverse
    )
    return q, None if key is None else k


_GRAD_INPLACE = "inplace=True overwrites a query or key that autograd needs; expected inplace=False, or torch.no_grad()"


def _rotate_now(
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
) -> tuple[Tensor, Tensor | None]:
    """``rotate`` on real tensors: check the arguments, choose the kernel."""
    shape = query.shape
    dims = len(shape)
    if dims not in (3, 4):
        raise ValueError(f"query has shape {tuple(shape)}; expected [tokens, heads, size] or [batch, seq, heads, size]")
    if key is not None:
        kshape = key.shape
        if len(kshape) != dims or kshape[-1] != shape[-1] or kshape[:-2] != shape[:-2]:
            raise ValueError(f"key has shape {tuple(kshape)}; expected that of query {tuple(shape)} but for the heads")
        if key.dtype != query.dtype or key.device != query.device:
            raise ValueError(f"key is {key.dtype} on {key.device}; expected {query.dtype} on {query.device} as query")
    rows, width, cos_stride = _check_table(table, query, shape[-1], sin)
    batch, seq = (1, shape[0]) if dims == 3 else (shape[0], shape[1])
    strides = _check_positions(positions, pair_axis, dims, batch, seq, width)
    if inplace:
        _check_writable(query, "query")
        if key is not None:
            _check_writable(key, "key")
    code = _DTYPES.get(query.dtype)
    if code is None or _library is None or not query.is_cpu or (positions is not None and not positions.is_cpu):
        return _other_kernel(
            query, key, positions, table, sin, pair_axis, row_checks, scale, neox, inverse, inplace, batch, seq
        )
    if query.stride(-1) != 1:
        query = query.contiguous()
    if key is not None and key.stride(-1) != 1:
        key = key.contiguous()
    q_out = query if inplace else torch.empty(shape, dtype=query.dtype, device=query.device)
    q_strides, q_out_strides = query.stride(), q_out.stride()
    if dims == 3:
        q_strides, q_out_strides = (0, *q_strides), (0, *q_out_strides)
    if key is None:
        k_out = None
        k_pack = (0, 0, 0, 0, 0, 0, 0, 0)
        k_heads = 0
    else:
        k_out = key if inplace else torch.empty(kshape, dtype=key.dtype, device=key.device)
        k_strides, k_out_strides = key.stride(), k_out.stride()
        if dims == 3:
            k_strides, k_out_strides = (0, *k_strides), (0, *k_out_strides)
        k_pack = (key.data_ptr(), k_out.data_ptr(), *k_strides[:3], *k_out_strides[:3])
        k_heads = kshape[-2]
    cos = _read_address(table)
    try:
        call, address = _local.call
    except AttributeError:
        call = ctypes.create_string_buffer(_CALL.size)
        address = ctypes.addressof(call)
        _local.call = call, address
    _CALL.pack_into(
        call,
        0,
        batch,
        seq,
        width,
        shape[-1],
        shape[-2],
        k_heads,
        query.data_ptr(),
        q_out.data_ptr(),
        *q_strides[:3],
        *q_out_strides[:3],
        *k_pack,
        code,
        not neox,
        inverse,
        0 if positions is None else 8 * positions.element_size(),
        0 if positions is None else positions.data_ptr(),
        *strides,
        0 if pair_axis is None else pair_axis.data_ptr(),
        1 if pair_axis is None else positions.shape[0],
        torch.get_num_threads(),
        cos,
        cos + 2 * width if sin is None else _read_address(sin),
        cos_stride,
        cos_stride if sin is None else sin.stride(0),
        rows,
        0 if row_checks is None else row_checks.data_ptr(),
        scale,
        _pool,
        0,
        0,
    )
    status = _library.rope_rotate(address)
    if status:
        position, _ = _BAD.unpack_from(call, _CALL.size - _BAD.size)
        if status == 1:
            raise PositionError(position, rows)
        if status == 2:
            raise DeadRowError(position)
        raise ValueError(f"the kernel refused its arguments: query {tuple(shape)}, table {tuple(table.shape)}")
    return q_out, k_out


_storage_address = getattr(torch._C, "_data_address", None)


def _read_address(tensor: Tensor) -> int:
    """Where ``tensor`` begins, for reading: ``data_ptr()`` is for writing too, and so copies a copy-on-write tensor."""
    if _storage_address is None:
        return tensor.data_ptr()
    return _storage_address(tensor) + tensor.storage_offset() * tensor.element_size()


def _check_table(table: Tensor, query: Tensor, head_size: int, sin: Tensor | None) -> tuple[int, int, int]:
    """Rows, rotary width and row stride of a table that can be right for ``query``."""
    for name, part in (("table", table), ("sin", sin)):
        if part is None:
            continue
        fault = tensor_fault(part)
        if fault is not None:
            raise DeadBufferError(f"{name} is dead ({fault}) while query lies on {query.device}; rebuild it")
        if part.device != query.device:
            raise ValueError(f"{name} lies on {part.device}; expected {query.device}, where query lies")
        if part.dtype != torch.float32 or part.dim() != 2:
            raise ValueError(f"{name} is {part.dtype} {tuple(part.shape)}; expected float32 [rows, width]")
        if part.stride(1) != 1 and part.shape[1] > 1:
            raise ValueError(f"{name} has strides {part.stride()}; expected a contiguous last dimension")
    rows, width = table.shape
    if sin is not None:
        if sin.shape != table.shape:
            raise ValueError(f"sin has shape {tuple(sin.shape)}; expected that of cos, {tuple(table.shape)}")
        width *= 2
    if width % 2 or width > head_size or width == 0:
        raise ValueError(f"the table is {width} wide; expected an even width of at most the head size {head_size}")
    return rows, width, table.stride(0)


def _check_positions(
    positions: Tensor | None, pair_axis: Tensor | None, dims: int, batch: int, seq: int, width: int
) -> tuple[int, int, int]:
    """The strides of ``positions`` over axes, batch and sequence."""
    if positions is None:
        if pair_axis is not None:
            raise ValueError("pair_axis was given without positions; expected positions of several axes")
        return 0, 0, 0
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"positions are {positions.dtype}; expected torch.int32 or torch.int64")
    shape, strides = tuple(positions.shape), positions.stride()
    axis = 0
    if pair_axis is not None:
        if pair_axis.dtype != torch.uint8 or tuple(pair_axis.shape) != (width // 2,):
            raise ValueError(f"pair_axis is {pair_axis.dtype} {tuple(pair_axis.shape)}; expected uint8 [{width // 2}]")
        axis, shape, strides = strides[0], shape[1:], strides[1:]
    if shape == (seq,):
        return axis, 0, strides[0]
    if shape == (batch, seq) and dims == 4:
        return axis, strides[0], strides[1]
    expected = f"[{seq}]" if dims == 3 else f"[{seq}] or [{batch}, {seq}]"
    raise ValueError(f"positions have shape {tuple(positions.shape)}; expected {expected} (after the axes, if any)")


def _check_writable(tensor: Tensor, name: str) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; inplace=True expects a contiguous last dimension")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)):
        raise ValueError(f"{name} has strides {tensor.stride()}: its elements overlap, and cannot be rotated in place")


def _other_kernel(query, key, positions, table, sin, pair_axis, row_checks, scale, neox, inverse, inplace, batch, seq):
    """Plain torch, on any device: float64 arithmetic, rounded once, after the same checks as the C kernel's."""
    cos, sin = _rows(positions, table, sin, pair_axis, row_checks, scale, query.device, seq)
    outputs = []
    for x in (query, key):
        if x is None:
            outputs.append(None)
            continue
        width = 2 * cos.shape[-1]
        c, s = cos.unsqueeze(-2), (-sin if inverse else sin).unsqueeze(-2)
        part = x[..., :width].double()
        a, b = part.chunk(2, dim=-1) if neox else (part[..., ::2], part[..., 1::2])
        turned = (a * c - b * s, b * c + a * s)
        turned = torch.cat(turned, dim=-1) if neox else torch.stack(turned, dim=-1).flatten(-2)
        if inplace:
            x[..., :width] = turned.to(x.dtype)
            outputs.append(x)
        else:
            outputs.append(torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1))
    return outputs[0], outputs[1]


def _rows(positions, table, sin, pair_axis, row_checks, scale, device, seq):
    """cos and sin of each token in float64, ``[(batch,) seq, width/2]``, from rows that were checked."""
    half = table.shape[1] if sin is not None else table.shape[1] // 2
    cos, sin = (table, sin) if sin is not None else (table[:, :half], table[:, half:])
    cos, sin = cos.detach(), sin.detach()
    if positions is None:
        if seq > table.shape[0]:
            raise PositionError(seq - 1, table.shape[0])
        positions = torch.arange(seq, device=device)
    index = positions.to(device=device, dtype=torch.int64)
    if index.numel() and index.device.type != "meta":
        low, high = (int(bound) for bound in torch.aminmax(index))
        if low < 0 or high >= table.shape[0]:
            raise PositionError(low if low < 0 else high, table.shape[0])
    cos, sin = cos[index], sin[index]
    if row_checks is not None:
        flat = index.reshape(-1)
        found = cache_liveness.row_checks(cos.reshape(-1, half), sin.reshape(-1, half))
        wrong = found != row_checks.to(device)[flat]
    elif scale > 0:
        flat = index.reshape(-1)
        norm = (cos.double().square() + sin.double().square()).reshape(-1, half) / scale**2
        wrong = ~((norm - 1).abs() <= 1e-3).all(dim=1)
    else:
        wrong = None
    if wrong is not None and bool(wrong.any()):
        raise DeadRowError(int(flat[wrong.nonzero()[0, 0]]))
    if pair_axis is not None:
        choice = pair_axis.to(device=device, dtype=torch.int64).expand(1, *cos.shape[1:])
        cos, sin = cos.gather(0, choice)[0], sin.gather(0, choice)[0]
    return cos.double(), sin.double()


# --- when the kernel may be called straight away ---------------------------------------------------------------------

_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_functorch_level = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", lambda: None)


def _plain(query: Tensor, key: Tensor | None, table: Tensor | None = None) -> bool:
    """Whether nothing but a kernel has to see this call: no trace, gradient, mode, transform or tensor subclass."""
    if torch.compiler.is_compiling() or type(query) not in (Tensor, nn.Parameter):
        return False
    if key is not None and type(key) not in (Tensor, nn.Parameter):
        return False
    if table is not None and type(table) is not Tensor and tensor_fault(table) is None:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or (key is not None and key.requires_grad)):
        return False
    return _dispatch_modes() == 0 and _functorch_level() is None


# --- live modules -----------------------------------------------------------------------------------------------------

_HANDLES = itertools.count(1)
_MODULES: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def register_live(module: nn.Module) -> int:
    """A handle by which an op finds ``module`` when it runs; it does not keep the module alive."""
    handle = next(_HANDLES)
    _MODULES[handle] = module
    return handle


def live_rotate(
    module: nn.Module, positions: Tensor | None, query: Tensor, key: Tensor | None, *, inplace: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``module.rotate_now(positions, query, key)``, directly or by the op that finds the module when it runs."""
    if _plain(query, key):
        return module.rotate_now(positions, query, key, inplace=inplace)
    if inplace:
        if torch.is_grad_enabled() and (query.requires_grad or (key is not None and key.requires_grad)):
            raise RuntimeError(_GRAD_INPLACE)
        torch.ops.live_rope.rotate_live_(query, key, positions, module._handle, False)
        return query, key
    q, k = torch.ops.live_rope.rotate_live(query, key, positions, module._handle, False)
    return q, None if key is None else k


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
    q, k = _rotate_now(query, key, positions, table, sin, pair_axis, row_checks, scale, neox, inverse, False)
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
    _rotate_now(query, key, positions, table, sin, pair_axis, row_checks, scale, neox, inverse, True)


def _fake(query: Tensor, key: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(0) if key is None else key.new_empty(key.shape)


_rotate_live.register_fake(_fake)
_rotate.register_fake(_fake)
_rotate_live_.register_fake(lambda *_: None)
_rotate_.register_fake(lambda *_: None)


def _remember(ctx, inputs, output) -> None:
    _, key, positions, *rest = inputs
    tensors = [t for t in (positions, *rest) if isinstance(t, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.slots = [isinstance(t, Tensor) for t in (positions, *rest)]
    ctx.plain = [None if isinstance(t, Tensor) else t for t in (positions, *rest)]
    ctx.has_key = key is not None


def _gradients(op):
    def backward(ctx, grad_query: Tensor, grad_key: Tensor):
        saved = iter(ctx.saved_tensors)
        rest = [next(saved) if slot else value for slot, value in zip(ctx.slots, ctx.plain)]
        rest[-1] = not rest[-1]  # the gradient turns back
        q, k = op(grad_query, grad_key if ctx.has_key else None, *rest)
        return q, k if ctx.has_key else None, *[None] * len(rest)

    return backward


_rotate_live.register_autograd(_gradients(torch.ops.live_rope.rotate_live), setup_context=_remember)
_rotate.register_autograd(_gradients(torch.ops.live_rope.rotate), setup_context=_remember)
