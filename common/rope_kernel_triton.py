"""The GPU rotation: q and k of one call in one launch, by the arithmetic and the checks of csrc/rope_kernel.c.

A launch cannot raise without waiting for the device, so a token whose position has no row, or whose row fails its
check, comes out as NaN: nothing outside the table is read, and no rotation is silently wrong. Imported only where it is
used; triton's interpreter (TRITON_INTERPRET=1) runs it on CPU tensors.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from common.rope_kernel import PositionError

_TILE = 1024  # pairs that one program turns at a time


@triton.jit
def _turn(x, out, heads, first, head_step, out_head_step, cos, sin, HALF: tl.constexpr, PAIRS: tl.constexpr,
          STEP: tl.constexpr, GAP: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
          HEADS: tl.constexpr):  # fmt: skip
    """Heads ``first`` to ``first + HEADS`` of the token that ``x`` points to: pairs (STEP * i, STEP * i + GAP)."""
    head = first + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    x += head.to(tl.int64)[:, None] * head_step
    out += head.to(tl.int64)[:, None] * out_head_step
    here = (head < heads)[:, None] & (pair < HALF)[None, :]
    at = (STEP * pair)[None, :]
    # float64 products of these are exact, so the sum is right under any cancellation; memory takes longer anyway
    a = tl.load(x + at, mask=here, other=0).to(tl.float64)
    b = tl.load(x + at + GAP, mask=here, other=0).to(tl.float64)
    dtype = out.dtype.element_ty
    tl.store(out + at, (a * cos - b * sin).to(tl.float32).to(dtype), mask=here)
    tl.store(out + at + GAP, (b * cos + a * sin).to(tl.float32).to(dtype), mask=here)
    if REST > 0:
        at = tl.arange(0, REST_BLOCK)
        here = (head < heads)[:, None] & (at < REST)[None, :]
        at = (2 * HALF + at)[None, :]
        tl.store(out + at, tl.load(x + at, mask=here), mask=here)


@triton.jit
def _rotate_kernel(
    q, q_out, k, k_out, positions, cos_table, sin_table, pair_axis, row_checks,
    seq, rows, q_heads, k_heads,
    q_batch_step, q_seq_step, q_head_step, q_out_batch_step, q_out_seq_step, q_out_head_step,
    k_batch_step, k_seq_step, k_head_step, k_out_batch_step, k_out_seq_step, k_out_head_step,
    position_axis_step, position_batch_step, position_seq_step, cos_step, sin_step, low, high,
    HALF: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr, GAP: tl.constexpr,
    REST: tl.constexpr, REST_BLOCK: tl.constexpr, HEADS: tl.constexpr, AXES: tl.constexpr,
    POSITIONS: tl.constexpr, CHECKS: tl.constexpr, UNIT: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """One token's rows, checked, then one tile of its heads; the tiles of q come before those of k."""
    token = tl.program_id(0).to(tl.int64)
    b, s = token // seq, token % seq
    pair = tl.arange(0, PAIRS)
    real = pair < HALF
    cos = tl.zeros([PAIRS], tl.float32)
    sin = tl.zeros([PAIRS], tl.float32)
    good = s >= 0
    for axis in tl.static_range(AXES):
        row = s
        if POSITIONS:
            at = axis * position_axis_step + b * position_batch_step + s * position_seq_step
            row = tl.load(positions + at).to(tl.int64)
        inside = (row >= 0) & (row < rows)
        good = good & inside
        mask = pair < tl.where(inside, HALF, 0)
        row_cos = tl.load(cos_table + row * cos_step + pair, mask=mask, other=0)
        row_sin = tl.load(sin_table + row * sin_step + pair, mask=mask, other=0)
        mine = real
        if AXES > 1:
            mine = real & (tl.load(pair_axis + pair, mask=real, other=255) == axis)
        if CHECKS:
            words = row_cos.to(tl.uint32, bitcast=True)
            found = (words ^ (words >> 15)) * ((2 * pair + 1).to(tl.uint32) * 0x9E3779B1)
            words = row_sin.to(tl.uint32, bitcast=True)
            found += (words ^ (words >> 15)) * ((2 * (pair + HALF) + 1).to(tl.uint32) * 0x9E3779B1)
            check = tl.load(row_checks + row, mask=inside, other=0).to(tl.uint32, bitcast=True)
            same = (tl.sum(found, axis=0).to(tl.uint32) + 0x9E3779B9).to(tl.uint32) == check
            good = good & (same | (tl.max(mine.to(tl.int32), axis=0) == 0))  # an axis that no pair takes is not read
        cos = tl.where(mine, row_cos, cos)
        sin = tl.where(mine, row_sin, sin)
    if UNIT:
        square = cos * cos + sin * sin
        wrong = real & ~((square >= low) & (square <= high))
        good = good & (tl.max(wrong.to(tl.int32), axis=0) == 0)
    if INVERSE:
        sin = -sin
    cos = tl.where(good, cos, float("nan")).to(tl.float64)[None, :]
    sin = sin.to(tl.float64)[None, :]
    tile = tl.program_id(1)
    q_tiles = tl.cdiv(q_heads, HEADS)
    if tile < q_tiles:
        _turn(q + b * q_batch_step + s * q_seq_step, q_out + b * q_out_batch_step + s * q_out_seq_step, q_heads,
              tile * HEADS, q_head_step, q_out_head_step, cos, sin, HALF, PAIRS, STEP, GAP, REST, REST_BLOCK,
              HEADS)  # fmt: skip
    else:
        _turn(k + b * k_batch_step + s * k_seq_step, k_out + b * k_out_batch_step + s * k_out_seq_step, k_heads,
              (tile - q_tiles) * HEADS, k_head_step, k_out_head_step, cos, sin, HALF, PAIRS, STEP, GAP, REST,
              REST_BLOCK, HEADS)  # fmt: skip


