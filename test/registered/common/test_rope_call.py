"""The short way of a live module's call, through tensors' C table: the same as the long way, or it leaves the call alone."""

import ctypes
import gc
import itertools
import random
import sys

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from common import rope_kernel
from common.cache_liveness import invalidate_memory, release_memory
from common.ci_register import register_cpu_ci
from srt.layers.rotary_embedding import get_rope

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

pytestmark = [
    pytest.mark.skipif(rope_kernel.short_way is None, reason="not built here, or this torch has no C table of tensors"),
    pytest.mark.usefixtures("alone"),
]

SIZE, WIDTH, TOP, BASE = 40, 32, 64, 10000.0
SECTIONS = [6, 5, 5]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_rope(neox=True, axes=False, base=BASE):
    scaling = {"rope_type": "default", "mrope_section": SECTIONS} if axes else None
    return get_rope(SIZE, WIDTH, TOP, base, neox, scaling, torch.float32)


def make(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turned(x, positions, neox=True):
    """``x`` [tokens, heads, SIZE] rotated in float64, not rounded; the table's own rounding is in it."""
    angle = positions.float()[:, None] * (1.0 / BASE ** (torch.arange(0, WIDTH, 2).float() / WIDTH))
    cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
    half = WIDTH // 2
    first, second = (slice(0, half), slice(half, WIDTH)) if neox else (slice(0, WIDTH, 2), slice(1, WIDTH, 2))
    out = x.double().clone()
    a, b = x[..., first].double(), x[..., second].double()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def the_long_way(rope, *arguments, **keywords):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope_kernel, "short_way", None)
        return rope(*arguments, **keywords)


def short(rope, positions, query, key=None, inplace=False):
    return rope_kernel.short_way(rope, positions, query, key, inplace)


# the same


@pytest.mark.parametrize("neox", (True, False))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rotation_is_float64_rounded_once(dtype, neox):
    rope = make_rope(neox)
    positions = torch.tensor([5, 0, 63, 1, 1])
    q, k = make((5, 3, SIZE), dtype), make((5, 1, SIZE), dtype, 1)
    got = short(rope, positions, q.flatten(1), k.flatten(1))
    for mine, x in zip(got, (q, k)):
        exact = turned(x, positions, neox)
        if dtype == torch.float32:
            assert torch.equal(mine.view(x.shape), exact.float())
        else:
            torch.testing.assert_close(
                mine.view(x.shape).double(), exact, rtol=0.501 * torch.finfo(dtype).eps, atol=1e-7
            )


def sliced(shape, dtype, seed):
    """A slice of a fused projection: the last dimension is contiguous, the others have gaps."""
    return make((*shape[:-1], shape[-1] + 24), dtype, seed)[..., : shape[-1]]


def transposed(shape, dtype, seed):
    """Heads before tokens in memory."""
    if len(shape) < 3 or shape[-1] != SIZE:
        return sliced(shape, dtype, seed)
    swapped = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    return make(swapped, dtype, seed).transpose(-2, -3)


def random_call(chance):
    """Arguments that forward understands, and whether the short way must take them."""
    batch, seq, heads, kv = (
        chance.choice((1, 2, 3)),
        chance.randint(0, 9),
        chance.choice((1, 2, 4)),
        chance.choice((1, 2)),
    )
    dtype, by_batch, flat = chance.choice(DTYPES), chance.random() < 0.5, chance.random() < 0.5
    lead = (batch, seq) if by_batch else (batch * seq,)
    shapes = [(*lead, n * SIZE) if flat else (*lead, n, SIZE) for n in (heads, kv)]
    maker = chance.choice((make, sliced, transposed))
    query, key = (maker(shape, dtype, chance.randint(0, 99)) for shape in shapes)
    axes = chance.random() < 0.4
    forms = [(batch * seq,), lead] + ([(seq,)] if by_batch and not axes else []) + ([] if by_batch else [(batch, seq)])
    form = chance.choice(forms)
    if axes and chance.random() < 0.8:
        form = (3, *form)
    positions = torch.tensor([chance.randrange(TOP) for _ in range(torch.Size(form).numel())]).view(form)
    positions = positions.to(chance.choice((torch.int32, torch.int64)))
    if chance.random() < 0.3:
        positions = torch.stack((positions, positions), dim=-1)[..., 0]
    return make_rope(chance.random() < 0.5, axes), positions, query, chance.choice((key, key, None))


