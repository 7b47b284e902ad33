"""The C kernel straight through ctypes, built here: every dtype, style, layout and instruction set against float64."""

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

SOURCE = Path(__file__).parents[3] / "common" / "csrc" / "rope_kernel.c"
FUZZER = Path(__file__).with_name("rope_kernel_fuzz.c")
WARNINGS = ("-Wall", "-Wextra", "-Werror")
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
INSTRUCTION_SETS = ("generic", "avx2", "avx512", "avx512bf16", "neon")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STYLES = {"neox": 0, "gptj": 1}
OK, BAD_POSITION, BAD_ROW, BAD_ARGUMENT = range(4)

i64, i32, pointer = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p


class Call(ctypes.Structure):
    """rope_call of the C file, field by field."""

    _fields_ = [
        *((name, i64) for name in ("batch", "seq", "rotary_dim", "head_dim", "q_heads", "k_heads")),
        *(("q", pointer), ("q_out", pointer), ("q_stride", i64 * 3), ("q_out_stride", i64 * 3)),
        *(("k", pointer), ("k_out", pointer), ("k_stride", i64 * 3), ("k_out_stride", i64 * 3)),
        *((name, i32) for name in ("dtype", "interleaved", "inverse", "position_bits")),
        *(
            ("positions", pointer),
            ("position_stride", i64 * 3),
            ("pair_axis", pointer),
            ("axes", i32),
            ("threads", i32),
        ),
        *(("cos", pointer), ("sin", pointer), ("cos_stride", i64), ("sin_stride", i64), ("rows", i64)),
        *(("row_checks", pointer), ("scale", ctypes.c_double), ("parallel", pointer)),
        *(("bad_position", i64), ("bad_token", i64)),
    ]


