"""Putting tables together from small per-axis tables in one pass: the C kernel, or plain torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common import rope_kernel

_MAX_AXES, _MAX_PARTS, _MAX_TABLES = 8, 16, 4


class Columns(NamedTuple):
    """Columns of a table that depend on one axis: ``values`` is ``[positions on that axis, width]``."""

    axis: int
    values: Tensor


class _Call(ctypes.Structure):  # rope_fill_call of csrc/rope_grid.c
    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("tables", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("axes", ctypes.c_int64),
        ("out", ctypes.c_void_p * _MAX_TABLES),
        ("size", ctypes.c_int64 * _MAX_AXES),
        ("index", ctypes.c_void_p * _MAX_AXES),
        ("axis", ctypes.c_int64 * _MAX_PARTS),
        ("width", ctypes.c_int64 * _MAX_PARTS),
        ("values", ctypes.c_void_p * (_MAX_PARTS * _MAX_TABLES)),
        ("threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
    )


def _kernel():
    fill = getattr(rope_kernel._library, "rope_fill", None)
    if fill is not None:
        fill.argtypes = [ctypes.c_void_p]
    return fill


_fill = _kernel()


def fill_tables(
    outs: Sequence[Tensor],
    tables: Sequence[Sequence[Columns]],
    shape: Sequence[int],
    index: Sequence[Tensor] | None = None,
) -> None:
    """Fill ``outs``, one for each of ``tables``, whose columns lie on the same axes and are equally wide.

    Args:
        outs: ``[*shape, sum of widths]``, any strides; with ``index`` ``[tokens, sum of widths]``.
        shape: positions on each axis: a row for each of their product, row-major.
        index: for each axis the position of each token, int64 ``[tokens]``: a row for each token instead.
    """
    if not _by_kernel(outs, tables, shape, index):
        for out, columns in zip(outs, tables):
            if index is None:
                _broadcast(out, columns)
            else:
                _gather(out, columns, index)


def _by_kernel(
    outs: Sequence[Tensor], tables: Sequence[Sequence[Columns]], shape: Sequence[int], index: Sequence[Tensor] | None
) -> bool:
    if _fill is None or torch.compiler.is_compiling() or rope_kernel._dispatch_modes():
        return False
    parts = len(tables[0])
    if len(tables) > _MAX_TABLES or parts > _MAX_PARTS or len(shape) > _MAX_AXES:
        return False
    if any(not (out.is_cpu and out.is_contiguous()) for out in outs):
        return False
    kept = [[part.values.contiguous() for part in columns] for columns in tables]
    rows = [kept[0][i].shape[0] for i in range(parts)]
    if any(row != shape[part.axis] for row, part in zip(rows, tables[0])):  # one row for a whole axis
        return False
    call = _Call(
        tokens=outs[0].shape[0] if index is not None else torch.Size(shape).numel(),
        tables=len(tables),
        parts=parts,
        axes=len(shape),
        threads=torch.get_num_threads(),
        parallel=rope_kernel._pool or None,
    )
    for axis, size in enumerate(shape):
        call.size[axis] = size
        if index is not None:
            call.index[axis] = index[axis].data_ptr()
    for i, part in enumerate(tables[0]):
        call.axis[i] = part.axis
        call.width[i] = part.values.shape[1] * part.values.element_size()
        for k in range(len(tables)):
            call.values[i * len(tables) + k] = rope_kernel._read_address(kept[k][i])
    for k, out in enumerate(outs):
        call.out[k] = out.data_ptr()
    return _fill(ctypes.byref(call)) == 0


def _broadcast(out: Tensor, columns: Sequence[Columns]) -> None:
    """Columns that ignore the first axis are filled for one of its positions and then copied to all: long runs of
    memory instead of short ones."""
    at = start = 0
    while start < len(columns):
        stop = start + 1
        if columns[start].axis > 0 and out.shape[0] > 1:
            while stop < len(columns) and columns[stop].axis > 0:
                stop += 1
        run = columns[start:stop]
        width = sum(part.values.shape[1] for part in run)
        target = out[..., at : at + width]
        if len(run) > 1:
            plane = torch.empty(target.shape[1:], dtype=out.dtype, device=out.device)
            _broadcast(plane, [part._replace(axis=part.axis - 1) for part in run])
            target.copy_(plane)
        else:
            axis, values = run[0]
            shape = [1] * (out.ndim - 1) + [width]
            shape[axis] = values.shape[0]
            target.copy_(values.view(shape))
        at += width
        start = stop


def _gather(out: Tensor, columns: Sequence[Columns], index: Sequence[Tensor]) -> None:
    at = 0
    for axis, values in columns:
        torch.index_select(values, 0, index[axis], out=out[:, at : at + values.shape[1]])
        at += values.shape[1]