def test_random_calls_are_what_the_long_way_gives():
    taken = 0
    for seed in range(1500):
        chance = random.Random(seed)
        rope, positions, query, key = random_call(chance)
        inplace = chance.random() < 0.5
        copies = [None if x is None else x.clone(memory_format=torch.preserve_format) for x in (query, key)]
        for i, x in enumerate((query, key)):
            if x is not None and not x.is_contiguous():  # the gaps too
                copies[i] = x.new_empty_strided(x.shape, x.stride()).copy_(x)
        before = [None if x is None else x._version for x in copies]
        try:
            wanted = the_long_way(rope, positions, query, key, inplace=inplace)
        except (ValueError, IndexError):
            assert short(rope, positions, *copies, inplace) is None, seed
            continue
        got = short(rope, positions, *copies, inplace)
        if got is None:
            continue
        taken += 1
        for mine, theirs, given, version in zip(got, wanted, copies, before):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert torch.equal(mine, theirs) and mine.shape == theirs.shape, seed
                assert inplace or mine.is_contiguous(), seed
                assert (mine is given) == inplace and (given._version > version) == inplace, seed
    assert taken > 1200  # it is there for the plain calls, which these are


@pytest.mark.parametrize("inplace", (False, True))
def test_what_an_engine_calls_goes_the_short_way(inplace):
    fused = make((7, 6 * SIZE), torch.bfloat16)
    rows = torch.arange(7)
    heads_first = make((2, 4, 7, SIZE)).transpose(1, 2)
    for rope, positions, q, k in (
        (make_rope(), rows, fused[:, : 4 * SIZE], fused[:, 4 * SIZE : 5 * SIZE]),
        (make_rope(), rows.int(), make((7, 4, SIZE)), None),
        (make_rope(), rows[:1], make((1, 4 * SIZE)), make((1, SIZE), seed=1)),
        (make_rope(axes=True), rows.expand(3, 7), make((7, 4 * SIZE)), make((7, SIZE), seed=1)),
        (make_rope(axes=True), rows, make((7, 4 * SIZE)), make((7, SIZE), seed=1)),
        (make_rope(), rows.expand(2, 7), make((2, 7, 4 * SIZE)), make((2, 7, SIZE), seed=1)),
        (make_rope(), rows, nn.Parameter(make((2, 7, 4, SIZE)), requires_grad=False), None),
        (make_rope(), rows, make((600, 4, SIZE))[:7], make((7, 2, SIZE), seed=1)),
    ):
        assert short(rope, positions, q, k, inplace) is not None
    assert short(make_rope(), rows, heads_first, None) is not None


def test_long_calls_too():
    """Those whose work is shared by threads, without the interpreter's lock."""
    rope = make_rope()
    positions = torch.randint(0, TOP, (3000,))
    q, k = make((3000, 8, SIZE), torch.bfloat16), make((3000, 2, SIZE), torch.bfloat16, 1)
    wanted = the_long_way(rope, positions, q, k)
    assert all(map(torch.equal, short(rope, positions, q, k), wanted))
    assert all(map(torch.equal, short(rope, positions, q, k, inplace=True), wanted))


