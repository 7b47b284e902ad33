"""The rotation's ops under torch.library's checks, torch.compile, torch.export and TorchScript's tracer."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from common import rope_kernel
from common.cache_liveness import DeadBufferError
from common.ci_register import register_cpu_ci
from common.rope_kernel import DeadRowError, PositionError, live_rotate, register_live, rotate
from srt.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

ROOT = Path(__file__).parents[3]
OPS = torch.ops.live_rope
HUGGING_FACE = 2e-5  # its tables take cos and sin of angles in float32


def make_table(rows=64, half=8):
    angles = torch.outer(
        torch.arange(rows, dtype=torch.float64), 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


TABLE = make_table()


def expected(x, positions, inverse=False):
    """``x`` [tokens, heads, size] rotated in float64 (neox pairs) by TABLE's rows, rounded once."""
    cos, sin = TABLE.double()[positions][:, None].chunk(2, dim=-1)
    sin = -sin if inverse else sin
    a, b, rest = x.double().split((8, 8, x.shape[-1] - 16), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def close(got, want, tolerance=3e-7):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def make_inputs(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, 2, 20, generator=generator),
        torch.randn(tokens, 1, 20, generator=generator),
        torch.randint(0, 64, (tokens,), generator=generator),
    )


class Live(nn.Module):
    """The least that live_rotate asks of a module; its table can be killed."""

    def __init__(self):
        super().__init__()
        self._handle = register_live(self)
        self.killed = self.heals = 0

    def rotate_now(self, positions, query, key, *, inplace=False, inverse=False, head_size=None):
        if self.killed:
            self.killed, self.heals = 0, self.heals + 1
        return rotate(
            query, key, positions, TABLE, is_neox_style=True, inplace=inplace, inverse=inverse, head_size=head_size
        )

    def forward(self, positions, query, key, inplace=False):
        return live_rotate(self, positions, query, key, inplace=inplace)


# the ops themselves


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("with_key", (False, True))
def test_ops_pass_opcheck(with_key, grad):
    q, k, positions = make_inputs(5)
    k = k if with_key else None
    live = Live()
    checks, pair_axis = rope_kernel.row_checks(TABLE), torch.zeros(8, dtype=torch.uint8)
    cos, sin = (half.contiguous() for half in TABLE.chunk(2, dim=1))
    raw = (
        (positions, TABLE, None, None, checks, 0.0, True, False),
        (positions[None], cos, sin, pair_axis, None, 1.0, False, True),
        (None, TABLE, None, None, None, 0.0, True, False),
    )
    for op, rest in ((OPS.rotate, raw), (OPS.rotate_live, ((positions, live._handle, False),))):
        for arguments in rest:
            heads = [x if x is None else x.clone().requires_grad_(grad) for x in (q, k)]
            torch.library.opcheck(op.default, (*heads, *arguments))
    if not grad:
        for op, rest in ((OPS.rotate_, raw), (OPS.rotate_live_, ((positions, live._handle, False),))):
            for arguments in rest:
                heads = [x if x is None else x.clone() for x in (q, k)]
                torch.library.opcheck(op.default, (*heads, *arguments))


def test_traced_graphs_hold_one_op():
    q, k, positions = make_inputs(5)
    graph = make_fx(lambda *x: rotate(*x, is_neox_style=True), tracing_mode="symbolic")(q, k, positions, TABLE)
    assert [str(n.target) for n in graph.graph.nodes if "live_rope" in str(n.target)] == ["live_rope.rotate.default"]
    q, k, positions = make_inputs(9)
    close(graph(q, k, positions, TABLE)[0], expected(q, positions))


# torch.compile


def no_recompile():
    return torch._dynamo.config.patch(error_on_recompile=True)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_rotations_neither_break_nor_recompile_as_lengths_change():
    compiled = torch.compile(
        lambda q, k, p: rotate(2 * q, k, p, TABLE, is_neox_style=True), fullgraph=True, dynamic=True
    )
    compiled(*make_inputs(5))
    with no_recompile():
        for tokens in (5, 17, 64, 333):
            q, k, positions = make_inputs(tokens, seed=tokens)
            got = compiled(q, k, positions)
            close(got[0], expected(2 * q, positions))
            close(got[1], expected(k, positions))


@pytest.mark.parametrize("live", (False, True))
def test_compiled_gradients(live):
    module = Live()

    def loss(q, k, p):
        q, k = module(p, q, k) if live else rotate(q, k, p, TABLE, is_neox_style=True)
        return q.square().sum() + 3 * k.square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        q, k, positions = make_inputs(tokens)
        q, k = q.requires_grad_(), k.requires_grad_()
        got = torch.autograd.grad(compiled(q, k, positions), (q, k))
        close(got[0], 2 * q.detach())  # a rotation keeps lengths
        close(got[1], 6 * k.detach())
        close(module(positions, q, k)[0].detach(), expected(q.detach(), positions))


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_in_place_rotation_overwrites_what_it_was_given(backend):
    module = Live()

    def function(qkv, positions):
        module(positions, qkv[:, :2], qkv[:, 2:3], inplace=True)
        rotate(qkv[:, 3:], None, positions, TABLE, is_neox_style=True, inplace=True, inverse=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 9):
        generator = torch.Generator().manual_seed(tokens)
        qkv = torch.randn(tokens, 4, 20, generator=generator)
        positions = torch.randint(0, 64, (tokens,), generator=generator)
        want = torch.cat((expected(qkv[:, :3], positions), expected(qkv[:, 3:], positions, inverse=True)), dim=1)
        compiled(qkv, positions)
        close(qkv, want)


