"""The rotation by `rotate` and `live_rotate`, through the C kernel and through plain torch, against float64."""

import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from common import cache_liveness, rope_kernel
from common.cache_liveness import DeadBufferError
from common.ci_register import register_cpu_ci
from common.rope_kernel import DeadRowError, PositionError, live_rotate, register_live, rotate

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.fixture(autouse=True)
def path(kernel):
    """Every test runs on both paths."""
    return kernel


def make_table(rows=64, half=16, scale=1.0):
    angles = torch.outer(
        torch.arange(rows, dtype=torch.float64), 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    )
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * scale).float()


def expected(x, cos, sin, neox, inverse=False):
    """``x`` [..., S, H, D] rotated in float64 by rows ``[..., S, half]``, rounded once."""
    half = cos.shape[-1]
    cos, sin = cos.double().unsqueeze(-2), sin.double().unsqueeze(-2) * (-1 if inverse else 1)
    out = x.double().clone()
    first, second = (slice(0, half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = x[..., first].double(), x[..., second].double()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out.to(x.dtype)


def ulps(a, b):
    """The most representable numbers that lie between two tensors, element by element."""
    assert a.dtype == b.dtype and a.shape == b.shape
    line = []
    for x in (a, b):
        bits = x.contiguous().view(BITS[x.dtype]).long()
        lowest = -(1 << (8 * x.element_size() - 1))
        line.append(torch.where(bits < 0, lowest - bits, bits))
    return int((line[0] - line[1]).abs().max()) if a.numel() else 0


def make_pair(dtype=torch.float32, lead=(7,), heads=(3, 2), size=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*lead, h, size, generator=generator).to(dtype) for h in heads]


TABLE = make_table()
COS, SIN = TABLE.chunk(2, dim=1)
POSITIONS = torch.tensor([3, 1, 63, 0, 7, 7, 20])

# numerics


@pytest.mark.parametrize("inplace", (False, True))
@pytest.mark.parametrize("neox", (True, False))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", (32, 40))
def test_rotation_is_float64_rounded_once(dtype, neox, size, inplace):
    for inverse, rows_as in itertools.product((False, True), (torch.int32, torch.int64)):
        q, k = make_pair(dtype, size=size)
        want = [expected(x, COS[POSITIONS], SIN[POSITIONS], neox, inverse) for x in (q, k)]
        got = rotate(q, k, POSITIONS.to(rows_as), TABLE, is_neox_style=neox, inverse=inverse, inplace=inplace)
        assert max(map(ulps, got, want)) <= 1
        assert (got[0] is q) == (got[1] is k) == inplace
        assert all(torch.equal(x[..., 32:], y[..., 32:]) for x, y in zip(got, want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_differences_of_nearly_equal_products_keep_their_digits(dtype):
    """x cos - y sin where both products agree in nearly all digits: float32 arithmetic would leave noise."""
    cos, sin = COS[1:2], SIN[1:2]
    y = torch.linspace(0.5, 2, 512)[:, None, None] * torch.ones(16)
    q = torch.cat((y * (sin / cos), y), dim=-1).to(dtype)
    table = TABLE[1:2].expand(512, -1).contiguous()
    got, _ = rotate(q, None, None, table, is_neox_style=True)
    assert ulps(got, expected(q, cos.expand(512, -1), sin.expand(512, -1), True)) <= 1


def test_float64_queries_stay_float64():
    q, k = make_pair(torch.float64)
    got = rotate(q, k, POSITIONS, TABLE, is_neox_style=True)
    for x, y in zip(got, (q, k)):
        assert x.dtype == torch.float64
        torch.testing.assert_close(x, expected(y, COS[POSITIONS], SIN[POSITIONS], True), rtol=0, atol=1e-15)


def test_nan_and_infinity_harm_only_their_own_pairs():
    q, _ = make_pair(torch.bfloat16)
    broken = q.clone()
    broken[2, 1, 5], broken[4, 0, 20] = float("nan"), float("inf")
    got, _ = rotate(broken, None, POSITIONS, TABLE, is_neox_style=True)
    clean, _ = rotate(q, None, POSITIONS, TABLE, is_neox_style=True)
    touched = torch.zeros_like(q, dtype=torch.bool)
    touched[2, 1, [5, 21]] = touched[4, 0, [4, 20]] = True
    assert torch.equal(got[~touched], clean[~touched])
    assert not got[touched].isfinite().any()


# layouts


def test_positions_of_a_batch_are_shared_or_its_own():
    q, k = make_pair(lead=(3, 7))
    own = torch.stack((POSITIONS, POSITIONS.flip(0), POSITIONS * 0 + 5))
    for positions, rows in ((POSITIONS, POSITIONS.expand(3, 7)), (own, own), (own.t().contiguous().t(), own)):
        got = rotate(q, k, positions, TABLE, is_neox_style=True)
        assert max(ulps(x, expected(y, COS[rows], SIN[rows], True)) for x, y in zip(got, (q, k))) <= 1


def test_without_positions_a_token_takes_its_own_row():
    for lead in ((7,), (2, 7)):
        q, k = make_pair(lead=lead)
        got = rotate(q, k, None, COS.contiguous(), sin=SIN.contiguous(), is_neox_style=False)
        assert max(ulps(x, expected(y, COS[:7], SIN[:7], False)) for x, y in zip(got, (q, k))) <= 1


@pytest.mark.parametrize("lead", ((7,), (2, 7)))
def test_each_pair_takes_its_own_axis(lead):
    q, k = make_pair(lead=lead)
    pair_axis = torch.tensor([0] * 6 + [1] * 5 + [2] * 5, dtype=torch.uint8)
    positions = torch.randint(0, 64, (3, *lead), generator=torch.Generator().manual_seed(1))
    choose = pair_axis.long().expand(1, *lead, 16)
    cos, sin = (half[positions].gather(0, choose)[0] for half in (COS, SIN))
    got = rotate(q, k, positions, TABLE, is_neox_style=True, pair_axis=pair_axis)
    assert max(ulps(x, expected(y, cos, sin, True)) for x, y in zip(got, (q, k))) <= 1


def test_flat_queries_come_back_flat():
    for lead in ((7,), (2, 7)):
        for dtype in (torch.bfloat16, torch.float64):
            q, k = make_pair(dtype, lead=lead)
            want = rotate(q, k, POSITIONS, TABLE, is_neox_style=True)
            flat = [x.clone().flatten(-2) for x in (q, k)]
            for inplace in (False, True):
                got = rotate(*flat, POSITIONS, TABLE, is_neox_style=True, head_size=40, inplace=inplace)
                assert all(torch.equal(x, y.flatten(-2)) for x, y in zip(got, want))
    alone, none = rotate(q.flatten(-2), None, POSITIONS, TABLE, is_neox_style=True, head_size=40)
    assert none is None and torch.equal(alone, want[0].flatten(-2))


@pytest.mark.parametrize("inplace", (False, True))
def test_slices_of_a_fused_projection_and_transposes(inplace):
    fused = torch.randn(2, 7, 8, 40)
    untouched = fused.clone()
    q, k = fused[:, :, :3], fused[:, :, 3:5]
    want = [expected(x, COS[POSITIONS], SIN[POSITIONS], True) for x in (q, k)]
    got = rotate(q, k, POSITIONS, TABLE, is_neox_style=True, inplace=inplace)
    assert max(map(ulps, got, want)) <= 1
    assert torch.equal(fused[:, :, 5:], untouched[:, :, 5:])
    assert torch.equal(fused, untouched) != inplace
    assert inplace or all(x.is_contiguous() for x in got)

    heads_first = torch.randn(2, 3, 7, 40)
    want = expected(heads_first.transpose(1, 2), COS[POSITIONS], SIN[POSITIONS], True)
    got, _ = rotate(heads_first.transpose(1, 2), None, POSITIONS, TABLE, is_neox_style=True, inplace=inplace)
    assert ulps(got, want) <= 1
    assert not inplace or torch.equal(heads_first.transpose(1, 2), got)


def test_queries_without_a_contiguous_last_dimension_are_copied():
    q = torch.randn(7, 40, 3).transpose(1, 2)
    complex_part = torch.complex(torch.randn(7, 3, 40), torch.randn(7, 3, 40)).conj().imag  # lazily negated
    for x in (q, complex_part):
        got, _ = rotate(x, None, POSITIONS, TABLE, is_neox_style=True)
        assert ulps(got, expected(x.clone().contiguous(), COS[POSITIONS], SIN[POSITIONS], True)) <= 1
    shared = torch.randn(7, 1, 40).expand(7, 3, 40)
    got, _ = rotate(shared, None, POSITIONS, TABLE, is_neox_style=True)
    assert ulps(got, expected(shared, COS[POSITIONS], SIN[POSITIONS], True)) <= 1


def test_tables_that_are_parts_of_a_memory():
    memory = torch.full((66, 48), float("nan"))
    memory[2:, 8:40] = TABLE
    q, _ = make_pair()
    got, _ = rotate(q, None, POSITIONS, memory[2:, 8:40], is_neox_style=True)
    assert ulps(got, expected(q, COS[POSITIONS], SIN[POSITIONS], True)) <= 1


def test_nothing_to_rotate():
    q, k = make_pair()
    checks = rope_kernel.row_checks(TABLE)
    assert rotate(q[:0], k[:0], POSITIONS[:0], TABLE, is_neox_style=True, row_checks=checks)[0].shape == (0, 3, 40)
    assert rotate(q[:, :0], k, POSITIONS, TABLE, is_neox_style=True)[1].shape == k.shape
    assert rotate(q[:0], None, POSITIONS[:0], TABLE[:0], is_neox_style=True)[0].shape == (0, 3, 40)


def test_meta_queries_give_meta():
    q, k = (x.to("meta") for x in make_pair())
    got = rotate(q, k, POSITIONS, TABLE, is_neox_style=True)
    assert [x.shape for x in got] == [q.shape, k.shape] and got[0].is_meta


def test_calls_that_differ_in_one_thing_do_not_take_one_for_the_other(path):
    """The kernel keeps the last call packed: whatever differs in the next must be noticed."""
    if path == "torch":
        pytest.skip("plain torch keeps nothing")
    table, other = make_table(), make_table()[:, :24].contiguous()
    wide = torch.cat((table, table[:, :4]), dim=1)[:, :32]
    cos, sin = (half.contiguous() for half in table.chunk(2, dim=1))
    q, k = make_pair(lead=(6,))
    q4, k4 = make_pair(lead=(2, 3))
    heads_first = q4.transpose(1, 2).contiguous().transpose(1, 2)
    axis = torch.tensor([0, 1] * 8, dtype=torch.uint8)
    positions = torch.tensor([5, 1, 62, 0, 7, 7])
    checks = rope_kernel.row_checks(table)
    usual = {"positions": positions, "table": table}
    fused = [torch.cat((x, x), dim=1)[:, : x.shape[1]] for x in (q, k)]
    square = torch.cat((q, q))[:3]
    memory = torch.cat((table.flatten(), torch.ones(256)))
    variants = [
        ((q, k), usual),
        ((q, None), usual),
        ((q, k[:, :1]), usual),
        ((q, k[:, :1].contiguous()), usual),
        ((q[:, :2], k), usual),
        ((q.bfloat16(), k.bfloat16()), usual),
        ((q.half(), k.half()), usual),
        ((q.double(), k.double()), usual),
        ((q.flatten(1), k.flatten(1)), {**usual, "head_size": 40}),
        ((q.view(6, 1, 120), None), usual),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), k), usual),
        ((q[:3], k[:3]), {**usual, "positions": positions[:3]}),
        ((q[:3], k[:3]), {**usual, "positions": positions[::2]}),
        ((q[:3], k[:3]), {**usual, "positions": positions[::2].contiguous()}),
        ((q4, k4), {**usual, "positions": positions[:3]}),
        ((q4, k4), {**usual, "positions": positions.view(2, 3)}),
        ((q4, k4), {**usual, "positions": positions.view(3, 2).t()}),
        ((q4, k4), {**usual, "positions": positions.view(2, 3), "pair_axis": axis}),
        ((heads_first, k4), {**usual, "positions": positions[:3]}),
        ((q, k), {**usual, "positions": positions.int()}),
        ((q, k), {**usual, "positions": None}),
        ((q, k), {**usual, "table": other}),
        ((q, k), {**usual, "table": wide}),
        ((q, k), {**usual, "table": table[1:]}),
        ((q, k), {**usual, "table": cos, "sin": sin}),
        ((q, k), {**usual, "table": cos, "sin": sin.repeat(1, 2)[:, :16]}),
        ((q, k), {**usual, "row_checks": checks}),
        ((q, k), {**usual, "row_checks": checks.repeat_interleave(2)[::2]}),
        ((q, k), {**usual, "scale": 1.0}),
        ((q, k), {**usual, "inverse": True}),
        ((q, k), {**usual, "is_neox_style": False}),
        ((q, k), {**usual, "positions": torch.stack((positions, positions.flip(0))), "pair_axis": axis}),
        ((q, k), {**usual, "positions": torch.stack((positions, positions.flip(0))), "pair_axis": axis.flip(0)}),
        ((q, k), {**usual, "inplace": True}),
        (fused, usual),
        (fused, {**usual, "inplace": True}),
        ((square, None), {**usual, "positions": positions[:3]}),
        ((square, None), {**usual, "positions": positions[:3], "head_size": 40}),
        ((q, k), {**usual, "table": table[:, :24]}),
        ((q, k), {**usual, "table": memory.as_strided((64, 32), (32, 1))}),
        ((q, k), {**usual, "table": memory.as_strided((64, 32), (34, 1))}),
    ]

    def run(variant):
        heads, keywords = variant
        if keywords.get("inplace"):
            heads = [torch.cat((x, x), dim=1)[:, : x.shape[1]] for x in heads]
        return rotate(*heads, **{"is_neox_style": True, **keywords})

    def alone(variant):
        rope_kernel._call.layout = None
        return run(variant)

    fresh = [alone(variant) for variant in variants]
    for first, second in itertools.permutations(range(len(variants)), 2):
        alone(variants[first])
        got = run(variants[second])
        for x, y in zip(got, fresh[second]):
            assert x is y is None or (torch.equal(x, y) and x.stride() == y.stride()), (first, second)
    axes = {"positions": torch.stack((positions, positions))}
    cut = table.clone()
    lower, upper = cut[:-1], cut[1:]
    cut.untyped_storage().resize_(lower.nbytes)
    for error, change, before in (
        (PositionError, {"positions": positions + 2}, {}),
        (PositionError, {"positions": positions - 1}, {}),
        (PositionError, {"table": table[:60]}, {}),
        (ValueError, {"positions": positions[:5]}, {}),
        (NotImplementedError, {"positions": positions.to("meta")}, {}),
        (ValueError, {"key": k.bfloat16()}, {}),
        (ValueError, {"key": k.to("meta")}, {}),
        (ValueError, {"table": table.view(torch.int32)}, {}),
        (DeadBufferError, {"table": FakeTensorMode().from_tensor(table)}, {}),
        (DeadBufferError, {"table": freed(table)}, {}),
        (DeadBufferError, {"table": freed(table, 4000)}, {}),
        (DeadBufferError, {"table": table.to("meta")}, {}),
        (DeadBufferError, {"table": upper}, {"table": lower}),
        (DeadRowError, {"scale": 1.1}, {"scale": 1.0}),
        (ValueError, {"row_checks": checks[:9]}, {"row_checks": checks}),
        (ValueError, {"row_checks": checks.float()}, {"row_checks": checks}),
        (NotImplementedError, {"row_checks": checks.to("meta")}, {"row_checks": checks}),
        (ValueError, {**axes, "pair_axis": axis.int()}, {**axes, "pair_axis": axis}),
    ):
        usual = {"query": q, "key": k, "positions": positions, "table": table, "is_neox_style": True}
        rotate(**{**usual, **before})
        with pytest.raises(error) as caught:
            rotate(**{**usual, **change})
        assert "refused" not in str(caught.value)  # that is the kernel's own last defence