def rotate_by_triton(
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
    """:func:`common.rope_kernel.rotate` for arguments that it has checked; 16 and 32 bit dtypes.

    ``row_checks`` are read where they lie on the query's device; copying them there would cost more than the rotation.

    Raises:
        PositionError: without positions, more tokens than rows. RuntimeError: CPU tensors outside the interpreter.
    """
    device = query.device
    if device.type == "cpu" and isinstance(_rotate_kernel, JITFunction):
        raise RuntimeError(
            "LIVE_ROPE_KERNEL=triton, but query lies on the CPU; expected a GPU, or TRITON_INTERPRET=1 from the start"
        )
    rows = table.shape[0]
    batch, seq = (1, *query.shape[:1]) if query.dim() == 3 else query.shape[:2]
    if positions is None and seq > rows:
        raise PositionError(rows, rows)
    if not inplace:
        query = query if query.stride(-1) == 1 else query.contiguous()
        key = key if key is None or key.stride(-1) == 1 else key.contiguous()
    q_out, k_out = query, key
    if not inplace:
        q_out = torch.empty(query.shape, dtype=query.dtype, device=device)
        k_out = None if key is None else torch.empty(key.shape, dtype=key.dtype, device=device)
    half = table.shape[1] if sin is not None else table.shape[1] // 2
    cos, sin = (table, sin) if sin is not None else (table[:, :half], table[:, half:])
    position_steps = (0, 0, 0)
    if positions is not None:
        positions = positions.to(device)
        axis_step, *steps = positions.stride() if pair_axis is not None else (0, *positions.stride())
        position_steps = (axis_step, *(0,) * (2 - len(steps)), *steps)
    if row_checks is not None and row_checks.device != device:
        row_checks = None
    head_size, pairs = query.shape[-1], triton.next_power_of_2(half)
    q_heads, k_heads = query.shape[-2], 0 if key is None else key.shape[-2]
    heads = min(triton.next_power_of_2(max(q_heads, k_heads, 1)), max(1, _TILE // pairs))
    grid = (batch * seq, triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads))
    unit = row_checks is None and scale > 0
    k, k_new = (query, q_out) if key is None else (key, k_out)
    # triton launches on the current device, which need not be the query's
    where = contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)
    with where:
        _rotate_kernel[grid](
            query, q_out, k, k_new, query if positions is None else positions, cos, sin,
            query if pair_axis is None else _on(device, tuple(pair_axis.tolist())),
            query if row_checks is None else row_checks,
            seq, rows, q_heads, k_heads,
            *_steps(query), *_steps(q_out), *_steps(k), *_steps(k_new),
            *position_steps, cos.stride(0), sin.stride(0), 0.999 * scale**2, 1.001 * scale**2,
            HALF=half, PAIRS=pairs, STEP=1 if neox else 2, GAP=half if neox else 1,
            REST=0 if inplace else head_size - 2 * half,
            REST_BLOCK=triton.next_power_of_2(max(1, head_size - 2 * half)),
            HEADS=heads, AXES=1 if pair_axis is None else positions.shape[0],
            POSITIONS=positions is not None, CHECKS=row_checks is not None, UNIT=unit, INVERSE=inverse,
        )  # fmt: skip
    return q_out, k_out


def _steps(x: Tensor) -> tuple[int, ...]:
    """Strides over batch, sequence and heads."""
    return (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]


@functools.lru_cache(maxsize=64)
def _on(device: torch.device, axes: tuple[int, ...]) -> Tensor:
    """The axis of each pair on the device; kept, since a copy in each call would wait for it."""
    return torch.tensor(axes, dtype=torch.uint8, device=device)