def test_a_table_that_dies_is_found_when_the_compiled_graph_runs():
    module = Live()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, positions = make_inputs(5)
    compiled(positions, q, k)
    with no_recompile():
        module.killed = 1
        close(compiled(positions, q, k)[0], expected(q, positions))
        assert module.heals == 1
        with pytest.raises(PositionError, match="position 64"):
            compiled(torch.where(positions == positions[2], 64, positions), q, k)


def test_compiled_modules_heal_and_grow_without_a_recompile():
    rope = RotaryEmbedding(20, 16, 64, 10000.0, True, torch.float32)
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, positions = make_inputs(5)
    flat = q.flatten(1), k.flatten(1)
    close(compiled(positions, *flat)[0], expected(q, positions).flatten(1), HUGGING_FACE)
    with no_recompile():
        for kill in (
            lambda: rope.cos_sin_cache.zero_(),
            lambda: rope.cos_sin_cache.untyped_storage().resize_(0),
            lambda: rope.to("meta"),
            lambda: rope.cos_sin_cache.detach().fill_(float("nan")),
        ):
            kill()
            close(compiled(positions, *flat)[0], expected(q, positions).flatten(1), HUGGING_FACE)
        compiled(positions + 1000, *flat)
        assert rope.cos_sin_cache.shape[0] > 1000
        with pytest.raises(IndexError, match="negative"):
            compiled(positions - 64, *flat)


def test_forward_mode_inside_a_compiled_function_is_refused_not_wrong():
    """The op would leave the tangent out. Where the graph may break, the tangent is computed in eager."""
    q, _, positions = make_inputs(5)

    def tangent(x):
        return torch.func.jvp(lambda y: rotate(y, None, positions, TABLE, is_neox_style=True)[0], (x,), (x,))[1]

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(tangent, backend="aot_eager", fullgraph=True)(q)
    torch._dynamo.reset()
    close(torch.compile(tangent, backend="aot_eager")(q), expected(q, positions))


# graphs that leave the process


class Attention(nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.rope = rope

    def forward(self, positions, query, key):
        return self.rope(positions, query, key)


def test_exported_programs_hold_the_table_not_the_module(tmp_path):
    for name, rope, positions in (
        ("plain", RotaryEmbedding(20, 16, 64, 10000.0, True, torch.float32), torch.arange(5) * 3),
        (
            "mrope",
            MRotaryEmbedding(20, 16, 64, 10000.0, True, torch.float32, mrope_section=[3, 3, 2]),
            torch.arange(15).view(3, 5),
        ),
    ):
        q, k, _ = make_inputs(5)
        q, k = q.flatten(1), k.flatten(1)
        tokens = torch.export.Dim("tokens", min=2, max=4096)
        shapes = ({positions.dim() - 1: tokens}, {0: tokens}, {0: tokens})
        program = torch.export.export(Attention(rope), (positions, q, k), dynamic_shapes=shapes)
        targets = [str(n.target) for n in program.graph.nodes if "live_rope" in str(n.target)]
        assert targets == ["live_rope.rotate.default"], name
        want = rope(positions, q, k)
        rope.to("meta")  # the program's table is its own
        got = program.module()(positions, q, k)
        close(got, want)
        close(rope(positions, q, k), want)
        torch.export.save(program, tmp_path / f"{name}.pt2")
        torch.save((positions, q, k, *want), tmp_path / f"{name}.pt")
    code = """
import sys, torch
from common import rope_kernel
for name in ("plain", "mrope"):
    positions, q, k, *want = torch.load(f"{sys.argv[1]}/{name}.pt")
    got = torch.export.load(f"{sys.argv[1]}/{name}.pt2").module()(positions, q, k)
    assert all(map(torch.equal, got, want)), name
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=ROOT)


def test_exported_programs_refuse_rows_that_are_not_rotations():
    rope = RotaryEmbedding(20, 16, 64, 10000.0, True, torch.float32)
    q, k, positions = make_inputs(5)
    program = torch.export.export(Attention(rope), (positions, q.flatten(1), k.flatten(1)))
    running = program.module()
    for table in (*running.buffers(), *program.constants.values()):
        table.zero_()
    with pytest.raises(DeadRowError):
        running(positions, q.flatten(1), k.flatten(1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript_traces_hold_the_op():
    rope = RotaryEmbedding(20, 16, 64, 10000.0, True, torch.float32)
    q, k, positions = make_inputs(5)
    traced = torch.jit.trace(Attention(rope), (positions, q.flatten(1), k.flatten(1)))
    assert "live_rope::rotate(" in str(traced.inlined_graph)
    q, k, positions = make_inputs(9)
    close(traced(positions, q.flatten(1), k.flatten(1))[0], expected(q, positions).flatten(1), HUGGING_FACE)


# handles


def test_a_handle_names_the_same_rotation_in_every_process():
    code = """
from srt.layers.rotary_embedding import RotaryEmbedding
for size, theta, neox in ((20, 10000.0, True), (20, 500000.0, True), (20, 10000.0, False), (32, 10000.0, True)):
    print(RotaryEmbedding(size, 16, 64, theta, neox)._handle)
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and len(set(runs[0])) == 4
    first, second = (RotaryEmbedding(20, 16, 64, 123.0) for _ in range(2))
    assert first._handle != second._handle
    assert Live()._handle != Live()._handle


def test_a_module_lives_until_its_gradients_are_known():
    q, k, positions = make_inputs(5)
    q.requires_grad_()
    rope = RotaryEmbedding(20, 16, 64, 10000.0, True, torch.float32)
    handle = rope._handle
    loss = rope(positions, q, k)[0].square().sum()
    del rope
    gc.collect()
    loss.backward()
    close(q.grad, 2 * q.detach())
    del loss
    gc.collect()
    with pytest.raises(DeadBufferError, match="gone"):
        OPS.rotate_live(q.detach(), k, positions, handle, False)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