def load(path):
    library = ctypes.CDLL(str(path))
    library.rope_isa.restype = ctypes.c_char_p
    library.rope_row_checks.argtypes = [pointer, pointer, i64, i64, i64, i64, pointer, i32, pointer]
    library.rope_row_checks.restype = None
    return library


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """Name of instruction set -> library. Each is a copy of one build, since the choice is made once per load."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("rope_kernel")
    built = folder / "built.so"
    command = [COMPILER, "-O2", "-std=c11", *WARNINGS, "-fPIC", "-shared", "-pthread"]
    subprocess.run([*command, str(SOURCE), "-o", str(built)], check=True)
    found = {}
    before = os.environ.get("LIVE_ROPE_ISA")
    try:
        for name in INSTRUCTION_SETS:
            os.environ["LIVE_ROPE_ISA"] = name
            library = load(shutil.copy(built, folder / f"{name}.so"))
            if library.rope_isa().decode() == name:
                found[name] = library
    finally:
        os.environ.pop("LIVE_ROPE_ISA")
        if before is not None:
            os.environ["LIVE_ROPE_ISA"] = before
    return found


@pytest.fixture(params=INSTRUCTION_SETS)
def library(request, libraries):
    if request.param not in libraries:
        pytest.skip(f"this machine has no {request.param}")
    return libraries[request.param]


def strides(tensor):
    return (i64 * 3)(*tensor.stride()[:3])


def rotate(
    library, q, k, positions, cos, sin, *, style="neox", inverse=False, inplace=False, pair_axis=None, checks=None, scale=0.0,
    threads=1, parallel=None, rotary_dim=None,
):  # fmt: skip
    """One call on q, k [B, S, H, D]; positions None or [A, B, S]. Returns the status, q', k' and the call."""
    q_out = q if inplace else torch.full(q.shape, 7.0, dtype=q.dtype)
    k_out = k if inplace or k is None else torch.full(k.shape, 7.0, dtype=q.dtype)
    call = Call(
        batch=q.shape[0], seq=q.shape[1], rotary_dim=rotary_dim or 2 * cos.shape[-1], head_dim=q.shape[3],
        q_heads=q.shape[2], q=q.data_ptr(), q_out=q_out.data_ptr(), q_stride=strides(q), q_out_stride=strides(q_out),
        dtype=DTYPES[q.dtype], interleaved=STYLES[style], inverse=inverse, axes=1, threads=threads, parallel=parallel,
        cos=cos.data_ptr(), sin=sin.data_ptr(), cos_stride=cos.stride(0), sin_stride=sin.stride(0), rows=cos.shape[0],
        scale=scale,
    )  # fmt: skip
    if k is not None:
        call.k_heads, call.k, call.k_out = k.shape[2], k.data_ptr(), k_out.data_ptr()
        call.k_stride, call.k_out_stride = strides(k), strides(k_out)
    if positions is not None:
        call.positions, call.position_bits = positions.data_ptr(), positions.element_size() * 8
        call.position_stride = strides(positions)
    if pair_axis is not None:
        call.pair_axis, call.axes = pair_axis.data_ptr(), positions.shape[0]
    if checks is not None:
        call.row_checks = checks.data_ptr()
    return library.rope_rotate(ctypes.byref(call)), q_out, k_out, call


def make_table(rows, half, scale=1.0, base=10000.0):
    """[rows, 2 * half] float32, cos half | sin half."""
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * base ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    return (torch.cat((angles.cos(), angles.sin()), -1) * scale).float()


def halves(table):
    return table.chunk(2, dim=-1)


def row_of_pairs(table_half, positions, pair_axis, batch, seq):
    """[B, S, 1, half]: the row each token, and with pair_axis each pair, takes."""
    if positions is None:
        return table_half[torch.arange(seq)][None, :, None].expand(batch, -1, -1, -1)
    rows = table_half[positions.long()]  # [A, B, S, half]
    if pair_axis is None:
        return rows[0][:, :, None]
    return rows.gather(0, pair_axis.long().expand(1, *rows.shape[1:]))[0][:, :, None]


def style_slices(style, half):
    """Where the first and the second elements of the pairs lie."""
    if style == "neox":
        return slice(0, half), slice(half, 2 * half)
    return slice(0, 2 * half, 2), slice(1, 2 * half, 2)


def expected(x, positions, cos, sin, style="neox", inverse=False, pair_axis=None):
    """The rotation of x [B, S, H, D] in float64, not rounded: the products are exact there."""
    half = cos.shape[-1]
    c = row_of_pairs(cos, positions, pair_axis, *x.shape[:2]).double()
    s = row_of_pairs(sin, positions, pair_axis, *x.shape[:2]).double() * (-1 if inverse else 1)
    first, second = style_slices(style, half)
    out = x.double().clone()
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first] = a * c - b * s
    out[..., second] = b * c + a * s
    return out


def ordered(x):
    """Bits of a float tensor as integers that step by one from each value to the next."""
    bits = x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16).long()
    low = -(2**31) if x.dtype == torch.float32 else -(2**15)
    return torch.where(bits < 0, low - bits, bits)


def assert_within_one_ulp(got, exact):
    want = exact.to(got.dtype)
    assert torch.equal(got.isnan(), want.isnan())
    distance = torch.where(want.isnan(), 0, (ordered(got) - ordered(want)).abs())
    assert distance.max().item() <= (0 if got.dtype == torch.float32 else 1)


def make_qk(dtype, batch=2, seq=19, heads=(3, 2), dim=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, seq, h, dim, generator=generator).to(dtype) for h in heads]


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
every_style = pytest.mark.parametrize("style", STYLES)


@every_dtype
@every_style
def test_equals_float64_rounded_once(library, dtype, style):
    for half, rest, inplace, inverse in itertools.product(
        (1, 8, 17, 40, 64, 128, 150), (0, 5), (False, True), (False, True)
    ):
        q, k = make_qk(dtype, dim=2 * half + rest)
        cos, sin = halves(make_table(50, half, scale=1.2))
        positions = torch.randint(0, 50, (1, 2, 19))
        want = [expected(x, positions, cos, sin, style, inverse) for x in (q, k)]
        status, *got, _ = rotate(library, q, k, positions, cos, sin, style=style, inverse=inverse, inplace=inplace)
        assert status == OK
        for x, exact in zip(got, want, strict=True):
            assert_within_one_ulp(x, exact)


@every_dtype
@every_style
def test_cancellation_costs_no_accuracy(library, dtype, style):
    """x = sin, y = cos up to rounding, so that x cos - y sin is what rounding left."""
    cos, sin = halves(make_table(200, 32))
    x = torch.empty(1, 200, 1, 64)
    first, second = style_slices(style, 32)
    x[0, :, 0, first], x[0, :, 0, second] = sin, cos
    x = x.to(dtype)
    status, got, _, _ = rotate(library, x, None, None, cos, sin, style=style)
    assert status == OK
    assert_within_one_ulp(got, expected(x, None, cos, sin, style))


@every_dtype
@every_style
def test_rounds_to_nearest_even(library, dtype, style):
    """(1, 0) turned by (c, s) is (c, s): the table's values rounded to the dtype, ties and NaN of any bits included."""
    bits = torch.randint(-(2**31), 2**31, (64, 64), dtype=torch.int64)
    bits[16:32] &= ~0xFFFF
    bits[32:48] = bits[32:48] & ~0xFFFF | 0x8000  # halfway between two bfloat16
    bits[48:] = bits[48:] & 0x8FFFE000 | 0x30001000  # of the size of float16's values, halfway between two
    bits[0, :4] = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7F7FFFFF])
    cos, sin = halves(bits.to(torch.int32).view(torch.float32))
    x = torch.zeros(1, 64, 1, 64, dtype=dtype)
    first, second = style_slices(style, 32)
    x[..., first] = 1
    got = rotate(library, x, None, None, cos, sin, style=style)[1][0, :, 0]
    finite = cos.isfinite() & sin.isfinite()  # infinity times zero is not a number
    for part, table in ((got[:, first], cos), (got[:, second], sin)):
        want = torch.where(finite, table, float("nan")).to(dtype)
        torch.testing.assert_close(part[finite], want[finite], rtol=0, atol=0)
    pairs = expected(x, None, cos, sin, style)[0, :, 0]
    assert torch.equal(got.isnan(), pairs.isnan())