def test_hooks_run_and_modes_see_what_they_saw():
    rope = make_rope()
    q = make((5, 2, SIZE))
    seen = []
    handle = rope.register_forward_hook(lambda *_: seen.append("hook"))
    rope(torch.arange(5), q)
    handle.remove()
    assert seen == ["hook"]

    class Naming(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Naming():
        got = rope(torch.arange(5), q)[0]
    assert "empty_like" in seen and torch.equal(got, the_long_way(rope, torch.arange(5), q)[0])

    class Giving(TorchFunctionMode):
        """Gives a tensor of another dtype where an output is made."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.empty_like:
                return torch.zeros(args[0].shape, dtype=torch.float64)
            return func(*args, **(kwargs or {}))

    with Giving():
        assert short(rope, torch.arange(5), q) is None


# left alone


def declined(rope, positions, query, key=None, inplace=False):
    before = [
        None if x is None or x.is_meta or x.untyped_storage().nbytes() == 0 else x.detach().clone()
        for x in (query, key)
    ]
    assert short(rope, positions, query, key, inplace) is None
    for x, then in zip((query, key), before):
        assert then is None or torch.equal(x.detach(), then)


@pytest.mark.parametrize("inplace", (False, True))
def test_arguments_that_are_not_plain_are_left_alone(inplace):
    class Marked(torch.Tensor):
        pass

    rope, rows = make_rope(), torch.arange(5)
    q, k = make((5, 2 * SIZE)), make((5, SIZE), seed=1)
    freed, freed_k = q.clone(), k.clone()
    freed.untyped_storage().resize_(0)
    freed_k.untyped_storage().resize_(0)
    freed_rows = rows.clone()
    freed_rows.untyped_storage().resize_(0)
    for arguments in (
        (rows, q.double(), k.double()),
        (rows, q.long(), k.long()),
        (rows, q, k.bfloat16()),
        (rows, q, k[:4]),
        (rows, q.to("meta"), k.to("meta")),
        (rows, q.to_sparse(), k),
        (rows, q.as_subclass(Marked), k),
        (rows, q, k.as_subclass(Marked)),
        (rows.as_subclass(Marked), q, k),
        (rows, q[:, ::2], None),
        (rows, q.view(5, 2, SIZE).transpose(1, 2), None),
        (rows, q[:, :60], None),
        (rows, q[0], None),
        (rows.float(), q, k),
        (rows.to(torch.int16), q, k),
        (rows.to("meta"), q, k),
        (rows[:4], q, k),
        (rows[None, None], q, k),
        (rows[0], q, k),
        (rows, freed, k),
        (rows, q, freed_k),
        (freed_rows, q, k),
        (None, q, k),
        (rows, None, k),
        (5, q, k),
    ):
        if arguments[1] is None or not arguments[1].is_sparse:
            assert short(rope, *arguments, inplace) is None, arguments
        else:
            assert rope_kernel.short_way(rope, *arguments, inplace) is None
    assert sys.exc_info() == (None, None, None)


def test_positions_without_a_row_are_left_alone_and_raise():
    rope = make_rope()
    limit = rope.cos_sin_cache.shape[0]
    q = make((5, SIZE))
    for wrong in (-1, limit, 1 << 40, -(1 << 62)):
        positions = torch.tensor([1, 2, wrong, 3, 4])
        declined(rope, positions, q, None, True)
        if wrong != limit:
            with pytest.raises(IndexError):
                rope(positions, q)
    grown = rope(torch.tensor([1, 2, limit, 3, 4]), q)[0]
    torch.testing.assert_close(
        grown, turned(q[:, None], torch.tensor([1, 2, limit, 3, 4]))[:, 0].float(), rtol=0, atol=1e-6
    )


def test_overlaps_are_not_rotated_in_place():
    rope, rows = make_rope(), torch.arange(5)
    memory = make((2000,))
    q = memory[: 10 * SIZE].view(5, 2 * SIZE)
    declined(rope, rows, q, q, True)
    for stride in ((0, SIZE, 1), (SIZE, SIZE, 1), (2 * SIZE, 8, 1), (2 * SIZE - 1, SIZE, 1)):
        declined(rope, rows, memory.as_strided((5, 2, SIZE), stride), None, True)
    assert short(rope, rows, q, q) is not None  # read twice


@pytest.mark.parametrize("inplace", (False, True))
def test_gradients_transforms_and_modes_are_left_alone(inplace):
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    rope, rows = make_rope(), torch.arange(5)
    q, k = make((5, 2 * SIZE)), make((5, SIZE), seed=1)
    for arguments in (
        (q.clone().requires_grad_(), k),
        (q, k.clone().requires_grad_()),
        (q, (k.clone().requires_grad_() * 1)),
    ):
        declined(rope, rows, *arguments, inplace)
        with torch.no_grad():
            assert short(rope, rows, arguments[0], arguments[1]) is not None
    with Watching():
        declined(rope, rows, q, k, inplace)
    with forward_ad.dual_level():
        declined(rope, rows, q, k, inplace)
    torch.func.vmap(lambda x: declined(rope, rows, q, k, inplace) or x)(torch.ones(2))
    torch.jit.trace(lambda x: declined(rope, rows, q, k, inplace) or x * 1, torch.ones(2), check_trace=False)


def kill_stamp(rope):
    rope._buffers["cos_sin_cache"] = rope.cos_sin_cache.clone()


def change(rope):
    rope.cos_sin_cache[3] += 1


def overwrite(rope):
    rope.cos_sin_cache.data[3] = rope.cos_sin_cache.data[4].clone()


def transpose(rope):
    rope.cos_sin_cache.t_()


def cast(rope):
    rope.cos_sin_cache.data = rope.cos_sin_cache.double()


def forget_checks(rope):
    rope._checks = {}


def shrink(rope):
    rope.cos_sin_cache.untyped_storage().resize_(512)


def wrong_checks(rope):
    rope._checks = {"cos_sin_cache": torch.zeros(3, dtype=torch.int32)}


def touch(rope):
    """Another version alone."""
    rope.cos_sin_cache.mul_(1)


def mark(rope):
    """Another mark alone."""
    rope.cos_sin_cache._live_stamp = -1


def move(rope):
    """Another address alone."""
    rope.cos_sin_cache.data = rope.cos_sin_cache.data.clone()


@pytest.mark.parametrize(
    "ruin",
    (
        touch, mark, move, kill_stamp, change, overwrite, transpose, cast, forget_checks, shrink, wrong_checks,
        lambda rope: rope.to("meta"),
        lambda rope: rope._buffers.clear(),
        lambda rope: rope._buffers.update(cos_sin_cache=None),
        lambda rope: rope._buffers.update(cos_sin_cache=3),
        lambda rope: rope.cos_sin_cache.untyped_storage().resize_(0),
        lambda rope: release_memory(),
        lambda rope: invalidate_memory(),
        lambda rope: setattr(rope, "_sole", None),
        lambda rope: setattr(rope, "head_size", 16),
    ),
)  # fmt: skip
def test_a_table_that_may_be_wrong_is_left_alone(ruin):
    rope = make_rope()
    q, rows = make((5, SIZE)), torch.arange(5)
    wanted = short(rope, rows, q)[0]
    ruin(rope)
    declined(rope, rows, q, None, True)
    if rope.head_size == SIZE and rope._checks.get("cos_sin_cache", torch.zeros(9)).numel() != 3:
        assert torch.equal(rope(rows, q)[0], wanted)


def test_a_table_cut_short_in_place_is_not_read_beyond_its_end():
    """Freed, and given less memory at the same address: stamp, version, address and shape are as they were."""
    rope = make_rope()
    q, positions = make((5, SIZE)), torch.arange(5)  # rows that are still there
    wanted = short(rope, positions, q)[0]
    table = rope.cos_sin_cache
    table.untyped_storage().resize_(table.nbytes - 64)
    rope._fingerprints["cos_sin_cache"] = (*rope._fingerprints["cos_sin_cache"][:2], table.data_ptr(), table.nbytes)
    rope._sole = ("cos_sin_cache", *rope._fingerprints["cos_sin_cache"])
    assert short(rope, positions, q) is None
    assert torch.equal(rope(positions, q)[0], wanted)
    assert rope.heals == 1


# the machinery


def test_references_are_let_go_of():
    rope, rows = make_rope(), torch.arange(5)
    q, k = make((5, 2 * SIZE)), make((5, SIZE), seed=1)
    things = (
        rope,
        rows,
        q,
        k,
        rope._buffers["cos_sin_cache"],
        rope._checks["cos_sin_cache"],
        rope._sole,
        rope.__dict__,
    )
    calls = (
        (rows, q, k, False),
        (rows, q, k, True),
        (rows, q, None, True),
        (rows - 9, q, k, False),
        (rows, q, q, True),
    )
    long = (torch.zeros(3000, dtype=torch.int64), make((3000, 2 * SIZE)), None, False)
    for arguments in (*calls, long):
        short(rope, *arguments)
    gc.collect()
    before = [sys.getrefcount(x) for x in things], len(gc.get_objects())
    for _, arguments in itertools.product(range(200), (*calls, long)):
        short(rope, *arguments)
    gc.collect()
    assert [sys.getrefcount(x) for x in things] == before[0]
    assert abs(len(gc.get_objects()) - before[1]) < 100


def capsule(major, older=None):
    """A table of functions as a torch of another DLPack would have it."""
    memory = (ctypes.c_uint64 * 8)()
    memory[0], memory[1] = major, older or 0
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    name = ctypes.create_string_buffer(b"dlpack_exchange_api")
    made = new(ctypes.addressof(memory), ctypes.cast(name, ctypes.c_char_p), None)
    return made, memory, name


def test_without_a_table_of_this_version_every_call_goes_the_long_way(monkeypatch):
    class Old:
        pass

    class Newer:
        __dlpack_c_exchange_api__, *_kept = capsule(2)

    class Incomplete:
        __dlpack_c_exchange_api__, *_kept = capsule(1)

    for kind in (Old, Newer, Incomplete):
        monkeypatch.setattr(rope_kernel, "Tensor", kind)
        assert rope_kernel._load_calls(rope_kernel._library) is None
    monkeypatch.undo()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    present = pointer(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")

    class Both(torch.Tensor):  # a newer table that leads to the one of DLPack 1
        __dlpack_c_exchange_api__, *_kept = capsule(2, present)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope_kernel, "Tensor", Both)
        assert rope_kernel._load_calls(rope_kernel._library) is not None
    assert rope_kernel._load_calls(rope_kernel._library) is not None  # with the types as they are
    assert short(make_rope(), torch.arange(5), make((5, SIZE))) is not None
    with pytest.raises(TypeError):
        rope_kernel._calls.connect(torch.Tensor.__dlpack_c_exchange_api__)
    with pytest.raises(TypeError):
        rope_kernel.short_way(make_rope())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