# refusals, before anything is written


def refuses(error, *arguments, match=None, **keywords):
    """``rotate`` raises and leaves query and key as they were, in place too."""
    raised = []
    for inplace in (False, True):
        before = [x.clone() for x in arguments[:2] if isinstance(x, torch.Tensor)]
        with pytest.raises(error, match=match) as caught:
            rotate(*arguments, **{"is_neox_style": True, "inplace": inplace, **keywords})
        assert all(torch.equal(x, y) for x, y in zip(before, arguments))
        raised.append(caught.value)
    return raised[0]


@pytest.mark.parametrize("position", (-1, 64, 1 << 40, -(1 << 62)))
@pytest.mark.parametrize("token", (0, 6))
def test_positions_without_a_row(position, token):
    positions = POSITIONS.clone()
    positions[token] = position
    error = refuses(PositionError, *make_pair(), positions, TABLE, match=str(position))
    assert isinstance(error, IndexError) and (error.position, error.rows) == (position, 64)
    refuses(PositionError, *make_pair(), None, TABLE[:6].contiguous())


def flip_sign(row):
    row[3] = -row[3]


def swap_halves(row):
    row.copy_(row.roll(16))


def flip_last_bit(row):
    row.view(torch.int32)[19] ^= 1


DAMAGES = {
    "zeros": lambda row: row.zero_(),
    "nan": lambda row: row.fill_(float("nan")),
    "scaled": lambda row: row.mul_(1.01),
    "another row": lambda row: row.copy_(TABLE[50]),
    "sign": flip_sign,
    "halves swapped": swap_halves,
    "last bit": flip_last_bit,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_row_is_never_used(damage):
    table, checks = TABLE.clone(), rope_kernel.row_checks(TABLE)
    damage(table[7])
    error = refuses(DeadRowError, *make_pair(), POSITIONS, table, row_checks=checks, match="row 7")
    assert isinstance(error, DeadBufferError) and error.position == 7
    parts = [x.contiguous() for x in table.chunk(2, dim=1)]
    refuses(DeadRowError, *make_pair(), POSITIONS, parts[0], sin=parts[1], row_checks=checks)
    q, k = make_pair()
    others = torch.where(POSITIONS == 7, 6, POSITIONS)
    got, _ = rotate(q, k, others, table, is_neox_style=True, row_checks=checks)
    assert ulps(got, expected(q, COS[others], SIN[others], True)) <= 1


@pytest.mark.parametrize("scale", (1.0, 1.37))
def test_rows_that_are_not_unit_rotations(scale):
    table = make_table(scale=scale)
    rotate(*make_pair(), POSITIONS, table, is_neox_style=True, scale=scale)
    for name in ("zeros", "nan", "scaled"):
        damaged = table.clone()
        DAMAGES[name](damaged[7])
        assert refuses(DeadRowError, *make_pair(), POSITIONS, damaged, scale=scale).position == 7
    refuses(DeadRowError, *make_pair(), POSITIONS, table, scale=scale * 1.1)


def freed(tensor, keep=0):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(keep)
    return tensor


def test_dead_tables():
    fake = FakeTensorMode().from_tensor(TABLE)
    for table, fault in (
        (TABLE.to("meta"), "on meta"),
        (freed(TABLE), "storage freed"),
        (freed(TABLE, 4000), "storage too small"),
        (fake, "fake"),
    ):
        refuses(DeadBufferError, *make_pair(), POSITIONS, table, match=fault)
        halves = TABLE[:, :16].contiguous()
        refuses(DeadBufferError, *make_pair(), POSITIONS, halves, sin=table, match=fault)


def test_arguments_that_do_not_fit():
    q, k = make_pair()
    for error, arguments, keywords, match in (
        (ValueError, (q, k, POSITIONS, TABLE.double()), {}, "float32"),
        (ValueError, (q, k, POSITIONS, TABLE[:, :31].contiguous()), {}, "31 wide"),
        (ValueError, (q, k, POSITIONS, torch.ones(64, 42)), {}, "42 wide"),
        (ValueError, (q, k, POSITIONS, torch.ones(64, 0)), {}, "0 wide"),
        (ValueError, (q, k, POSITIONS, torch.ones(64)), {}, "table is"),
        (ValueError, (q, k, POSITIONS, TABLE.t().contiguous().t()), {}, "contiguous last"),
        (ValueError, (q, k, POSITIONS, COS.contiguous()), {"sin": SIN[:9].contiguous()}, "sin has shape"),
        (ValueError, (q, k[:6], POSITIONS, TABLE), {}, "key has shape"),
        (ValueError, (q, k[..., :32], POSITIONS, TABLE), {}, "key has shape"),
        (ValueError, (q, k.bfloat16(), POSITIONS, TABLE), {}, "bfloat16"),
        (ValueError, (q[0], None, POSITIONS, TABLE), {}, "query has shape"),
        (ValueError, (q, k, POSITIONS[:6], TABLE), {}, "positions have shape"),
        (ValueError, (q, k, POSITIONS[None], TABLE), {}, "positions have shape"),
        (ValueError, (q, k, POSITIONS[3], TABLE), {}, "positions have shape"),
        (TypeError, (q, k, POSITIONS.float(), TABLE), {}, "float32"),
        (TypeError, (q.long(), k.long(), POSITIONS, TABLE), {}, "int64"),
        (ValueError, (q, k, POSITIONS, TABLE), {"pair_axis": torch.zeros(16)}, "pair_axis is"),
        (ValueError, (q, k, None, TABLE), {"pair_axis": torch.zeros(16, dtype=torch.uint8)}, "without positions"),
        (ValueError, (q, k, POSITIONS[None], TABLE), {"pair_axis": torch.ones(16, dtype=torch.uint8)}, "axis"),
        (ValueError, (q, k, POSITIONS, TABLE), {"row_checks": torch.zeros(9, dtype=torch.int32)}, "row_checks is"),
        (ValueError, (q.flatten(1), None, POSITIONS, TABLE), {"head_size": 37}, "query has shape"),
    ):
        refuses(error, *arguments, match=match, **keywords)


def test_freed_queries_and_positions_do_not_crash(path):
    if path == "torch":
        pytest.skip("torch itself reads freed storages")
    q, k = make_pair()
    for arguments in ((freed(q), k, POSITIONS), (q, freed(k), POSITIONS), (q, k, freed(POSITIONS))):
        with pytest.raises(ValueError, match="freed"):
            rotate(*arguments, TABLE, is_neox_style=True)


def test_overlapping_queries_are_not_rotated_in_place():
    q, _ = make_pair()
    for x in (
        torch.randn(1, 3, 40).expand(7, 3, 40),
        torch.randn(1000).as_strided((7, 3, 40), (60, 20, 1)),
        torch.randn(7, 40, 3).transpose(1, 2),
    ):
        with pytest.raises(ValueError, match="inplace"):
            rotate(x, None, POSITIONS, TABLE, is_neox_style=True, inplace=True)
        with pytest.raises(ValueError, match="inplace"):
            rotate(q, x, POSITIONS, TABLE, is_neox_style=True, inplace=True)
    with pytest.raises(ValueError, match="twice"):
        rotate(q, q, POSITIONS, TABLE, is_neox_style=True, inplace=True)


# autograd and transforms


def rotated(q, k=None):
    got = rotate(q, k, POSITIONS, TABLE, is_neox_style=True)
    return got[0] if k is None else got


@pytest.mark.parametrize("neox", (True, False))
def test_gradients_of_every_order_and_mode(neox):
    q, k = (x.requires_grad_() for x in make_pair(torch.float64, lead=(2,), heads=(2, 1), size=8))
    table = make_table(half=3)

    def function(q, k=None):
        got = rotate(q, k, POSITIONS[:2], table, is_neox_style=neox)
        return got[0] if k is None else got

    assert gradcheck(function, (q, k), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, (q, k))
    assert gradcheck(function, (q,), check_forward_ad=True)
    assert gradcheck(lambda k: function(q.detach(), k), (k,), check_forward_ad=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_the_inverse_rotation(dtype):
    q, k = (x.requires_grad_() for x in make_pair(dtype))
    grads = make_pair(dtype, seed=1)
    got = torch.autograd.grad(rotated(q, k), (q, k), grads)
    assert (
        max(ulps(x, expected(y, COS[POSITIONS], SIN[POSITIONS], True, inverse=True)) for x, y in zip(got, grads)) <= 1
    )


def test_in_place_under_autograd():
    q, k = make_pair()
    for arguments in ((q.clone().requires_grad_(), k), (q, k.clone().requires_grad_())):
        with pytest.raises(RuntimeError, match="autograd"):
            rotate(*arguments, POSITIONS, TABLE, is_neox_style=True, inplace=True)
    weight, saved = torch.ones_like(q, requires_grad=True), q.clone()
    loss = (weight * saved).sum()
    with torch.no_grad():
        rotate(saved, None, POSITIONS, TABLE, is_neox_style=True, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        inferred = q.clone()
        assert torch.equal(rotate(inferred, k, POSITIONS, TABLE, is_neox_style=True, inplace=True)[0], rotated(q))


def test_functional_transforms():
    q, _ = make_pair(torch.float64)
    stack = torch.stack((q, q + 1))
    positions = torch.stack((POSITIONS, POSITIONS.flip(0)))
    many = torch.func.vmap(lambda x, p: rotate(x, None, p, TABLE, is_neox_style=True)[0], in_dims=(0, 0))
    for i in range(2):
        want, _ = rotate(stack[i], None, positions[i], TABLE, is_neox_style=True)
        assert torch.equal(many(stack, positions)[i], want)
    value, tangent = torch.func.jvp(rotated, (q,), (q + 1,))
    assert torch.equal(value, rotated(q)) and torch.equal(tangent, rotated(q + 1))
    twice, _ = torch.func.jvp(lambda x: torch.func.jvp(lambda y: rotated(y).pow(2), (x,), (x,))[1], (q,), (q,))
    torch.testing.assert_close(twice, 2 * rotated(q).pow(2))
    outer = torch.func.jvp(lambda x: torch.func.jvp(rotated, (q,), (x,))[1], (q,), (q + 1,))[1]
    assert torch.equal(outer, rotated(q + 1))
    with forward_ad.dual_level():
        dual = rotated(forward_ad.make_dual(q, q + 1))
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, rotated(q + 1))

    def loss(x):
        return rotated(x).pow(3).sum()

    small = q[:1].repeat(7, 1, 1)
    torch.testing.assert_close(torch.func.grad(loss)(small), torch.autograd.functional.jacobian(loss, small))
    torch.testing.assert_close(torch.func.hessian(loss)(small), torch.autograd.functional.hessian(loss, small))
    with pytest.raises(RuntimeError, match="inplace=False"):
        torch.func.vmap(lambda x: rotate(x, None, POSITIONS, TABLE, is_neox_style=True, inplace=True)[0])(stack.clone())


def test_tensor_subclasses_keep_their_class():
    class Marked(torch.Tensor):
        pass

    q, _ = make_pair()
    got = rotated(q.as_subclass(Marked))
    assert type(got) is Marked and torch.equal(got.as_subclass(torch.Tensor), rotated(q))
    assert torch.equal(rotated(nn.Parameter(q, requires_grad=False)), rotated(q))


class Unwrapping(torch.Tensor):
    """A subclass that sees each operator, as DTensor does, and holds its values elsewhere."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        return func(*(x.inner if isinstance(x, cls) else x for x in args), **(kwargs or {}))


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inplace", (False, True))
def test_modes_and_subclasses_that_watch_operators_see_the_rotation(inplace):
    name = "live_rope.rotate_.default" if inplace else "live_rope.rotate.default"
    q, _ = make_pair()
    want = rotated(q)
    inner = q.clone()
    got = rotate(Unwrapping(inner), None, POSITIONS, TABLE, is_neox_style=True, inplace=inplace)[0]
    assert Unwrapping.seen[-1] == name and torch.equal(inner if inplace else got, want)
    with Watching() as mode:
        got, _ = rotate(q, None, POSITIONS, TABLE, is_neox_style=True, inplace=inplace)
    assert name in mode.seen and torch.equal(got, want)


def test_fake_mode_gives_shapes_and_mixing_is_refused():
    q, k = make_pair()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, POSITIONS, TABLE)]
        got = rotate(*fakes, is_neox_style=True)
        assert [x.shape for x in got] == [q.shape, k.shape]
    with pytest.raises(AssertionError, match="Fake"):
        rotate(q, k, fakes[2], TABLE, is_neox_style=True)


# processes and threads


def test_many_threads_at_once():
    """Each thread has its own call; sizes differ, so that one's arguments in another's call would be seen."""
    failures = []

    def work(number):
        for turn in range(20):
            tokens = 1 + (number * 371 + turn * 113) % 700
            q, k = make_pair(torch.bfloat16, lead=(tokens,), heads=(8, 2), seed=number)
            positions = torch.arange(tokens) % 64
            got = rotate(q, k, positions, TABLE, is_neox_style=True)
            want = [expected(x, COS[positions], SIN[positions], True) for x in (q, k)]
            failures.extend(turn for x, y in zip(got, want) if ulps(x, y) > 1)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_rotates():
    """The threads of torch's pool stay in the parent: a child that waited for them would never end."""
    q, k = make_pair(torch.bfloat16, lead=(3000,), heads=(32, 8), size=128)
    positions = torch.arange(3000) % 64
    want = rotate(q, k, positions, TABLE, is_neox_style=True)  # the pool runs
    child = os.fork()
    if child == 0:
        if rope_kernel._library is None:
            torch.set_num_threads(1)
        got = rotate(q, k, positions, TABLE, is_neox_style=True)
        torch.set_num_threads(1)  # torch's own loops would wait for the pool
        os._exit(0 if rope_kernel._pool == 0 and all(map(torch.equal, got, want)) else 1)
    deadline = time.monotonic() + 30
    done, status = os.waitpid(child, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.01)
        done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done and status == 0


def run_python(code, kernel):
    environment = {**os.environ, "LIVE_ROPE_KERNEL": kernel}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=os.getcwd()
    )


def test_the_environment_chooses_the_kernel(path, monkeypatch, caplog):
    if path == "torch":
        pytest.skip("does not depend on the path")
    code = "from common import rope_kernel; print(rope_kernel._library is not None)"
    assert run_python(code, "torch").stdout.strip() == "False"
    assert run_python(code, "c").stdout.strip() == "True"
    assert "must be auto, c, torch or triton" in run_python(code, "cuda").stderr
    monkeypatch.setattr(rope_kernel, "EXTENSION_SUFFIXES", [".missing"])
    with caplog.at_level(logging.INFO, "live_rope"):
        assert rope_kernel._load() is None
    assert [record.name for record in caplog.records] == ["live_rope"] and "plain torch" in caplog.text
    monkeypatch.setattr(rope_kernel, "_WANTED", "c")
    with pytest.raises(ImportError, match="LIVE_ROPE_KERNEL=c"):
        rope_kernel._load()


def test_checksums_are_those_of_the_guard():
    wide = torch.randn(130, 48)
    for table in (TABLE, wide[:, :32], TABLE.bfloat16().float()):
        assert torch.equal(rope_kernel.row_checks(table), cache_liveness.row_checks(table))


# live modules


class Live(nn.Module):
    """The least that live_rotate asks of a module, counting how often a right table was made."""

    def __init__(self):
        super().__init__()
        self._handle = register_live(self)
        self.table, self.heals = TABLE.clone(), 0

    def rotate_now(self, positions, query, key, *, inplace=False, inverse=False, head_size=None):
        if cache_liveness.tensor_fault(self.table):
            self.table, self.heals = TABLE.clone(), self.heals + 1
        return rotate(
            query, key, positions, self.table, is_neox_style=True, inplace=inplace, inverse=inverse, head_size=head_size
        )


def test_live_modules_are_asked_when_the_rotation_runs():
    q, k = make_pair()
    want = rotate(q, k, POSITIONS, TABLE, is_neox_style=True)
    module = Live()
    for grad in (False, True):
        module.table = TABLE.to("meta")
        got = live_rotate(module, POSITIONS, q.clone().requires_grad_(grad), k)
        assert all(map(torch.equal, got, want)) and got[0].requires_grad == grad
    assert module.heals == 2
    alone, none = live_rotate(module, POSITIONS, q.clone().requires_grad_(), None)
    assert none is None and torch.equal(alone, want[0])
    given = q.clone(), k.clone()
    got = live_rotate(module, POSITIONS, *given, inplace=True)
    assert all(map(torch.equal, given, want)) and got[0] is given[0] and got[1] is given[1]
    flat = live_rotate(module, POSITIONS, q.flatten(1).requires_grad_(), k.flatten(1), head_size=40)
    assert all(torch.equal(x, y.flatten(1)) for x, y in zip(flat, want))
    with pytest.raises(RuntimeError, match="autograd"):
        live_rotate(module, POSITIONS, q.clone().requires_grad_(), k, inplace=True)


def test_gradients_of_live_modules():
    q, k = (x.requires_grad_() for x in make_pair(torch.float64, lead=(1,), heads=(2, 1), size=32))
    module = Live()
    assert gradcheck(lambda q, k: live_rotate(module, POSITIONS[:1], q, k), (q, k), check_forward_ad=True)
    assert gradgradcheck(lambda q, k: live_rotate(module, POSITIONS[:1], q, k), (q, k))


def test_a_module_that_is_gone():
    q, _ = make_pair()
    module = Live()
    handle = module._handle
    del module
    with pytest.raises(DeadBufferError, match="gone"):
        torch.ops.live_rope.rotate_live(q, None, POSITIONS, handle, False)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