@every_dtype
@every_style
def test_tiny_huge_and_infinite_values(library, dtype, style):
    """Subnormal results, overflow, and infinities times rows of few digits: all as float64 has them."""
    powers = (-140, -126, -65, -60, -20, 0, 14, 64, 66, 127)
    sizes = (0.0, *(2.0**power for power in powers), 1.5 * 2.0**-60, 1.5, float("inf"), float("nan"))
    q = torch.tensor(list(itertools.product(sizes, sizes, (1, -1)))).to(dtype)  # x, y and a sign for y
    x, y = q[:, 0], q[:, 1] * q[:, 2]
    heads = torch.empty(1, 1, q.shape[0], 2 * 64, dtype=dtype)
    first, second = style_slices(style, 64)
    heads[..., first], heads[..., second] = x[:, None], y[:, None]
    for c, s in itertools.product((0.0, 2.0**-70, 2.0**-34, 0.1, 0.5, 1.0, 2.0**100), (0.0, -(2.0**-72), 0.25, 0.7)):
        cos, sin = torch.full((1, 64), c), torch.full((1, 64), s)
        exact = expected(heads, None, cos, sin, style)
        status, got, _, _ = rotate(library, heads, None, None, cos, sin, style=style)
        assert status == OK
        want = exact.to(dtype)
        assert torch.equal(got.isnan(), want.isnan()), (c, s)
        assert torch.equal(got.isinf(), want.isinf()), (c, s)
        usual = want.isfinite()
        assert (ordered(got)[usual] - ordered(want)[usual]).abs().max() <= (0 if dtype == torch.float32 else 1), (c, s)


@every_dtype
@every_style
def test_nan_and_infinity_touch_only_their_pair(library, dtype, style):
    q, k = make_qk(dtype, dim=2 * 41)
    cos, sin = halves(make_table(19, 41))
    _, clean, _, _ = rotate(library, q, k, None, cos, sin, style=style)
    for special in (float("nan"), float("inf"), -float("inf")):
        for element in (0, 13, 40, 41, 57, 81):
            x = q.clone()
            x[1, 7, 2, element] = special
            partner = (element + 41) % 82 if style == "neox" else element ^ 1
            status, got, _, _ = rotate(library, x, k, None, cos, sin, style=style)
            assert status == OK
            assert_within_one_ulp(got, expected(x, None, cos, sin, style))
            got[1, 7, 2, [element, partner]] = clean[1, 7, 2, [element, partner]]
            assert torch.equal(got, clean)


@every_dtype
def test_extremes_of_the_dtype(library, dtype):
    """Largest, smallest and subnormal values: overflow to infinity, gradual underflow, no intermediate overflow."""
    info = torch.finfo(dtype)
    values = torch.tensor(
        [info.max, -info.max, info.tiny, -info.tiny, info.smallest_normal / 64, info.max / 2, 0.0, -0.0]
    )
    x = torch.cartesian_prod(values, values).repeat(7, 1).T.reshape(1, 1, 1, -1).to(dtype)
    half = x.shape[-1] // 2
    for scale in (1.0, 1.5):
        cos, sin = halves(make_table(2, half, scale=scale, base=1.0)[1:].contiguous())
        status, got, _, _ = rotate(library, x, None, None, cos, sin)
        assert status == OK
        assert_within_one_ulp(got, expected(x, None, cos, sin))


