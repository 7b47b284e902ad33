"""The GPU rotation against float64 arithmetic: on a GPU where there is one, else in triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        pytest.skip(
            "another file of this process imported triton without its interpreter; run this file alone, as its suite does",
            allow_module_level=True,
        )
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton", reason="triton is not installed; it is a development dependency, on Linux only")

from common.cache_liveness import row_checks
from common.ci_register import register_cpu_ci, register_cuda_ci
from common.rope_kernel import PositionError
from common.rope_kernel_triton import rotate_by_triton

register_cpu_ci(est_time=25, suite="triton-interpret-test-cpu")
register_cuda_ci(est_time=25, suite="base-a-test-1-gpu")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).resolve().parents[3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = 40


def table(width, rows=ROWS, scale=1.0):
    angles = torch.outer(torch.arange(rows, dtype=torch.float64), 1 / 100 ** (torch.arange(0, width, 2) / width))
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1).float().to(DEVICE)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def rotate(q, k, positions, rows, *, sin=None, pair_axis=None, checks=None, scale=0.0, neox=True, inverse=False, inplace=False):  # fmt: skip
    return rotate_by_triton(q, k, positions, rows, sin, pair_axis, checks, scale, neox, inverse, inplace)


def exact(x, cos, sin, neox):
    """Float64; cos and sin are those of each token, [..., tokens, pairs]."""
    cos, sin, x = cos.double().unsqueeze(-2), sin.double().unsqueeze(-2), x.double()
    half = cos.shape[-1]
    first, second = (slice(0, half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def assert_within_an_ulp(found, wanted):
    bits, least = {torch.float32: (23, -126), torch.bfloat16: (7, -126), torch.float16: (10, -14)}[found.dtype]
    exponent = torch.frexp(wanted)[1] - 1
    ulp = 2.0 ** (exponent.clamp(min=least) - bits).double()
    error = (found.double() - wanted).abs() / ulp
    assert error.max() <= 1, f"{error.max()} ulps"


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_is_within_an_ulp_of_float64(dtype, neox):
    rows, positions = table(48), torch.tensor([3, 0, 39, 17], device=DEVICE)
    q, k = random(4, 5, 80, dtype=dtype), random(4, 2, 80, dtype=dtype)
    cos, sin = rows[positions].chunk(2, dim=1)
    for inverse in (False, True):
        turned = rotate(q, k, positions, rows, checks=row_checks(rows), neox=neox, inverse=inverse)
        for x, y in zip((q, k), turned):
            assert y.is_contiguous()
            assert_within_an_ulp(y, exact(x, cos, -sin if inverse else sin, neox))
            assert torch.equal(y[..., 48:], x[..., 48:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_is_right_where_the_terms_cancel(dtype):
    rows = table(64)
    c, s = rows[1:].chunk(2, dim=1)
    q = torch.cat((s, c), dim=1).to(dtype).unsqueeze(1)  # x c - y s is next to nothing
    [y, _] = rotate(q, None, torch.arange(1, ROWS, device=DEVICE), rows)
    assert_within_an_ulp(y, exact(q, c, s, True))


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_slices_of_a_fused_projection_are_rotated_where_they_lie(index, inplace):
    fused = random(3, 2 * 96 + 2 * 32 * 2)
    before, rows = fused.clone(), table(32)
    q, k, v = (part.unflatten(-1, (-1, 32)) for part in fused.split([192, 64, 64], dim=1))
    positions = torch.arange(6, dtype=index, device=DEVICE)[1::2]
    wanted = [exact(x, *rows[positions.long()].chunk(2, dim=1), True) for x in (q, k)]
    turned = rotate(q, k, positions, rows, inplace=inplace)
    for x, y, w in zip((q, k), turned, wanted):
        assert (y is x) == inplace
        assert_within_an_ulp(y, w)
    assert torch.equal(v, before[:, 256:].unflatten(-1, (-1, 32)))
    assert inplace or torch.equal(fused, before)


@pytest.mark.parametrize("shared", [False, True], ids=["positions of each sample", "shared positions"])
def test_batches_and_transposed_heads(shared):
    rows = table(16)
    positions = torch.tensor([[5, 1, 30], [2, 2, 7]], device=DEVICE)
    positions = positions[1] if shared else positions
    q, k = random(2, 4, 3, 16).transpose(1, 2), random(2, 1, 3, 16).transpose(1, 2)
    cos, sin = rows[positions].chunk(2, dim=-1)
    for x, y in zip((q, k), rotate(q, k, positions, rows, neox=False)):
        assert_within_an_ulp(y, exact(x, cos, sin, False))


def test_tokens_without_positions_take_their_own_row_and_sin_may_stand_apart():
    rows = table(32)
    cos, sin = (part.contiguous() for part in rows.chunk(2, dim=1))
    q = random(2, 5, 2, 32)
    [y, none] = rotate(q, None, None, cos, sin=sin)
    assert none is None
    assert_within_an_ulp(y, exact(q, cos[:5], sin[:5], True))
    with pytest.raises(PositionError, match="40 rows"):
        rotate(random(41, 1, 32), None, None, rows)


@pytest.mark.parametrize("batched", [False, True])
def test_each_pair_takes_the_row_of_its_own_axis(batched):
    rows, axes = table(24), torch.tensor([0, 1, 2] * 4, dtype=torch.uint8)
    shape = (3, 2, 4) if batched else (3, 4)
    positions = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    q, k = random(*shape[1:], 3, 32), random(*shape[1:], 1, 32)
    cos, sin = rows[positions].chunk(2, dim=-1)
    cos, sin = (torch.stack([part[a, ..., i] for i, a in enumerate(axes.tolist())], dim=-1) for part in (cos, sin))
    turned = rotate(q, k, positions, rows, pair_axis=axes, checks=row_checks(rows))
    for x, y in zip((q, k), turned):
        assert_within_an_ulp(y, exact(x, cos, sin, True))


def test_more_heads_than_one_program_turns():
    rows, q, k = table(128), random(2, 37, 128), random(2, 20, 128)
    cos, sin = rows[[4, 9]].chunk(2, dim=1)
    for x, y in zip((q, k), rotate(q, k, torch.tensor([4, 9], device=DEVICE), rows)):
        assert_within_an_ulp(y, exact(x, cos, sin, True))


@pytest.mark.parametrize("position", [-1, ROWS, 2**40, -(2**40)])
@pytest.mark.parametrize(
    "axes", [None, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.uint8)], ids=["one axis", "two"]
)
def test_a_position_without_a_row_makes_its_token_nan_and_no_other(position, axes):
    rows, q = table(16), random(3, 2, 16)
    good = torch.tensor([1, 2, 3], device=DEVICE)
    bad = torch.tensor([1, position, 3], device=DEVICE)
    positions, wanted = (bad, good) if axes is None else (torch.stack((good, bad)), torch.stack((good, good)))
    [y, _] = rotate(q, None, positions, rows, pair_axis=axes)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], rotate(q, None, wanted, rows, pair_axis=axes)[0][[0, 2]])


@pytest.mark.parametrize(
    ("by", "kind"),
    [("checksum", kind) for kind in ("one bit", "sign", "another row", "nan", "zeros", "scaled")]
    + [("unit", kind) for kind in ("nan", "zeros", "scaled")],  # the others are rotations still
)
def test_a_damaged_row_makes_its_token_nan_and_no_other(kind, by):
    rows, q, positions = table(32, scale=1.5), random(3, 2, 32), torch.tensor([7, 8, 9], device=DEVICE)
    guard = dict(checks=row_checks(rows)) if by == "checksum" else dict(scale=1.5)
    wanted, _ = rotate(q, None, positions, rows, **guard)
    if kind == "one bit":
        rows.view(torch.int32)[8, 5] ^= 1
    elif kind == "another row":
        rows[8] = rows[9].clone()
    else:
        rows[8, 20] = {"sign": -rows[8, 20], "nan": torch.nan, "zeros": 0.0, "scaled": 2 * rows[8, 20]}[kind]
    [y, _] = rotate(q, None, positions, rows, **guard)
    assert y[1].isnan().any()
    assert torch.equal(y[[0, 2]], wanted[[0, 2]])


def test_a_damaged_row_on_an_axis_that_no_pair_takes_is_not_read():
    rows, axes = table(16), torch.ones(8, dtype=torch.uint8)
    checks = row_checks(rows)
    rows[5] = 0
    positions = torch.tensor([[5, 5], [6, 7]], device=DEVICE)
    q = random(2, 1, 16)
    [y, _] = rotate(q, None, positions, rows, pair_axis=axes, checks=checks)
    assert_within_an_ulp(y, exact(q, *rows[[6, 7]].chunk(2, dim=1), True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_pair(value):
    rows, q = table(16), random(2, 2, 16)
    clean, _ = rotate(q, None, torch.tensor([1, 2], device=DEVICE), rows)
    q[0, 1, 3] = value
    [y, _] = rotate(q, None, torch.tensor([1, 2], device=DEVICE), rows)
    touched = torch.zeros_like(q, dtype=torch.bool)
    touched[0, 1, [3, 11]] = True
    assert not y[touched].isfinite().any()
    assert torch.equal(y[~touched], clean[~touched])


def test_heads_whose_elements_lie_apart_are_copied_first():
    rows, q = table(16), random(2, 16, 3).transpose(1, 2)
    for x, y in zip((q, q[:, :1]), rotate(q, q[:, :1], torch.tensor([1, 2], device=DEVICE), rows)):
        assert_within_an_ulp(y, exact(x, *rows[1:3].chunk(2, dim=1), True))


def test_nothing_to_rotate():
    rows = table(16)
    [y, k] = rotate(random(0, 2, 16), random(0, 1, 16), torch.empty(0, dtype=torch.int64, device=DEVICE), rows)
    assert y.shape == (0, 2, 16) and k.shape == (0, 1, 16)


def run(code, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    environment = {name: value for name, value in environment.items() if value}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)


MODULE = """
import torch
from srt.layers.rotary_embedding import get_rope
rope = get_rope(32, 32, 64, 10000.0)
q = torch.arange(2.0 * 64).view(2, 64) / 100
print(rope(torch.tensor([3, 60]), q, q[:, :32])[0].tolist())
"""


@pytest.mark.skipif(DEVICE != "cpu", reason="the whole module in the interpreter; a GPU needs none")
def test_the_environment_variable_sends_a_module_through_the_interpreter():
    other = run(MODULE, LIVE_ROPE_KERNEL="torch", TRITON_INTERPRET="")
    assert other.returncode == 0, other.stderr
    ours = run(MODULE, LIVE_ROPE_KERNEL="triton", TRITON_INTERPRET="1")
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == other.stdout
    refused = run(MODULE, LIVE_ROPE_KERNEL="triton", TRITON_INTERPRET="")
    assert refused.returncode and "TRITON_INTERPRET=1" in refused.stderr


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from common.rope_kernel_triton import _rotate_kernel as kernel

ALWAYS = dict(HALF=48, PAIRS=64, REST=32, REST_BLOCK=32, HEADS=16, STEP=1, GAP=48)
VARIANTS = [
    dict(AXES=1, POSITIONS=True, CHECKS=True, UNIT=False, INVERSE=False),
    dict(AXES=3, POSITIONS=True, CHECKS=True, UNIT=False, INVERSE=True),
    dict(AXES=1, POSITIONS=False, CHECKS=False, UNIT=True, INVERSE=False, seq=1, q_heads=1),
]
TYPES = dict(positions="*i64", cos_table="*fp32", sin_table="*fp32", pair_axis="*u8", row_checks="*i32", low="fp32", high="fp32")
for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)):
    for dtype in ("fp32", "bf16", "fp16"):
        for variant in VARIANTS:
            constants = {**ALWAYS, **variant}
            types = {**dict.fromkeys(("q", "q_out", "k", "k_out"), "*" + dtype), **TYPES, **dict.fromkeys(constants, "constexpr")}
            signature = {name: types.get(name, "i32") for name in kernel.arg_names}
            places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
            print(len(triton.compile(ASTSource(kernel, signature, places), target=target).asm["ptx"]))
"""


def test_the_kernel_compiles_for_gpus_that_are_not_here(tmp_path):
    made = run(COMPILE, TRITON_INTERPRET="", TRITON_CACHE_DIR=str(tmp_path))
    assert made.returncode == 0, made.stderr
    assert len(made.stdout.split()) == 18


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
