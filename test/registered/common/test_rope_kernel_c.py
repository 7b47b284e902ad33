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
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
INSTRUCTION_SETS = ("generic", "avx2", "avx512", "neon")
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
    command = [COMPILER, "-O2", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
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


def expected(x, positions, cos, sin, style="neox", inverse=False, pair_axis=None):
    """The rotation of x [B, S, H, D] in float64, not rounded: the products are exact there."""
    half = cos.shape[-1]
    c = row_of_pairs(cos, positions, pair_axis, *x.shape[:2]).double()
    s = row_of_pairs(sin, positions, pair_axis, *x.shape[:2]).double() * (-1 if inverse else 1)
    first, second = (
        (slice(0, half), slice(half, 2 * half)) if style == "neox" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