LAYOUTS = {  # shape of the memory, and the q and k [2, 19, 3 or 2, 70] seen in it
    "slices of a fused projection": ((2, 19, 7, 70), lambda m: (m[:, :, :3], m[:, :, 3:5])),
    "heads before tokens": ((2, 5, 19, 70), lambda m: (m[:, :3].transpose(1, 2), m[:, 3:].transpose(1, 2))),
    "tokens before batch, cut from wider heads": (
        (19, 2, 5, 90),
        lambda m: (m[:, :, :3, 7:77].transpose(0, 1), m[:, :, 3:, 20:].transpose(0, 1)),
    ),
}


@every_dtype
@every_style
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inplace", (False, True))
def test_any_strides(library, dtype, style, layout, inplace):
    shape, views = LAYOUTS[layout]
    memory = torch.randn(shape).to(dtype)
    q, k = views(memory)
    before = memory.clone()
    cos, sin = halves(make_table(50, 33))  # 66 of 70: the rest passes through
    positions = torch.randint(0, 50, (1, 2, 19))
    want = [expected(x, positions, cos, sin, style) for x in (q, k)]
    status, *got, _ = rotate(library, q, k, positions, cos, sin, style=style, inplace=inplace)
    assert status == OK
    for x, exact in zip(got, want, strict=True):
        assert_within_one_ulp(x, exact)
        assert torch.equal(x[..., 66:].double(), exact[..., 66:])
    if inplace:  # what belongs to neither must be as it was
        for x in (*views(memory), *views(before)):
            x.zero_()
    assert torch.equal(memory, before)


@pytest.mark.parametrize("bits", (torch.int32, torch.int64))
def test_positions_of_any_width_and_stride(library, bits):
    q, k = make_qk(torch.float32)
    cos, sin = halves(make_table(50, 32))
    every = torch.randint(0, 50, (4, 19, 3), dtype=bits)
    for positions in (
        every[:2, :, 0][None],  # gaps
        every[0, :, 1].expand(1, 2, 19),  # shared by the batch
        every[:2, :1, 2].expand(2, 19)[None],  # one position for a whole row
        every.permute(2, 0, 1)[1:2, ::2],
    ):
        status, got, got_k, _ = rotate(library, q, k, positions, cos, sin)
        assert status == OK
        assert torch.equal(got, expected(q, positions, cos, sin).float())
        assert torch.equal(got_k, expected(k, positions, cos, sin).float())


def test_no_positions_means_row_s(library):
    q, _ = make_qk(torch.float32)
    cos, sin = halves(make_table(19, 32))
    status, got, _, _ = rotate(library, q, None, None, cos, sin)
    assert status == OK and torch.equal(got, expected(q, None, cos, sin).float())
    status, got, _, call = rotate(library, q, None, None, cos[:18], sin[:18])
    assert (status, call.bad_position, call.bad_token) == (BAD_POSITION, 18, 18) and (got == 7).all()


@every_style
@pytest.mark.parametrize("axes", (1, 3, 4))
def test_each_pair_takes_the_row_of_its_axis(library, style, axes):
    q, k = make_qk(torch.bfloat16, dim=2 * 40)
    cos, sin = halves(make_table(50, 40))
    positions = torch.randint(0, 50, (axes, 2, 19), dtype=torch.int32)
    sections = torch.arange(40) * axes // 40
    for pair_axis in (sections.to(torch.uint8), torch.arange(40, dtype=torch.uint8) % axes):
        status, got, got_k, _ = rotate(library, q, k, positions, cos, sin, style=style, pair_axis=pair_axis)
        assert status == OK
        assert_within_one_ulp(got, expected(q, positions, cos, sin, style, pair_axis=pair_axis))
        assert_within_one_ulp(got_k, expected(k, positions, cos, sin, style, pair_axis=pair_axis))


def test_separate_tables_with_gaps(library):
    q, k = make_qk(torch.float32)
    table = make_table(50, 32)
    cos, sin = torch.zeros(50, 37)[:, 2:34].copy_(table[:, :32]), torch.zeros(50, 40)[:, :32].copy_(table[:, 32:])
    checks = row_checks(library, cos, sin)
    assert torch.equal(checks, row_checks(library, *halves(table)))
    positions = torch.randint(0, 50, (1, 2, 19))
    status, got, _, _ = rotate(library, q, k, positions, cos, sin, checks=checks)
    assert status == OK and torch.equal(got, expected(q, positions, *halves(table)).float())


def row_checks(library, cos, sin, threads=1):
    out = torch.zeros(cos.shape[0], dtype=torch.int32)
    library.rope_row_checks(
        cos.data_ptr(), sin.data_ptr(), cos.stride(0), sin.stride(0), *cos.shape, out.data_ptr(), threads, None
    )
    return out


@pytest.mark.parametrize("half", (1, 7, 8, 20, 64, 100))
def test_row_checks_follow_their_formula(library, half):
    table = torch.randn(37, 2 * half)
    words = table.view(torch.int32).long() & 0xFFFFFFFF
    weights = 0x9E3779B1 * (2 * torch.arange(2 * half) + 1) & 0xFFFFFFFF
    mixed = words ^ words >> 15
    low, high = (mixed & 0xFFFF) * weights, ((mixed >> 16) * weights & 0xFFFF) << 16  # no product beyond 48 bits
    want = (0x9E3779B9 + (low + high).sum(-1)) & 0xFFFFFFFF
    for threads in (1, 3):
        assert torch.equal(row_checks(library, *halves(table), threads).long() & 0xFFFFFFFF, want)


def test_any_changed_bit_of_a_used_row_is_found(library):
    q, _ = make_qk(torch.float32, batch=1, seq=3, dim=46)
    table = make_table(9, 23)
    checks = row_checks(library, *halves(table))
    positions = torch.tensor([[[1, 4, 8]]])
    for element, bit in itertools.product(range(46), range(32)):
        damaged = table.clone()
        damaged.view(torch.int32)[4, element] ^= -(2**31) if bit == 31 else 1 << bit
        status, got, _, call = rotate(library, q, None, positions, *halves(damaged), checks=checks)
        assert (status, call.bad_position, call.bad_token) == (BAD_ROW, 4, 1), (element, bit)
        assert (got == 7).all()


def damage(name, row):
    half = row.shape[0] // 2
    cos, sin = row[:half].clone(), row[half:].clone()
    parts = {
        "other direction": (cos, -sin),
        "halves swapped": (sin, cos),
        "no rotation": (torch.ones_like(cos), torch.zeros_like(sin)),
        "zeros": (torch.zeros_like(cos), torch.zeros_like(sin)),
        "two pairs swapped": (cos[[1, 0, *range(2, half)]], sin[[1, 0, *range(2, half)]]),
        "bfloat16": (cos.bfloat16().float(), sin.bfloat16().float()),
        "garbage": (torch.full_like(cos, -1e34), sin),
        "nan": (cos, torch.full_like(sin, float("nan"))),
    }
    return torch.cat(parts[name])


DAMAGES = [
    "other direction",
    "halves swapped",
    "no rotation",
    "zeros",
    "two pairs swapped",
    "bfloat16",
    "garbage",
    "nan",
]


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("inplace", (False, True))
def test_damaged_rows_are_refused_before_anything_is_written(library, name, inplace):
    q, k = make_qk(torch.bfloat16)
    table = make_table(50, 32)
    checks = row_checks(library, *halves(table))
    table[33] = damage(name, table[33])
    positions = torch.randint(0, 33, (1, 2, 19))
    assert rotate(library, q, k, positions, *halves(table), checks=checks)[0] == OK  # the bad row is not used
    positions[0, 1, 5] = positions[0, 1, 9] = 33
    before = [x.clone() if inplace else torch.full_like(x, 7.0) for x in (q, k)]
    status, *got, call = rotate(library, q, k, positions, *halves(table), checks=checks, inplace=inplace)
    assert (status, call.bad_position, call.bad_token) == (BAD_ROW, 33, 19 + 5)
    assert all(map(torch.equal, got, before))


@pytest.mark.parametrize("name, found", [("zeros", True), ("garbage", True), ("nan", True), ("halves swapped", False)])
def test_rows_without_checks_must_be_rotations_of_the_scale(library, name, found):
    q, k = make_qk(torch.bfloat16)
    table = make_table(50, 32, scale=1.3)
    positions = torch.randint(0, 50, (1, 2, 19))
    assert rotate(library, q, k, positions, *halves(table), scale=1.3)[0] == OK
    assert rotate(library, q, k, positions, *halves(table), scale=1.0)[0] == BAD_ROW
    table[positions[0, 0, 3]] = damage(name, table[positions[0, 0, 3]])
    assert rotate(library, q, k, positions, *halves(table), scale=1.3)[0] == (BAD_ROW if found else OK)


def test_rows_are_checked_for_every_axis_in_use(library):
    q, _ = make_qk(torch.float32)
    table = make_table(50, 32)
    checks = row_checks(library, *halves(table))
    table[40] = 0
    positions = torch.randint(0, 40, (3, 2, 19))
    positions[2, 1, 4] = 40
    three, two = torch.arange(32, dtype=torch.uint8) % 3, torch.arange(32, dtype=torch.uint8) % 2
    status, _, _, call = rotate(library, q, None, positions, *halves(table), checks=checks, pair_axis=three)
    assert (status, call.bad_position, call.bad_token) == (BAD_ROW, 40, 23)
    assert rotate(library, q, None, positions, *halves(table), checks=checks, pair_axis=two)[0] == OK
    positions[2, 0, 7] = 50  # out of range is an error on any axis
    status, _, _, call = rotate(library, q, None, positions, *halves(table), checks=checks, pair_axis=two)
    assert (status, call.bad_position, call.bad_token) == (BAD_POSITION, 50, 7)


@pytest.mark.parametrize("bits", (torch.int32, torch.int64))
@pytest.mark.parametrize("inplace", (False, True))
def test_positions_out_of_range_write_nothing(library, bits, inplace):
    q, k = make_qk(torch.float16)
    cos, sin = halves(make_table(50, 32))
    for wrong in (-1, 50, torch.iinfo(bits).min, torch.iinfo(bits).max):
        positions = torch.randint(0, 50, (1, 2, 19), dtype=bits)
        positions[0, 0, 18], positions[0, 1, 0] = wrong, -5
        before = [x.clone() if inplace else torch.full_like(x, 7.0) for x in (q, k)]
        status, *got, call = rotate(library, q, k, positions, cos, sin, inplace=inplace)
        assert (status, call.bad_position, call.bad_token) == (BAD_POSITION, wrong, 18)
        assert all(map(torch.equal, got, before))


@every_dtype
@every_style
def test_any_number_of_threads_gives_the_same_bits(library, dtype, style):
    q, k = make_qk(dtype, batch=2, seq=3000, heads=(8, 2), dim=128)
    cos, sin = halves(make_table(3000, 64))
    checks = row_checks(library, cos, sin)
    positions = torch.randint(0, 3000, (1, 2, 3000))
    _, *want, _ = rotate(library, q, k, positions, cos, sin, style=style, checks=checks)
    for threads in (2, 3, 4):
        status, *got, _ = rotate(library, q, k, positions, cos, sin, style=style, checks=checks, threads=threads)
        assert status == OK and all(map(torch.equal, got, want))


@pytest.mark.parametrize("threads", (1, 2, 3, 4))
def test_the_first_bad_token_is_named_whoever_finds_it(library, threads):
    q = torch.zeros(2, 9000, 1, 128)
    table = make_table(9000, 64)
    checks = row_checks(library, *halves(table))
    table[[100, 8000]] = 0
    positions = torch.randint(101, 8000, (1, 2, 9000))
    positions[0, 1, 17], positions[0, 1, 16] = 100, 8000
    positions[0, 1, 1000::7] = -1
    status, _, _, call = rotate(library, q, None, positions, *halves(table), checks=checks, threads=threads)
    assert (status, call.bad_position, call.bad_token) == (BAD_ROW, 8000, 9016)


def test_a_pool_that_is_handed_in_does_the_work(library):
    asked = []

    def pool(body, data, threads, flags):
        asked.append((threads, flags))
        body(data)

    kind = ctypes.CFUNCTYPE(None, pointer, pointer, ctypes.c_uint, ctypes.c_uint)
    body_kind = ctypes.CFUNCTYPE(None, pointer)
    handed = kind(lambda body, data, threads, flags: pool(body_kind(body), data, threads, flags))
    address = ctypes.cast(handed, pointer).value
    q, k = make_qk(torch.float32, seq=600, heads=(8, 2), dim=128)
    cos, sin = halves(make_table(600, 64))
    status, got, _, _ = rotate(library, q, k, None, cos, sin, threads=3, parallel=address)
    assert status == OK and asked and set(asked) == {(3, 0)}
    assert torch.equal(got, expected(q, None, cos, sin).float())
    asked.clear()
    assert rotate(library, q[:, :1], None, None, cos, sin, threads=3, parallel=address)[0] == OK
    assert not asked  # one token is not worth waking anyone


def test_arguments_out_of_range_are_refused(library):
    q, _ = make_qk(torch.float32)
    cos, sin = halves(make_table(50, 32))
    positions = torch.zeros(1, 2, 19, dtype=torch.int64)
    assert rotate(library, q, None, positions, cos, sin, rotary_dim=63)[0] == BAD_ARGUMENT
    assert rotate(library, q, None, positions, cos, sin, rotary_dim=66)[0] == BAD_ARGUMENT
    assert rotate(library, q, None, positions, cos, sin, threads=0)[0] == BAD_ARGUMENT
    pair_axis = torch.ones(32, dtype=torch.uint8)
    assert rotate(library, q, None, positions, cos, sin, pair_axis=pair_axis)[0] == BAD_ARGUMENT
    one_head = q[:, :, :1].expand(-1, -1, 3, -1)  # three heads in one place cannot be rotated there
    assert rotate(library, one_head, None, positions, cos, sin, inplace=True)[0] == BAD_ARGUMENT
    assert rotate(library, one_head, None, positions, cos, sin)[0] == OK


def test_empty_calls_do_nothing(library):
    cos, sin = halves(make_table(50, 32))
    assert rotate(library, torch.zeros(2, 0, 3, 64), None, None, cos, sin)[0] == OK
    assert rotate(library, torch.zeros(0, 5, 3, 64), None, None, cos, sin)[0] == OK
    assert rotate(library, torch.zeros(2, 5, 0, 64), None, None, cos, sin)[0] == OK


def test_names_and_version(libraries):
    for name, library in libraries.items():
        assert library.rope_isa().decode() == name and library.rope_abi() == 1
    assert "generic" in libraries


def run(command, **environment):
    environment = {**os.environ, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("standard", ("c99", "c11"))
@pytest.mark.parametrize("compiler", ("gcc", "clang"))
def test_compiles_without_warnings(compiler, standard, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    for level in ("-O0", "-O3"):
        run([compiler, level, f"-std={standard}", *WARNINGS, "-fPIC", "-shared", "-pthread", str(SOURCE), "-o", str(tmp_path / "x.so")])  # fmt: skip


def build_fuzzer(compiler, folder, *options):
    """The fuzzer built with the options; skips where a trivial program cannot be built and run with them."""
    if compiler is None:
        pytest.skip("no C compiler")
    (folder / "trivial.c").write_text("int main(void) { return 0; }\n")
    trivial = subprocess.run(
        [compiler, *options, str(folder / "trivial.c"), "-o", str(folder / "trivial"), "-pthread", "-lm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if trivial.returncode:
        pytest.skip(f"{compiler} cannot build with {options}: {trivial.stderr.splitlines()[-1]}")
    run([compiler, "-O1", "-g", "-std=gnu11", *WARNINGS, *options, f"-I{SOURCE.parent}", str(FUZZER), "-o", str(folder / "fuzz"), "-pthread", "-lm"])  # fmt: skip
    return folder / "fuzz"


@pytest.mark.parametrize("sanitizer, rounds", [("address,undefined", 1000), ("thread", 200)])
def test_fuzzing_under_sanitizers_finds_nothing(libraries, sanitizer, rounds, tmp_path):
    fuzzer = build_fuzzer(COMPILER, tmp_path, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    for seed, name in enumerate(libraries):
        assert (
            run([str(fuzzer), str(1 + seed * rounds), str(rounds)], LIVE_ROPE_ISA=name) == f"{name} {rounds} rounds\n"
        )


def test_fuzzing_for_aarch64_in_an_emulator(tmp_path):
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("no aarch64-linux-gnu-gcc or no qemu-aarch64")
    fuzzer = build_fuzzer(compiler, tmp_path, "-static")
    assert run([emulator, str(fuzzer), "1", "300"]) == "neon 300 rounds\n"


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
