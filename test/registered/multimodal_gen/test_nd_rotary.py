"""N-dimensional tables: right values for any grid, and a cache whose callers cannot harm each other."""

import os
import sys
import threading
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from common import cache_liveness
from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding.grid_cache import GRIDS, GridCache
from multimodal_gen.runtime.layers.rotary_embedding.nd import (
    NDRotaryEmbedding,
    OneDRotaryEmbedding,
    get_1d_rotary_pos_embed,
)

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

FLUX = {"rope_dim_list": [16, 56, 56], "rope_theta": 10000}


@pytest.fixture(autouse=True)
def empty_cache():
    GRIDS.clear()
    yield
    GRIDS.clear()


def reference(dims, theta, sizes, starts, rescale, interpolation):
    """cos and sin in float64, token by token."""
    positions = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) + s for n, s in zip(sizes, starts)))
    positions = positions.reshape(-1, len(sizes))
    angles = []
    for axis, dim in enumerate(dims):
        base = theta * rescale[axis] ** (dim / (dim - 2)) if rescale[axis] != 1 else theta
        for j in range(dim // 2):
            angles.append(positions[:, axis] * interpolation[axis] * base ** (-2 * j / dim))
    angles = torch.stack(angles, dim=1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("seed", range(12))
def test_a_random_grid_equals_float64(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    ndim = draw(1, 5)
    dims = [2 * draw(2, 20) for _ in range(ndim)]
    sizes = [draw(1, 9) for _ in range(ndim)]
    start = draw(0, 50)
    rescale = [1.0 + draw(0, 3) for _ in range(ndim)]
    interpolation = [1.0, 0.5, 2.0, 0.25, 1.0][:ndim]
    module = NDRotaryEmbedding(dims, 10000.0, rescale, interpolation, dtype=torch.float64)
    cos, sin = module.forward_from_grid(tuple(sizes), start_frame=start)
    want = reference(dims, 10000.0, sizes, [start] + [0] * (ndim - 1), rescale, interpolation)
    assert cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous()
    for got, exact in zip((cos, sin), want):
        torch.testing.assert_close(got, exact.float(), rtol=0, atol=6e-8)


def test_positions_and_grid_agree_to_the_bit():
    module = NDRotaryEmbedding(**FLUX)
    grid = module.forward_from_grid((3, 5, 7), start_frame=2)
    positions = torch.cartesian_prod(torch.arange(2, 5), torch.arange(5), torch.arange(7))
    for got in (module(positions), module(positions.float()), module.forward_uncached(positions)):
        assert all(torch.equal(a, b) for a, b in zip(got, grid))


def test_fractional_and_far_apart_positions():
    module = NDRotaryEmbedding([8, 8], 10000, dtype=torch.float64)
    positions = torch.tensor([[0.5, -3.0], [1e6, 0.25], [-7.75, 2e5]])
    cos, sin = module(positions)
    freqs = 10000 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = (positions.double().unsqueeze(-1) * freqs).flatten(1)
    torch.testing.assert_close(cos, angles.cos().float(), rtol=0, atol=6e-8)
    torch.testing.assert_close(sin, angles.sin().float(), rtol=0, atol=6e-8)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64])
def test_positions_of_any_dtype(dtype):
    low, high = (0, 255) if dtype == torch.uint8 else (-128, 127)
    positions = torch.arange(low, high + 1).flip(0).unsqueeze(1)
    module = NDRotaryEmbedding([8], 10000)
    want = module.forward_uncached(positions)
    assert all(torch.equal(a, b) for a, b in zip(module(positions.to(dtype)), want))
    assert want[0][-1 - abs(low)].eq(1).all()


def test_real_and_repeated_columns_stand_side_by_side():
    halves = NDRotaryEmbedding(**FLUX).forward_from_grid((2, 3, 4))
    pairs = NDRotaryEmbedding(**FLUX, use_real=True, repeat_interleave_real=True).forward_from_grid((2, 3, 4))
    for half, pair in zip(halves, pairs):
        assert torch.equal(pair, half.repeat_interleave(2, dim=1))


def test_one_axis():
    module = OneDRotaryEmbedding(32, theta=256.0)
    grid = module.forward_from_grid(10, 5, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(grid, module(torch.arange(5, 15))))
    function = get_1d_rotary_pos_embed(32, torch.arange(5, 15), theta=256.0)
    assert all(torch.equal(a, b) for a, b in zip(grid, function))
    assert get_1d_rotary_pos_embed(32, 7)[0].shape == (7, 16)
    assert get_1d_rotary_pos_embed(32, 7, dtype=torch.float64)[0].dtype == torch.float64


def kill_by_overwriting(tensor):
    tensor.fill_(float("nan"))


def kill_behind_pytorch(tensor):
    tensor.numpy().fill(7)


def kill_by_freeing(tensor):
    tensor.untyped_storage().resize_(0)


def kill_by_swapping(tensor):
    tensor.data = torch.empty(0)


def kill_through_a_view(tensor):
    tensor.view(-1)[3:].zero_()


KILLS = [kill_by_overwriting, kill_behind_pytorch, kill_by_freeing, kill_by_swapping, kill_through_a_view]


@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("call", ["grid", "positions", "one axis"])
def test_a_caller_harms_neither_a_holder_nor_the_next_caller(kill, call):
    nd, one = NDRotaryEmbedding(**FLUX), OneDRotaryEmbedding(16)
    positions = torch.cartesian_prod(*[torch.arange(4)] * 3)
    ask = {
        "grid": lambda: nd.forward_from_grid((4, 4, 4)),
        "positions": lambda: nd(positions),
        "one axis": lambda: one.forward_from_grid(64, 0, "cpu"),
    }[call]
    first = ask()
    want = [t.clone() for t in first]
    holder, victim = ask(), ask()
    for tensor in victim:
        kill(tensor)
    assert all(torch.equal(a, b) for a, b in zip(holder, want))
    assert all(torch.equal(a, b) for a, b in zip(first, want))
    assert all(torch.equal(a, b) for a, b in zip(ask(), want))
    for tensor in first:
        kill(tensor)
    assert all(torch.equal(a, b) for a, b in zip(holder, want))
    assert all(torch.equal(a, b) for a, b in zip(ask(), want))


@pytest.mark.parametrize("kill", [kill_by_overwriting, kill_by_freeing, kill_by_swapping])
def test_even_the_cached_tensors_may_be_ruined(kill):
    module = NDRotaryEmbedding(**FLUX)
    held = module.forward_from_grid((4, 4, 4))
    want = [t.clone() for t in held]
    for _, tensors in GRIDS.entries():
        for tensor in tensors:
            kill(tensor)
    assert all(torch.equal(a, b) for a, b in zip(module.forward_from_grid((4, 4, 4)), want))
    assert all(torch.equal(a, b) for a, b in zip(held, want))


def test_what_is_done_to_the_module_does_not_touch_its_tables():
    module = NDRotaryEmbedding(**FLUX)
    want = [t.clone() for t in module.forward_from_grid((4, 4, 4))]
    for change in (
        lambda m: m.half(),
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.double(),
    ):
        change(module)
        assert all(torch.equal(a, b) for a, b in zip(module.forward_from_grid((4, 4, 4)), want))
    assert not module.state_dict()


def test_a_hit_shares_memory_until_somebody_writes():
    module = NDRotaryEmbedding(**FLUX)
    first, second = module.forward_from_grid((4, 4, 4)), module.forward_from_grid((4, 4, 4))
    address = torch._C._data_address
    assert address(first[0]) == address(second[0])
    second[0].zero_()
    assert address(first[0]) != address(second[0])


def test_copies_are_lent_where_there_is_no_copy_on_write(monkeypatch):
    def refuse(tensor):
        raise RuntimeError("not supported on this device")

    module = NDRotaryEmbedding(**FLUX)
    want = [t.clone() for t in module.forward_from_grid((4, 4, 4))]
    monkeypatch.setattr(torch.Tensor, "_lazy_clone", refuse)
    for tensor in module.forward_from_grid((4, 4, 4)):
        tensor.data.zero_()
    assert all(torch.equal(a, b) for a, b in zip(module.forward_from_grid((4, 4, 4)), want))


def test_the_content_of_positions_is_the_key():
    module = NDRotaryEmbedding([8], 10000)
    positions = torch.arange(6).unsqueeze(1)
    before = module(positions)
    positions.data.add_(3)  # leaves no trace in the tensor's version
    after = module(positions)
    assert torch.equal(before[0][3:], after[0][:3]) and not torch.equal(before[0], after[0])
    hits = GRIDS.hits
    module(positions.clone())
    assert GRIDS.hits == hits + 1
    longer = torch.arange(12).unsqueeze(1)
    for start in (0, 3, 6):  # parts of one memory
        assert torch.equal(module(longer[start : start + 6])[0], module(longer)[0][start : start + 6])


@pytest.mark.parametrize("surrounding", ["inference", "autocast", "dtype", "device", "fake", "thread"])
def test_born_the_same_whatever_surrounds(surrounding):
    module = NDRotaryEmbedding(**FLUX)
    want = [t.clone() for t in module.forward_from_grid((2, 3, 4))]
    GRIDS.clear()
    built = []

    def build():
        built.append(module.forward_from_grid((2, 3, 4)))

    if surrounding == "inference":
        with torch.inference_mode():
            build()
    elif surrounding == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            build()
    elif surrounding == "dtype":
        torch.set_default_dtype(torch.float64)
        try:
            build()
        finally:
            torch.set_default_dtype(torch.float32)
    elif surrounding == "device":
        with torch.device("meta"):
            build()
    elif surrounding == "fake":
        with FakeTensorMode():
            build()
        assert built.pop()[0].shape == want[0].shape and not len(GRIDS)
        build()
    else:
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    cos, sin = built[0]
    assert torch.equal(cos, want[0]) and torch.equal(sin, want[1])
    weight = torch.ones(cos.shape[1], requires_grad=True)
    (weight * module.forward_from_grid((2, 3, 4))[0]).sum().backward()  # no inference tensor lives on in the cache
    (weight * cos).sum().backward()


def test_meta_is_not_cached():
    module = NDRotaryEmbedding(**FLUX)
    cos, _ = module.forward_from_grid((2, 3, 4), device="meta")
    assert cos.is_meta and cos.shape == (24, 64) and not len(GRIDS)


def test_compiles_without_a_break():
    module = NDRotaryEmbedding(**FLUX)
    want = module.forward_from_grid((2, 3, 4))

    @torch.compile(fullgraph=True, backend="eager")
    def forward(x):
        cos, sin = module.forward_from_grid((2, 3, 4))
        return x * cos, x * sin

    got = forward(torch.ones(24, 64))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=0, atol=6e-8)


def test_bound_by_bytes():
    cache = GridCache("test", limit=3000)
    device = torch.device("cpu")

    def build(n, device):
        return (torch.full((n,), float(n)),)

    for n in (250, 250, 251, 252, 253):  # a thousand bytes each: two fit
        assert cache.grid(build, n, device=device)[0][0] == n
    assert cache.nbytes <= 3000 and len(cache) == 2 and cache.misses == 4 and cache.hits == 1
    assert cache.grid(build, 1000, device=device)[0].shape == (1000,)
    assert len(cache) == 2
    cache.set_limit(1100)
    assert len(cache) == 1
    assert cache.clear() > 0 and cache.nbytes == 0 == len(cache)


@pytest.mark.parametrize("act", ["clear_caches", "release_memory", "invalidate_memory", "evict_unused"])
def test_the_process_wide_acts_reach_the_grids(act):
    module = NDRotaryEmbedding(**FLUX)
    held = module.forward_from_grid((4, 4, 4))
    want = [t.clone() for t in held]
    report = cache_liveness.cache_report()
    assert report["caches"]["multimodal_gen.grids"]["entries"][0]["bytes"] == 2 * 64 * 64 * 4
    assert "multimodal_gen.grids: 1 entries" in cache_liveness.format_report()
    freed = getattr(cache_liveness, act)()
    assert len(GRIDS) == 0 and (freed is None or freed >= 2 * 64 * 64 * 4)
    assert all(torch.equal(a, b) for a, b in zip(held, want))
    assert all(torch.equal(a, b) for a, b in zip(module.forward_from_grid((4, 4, 4)), want))
    cache_liveness.release_memory("meta")
    assert len(GRIDS) == 1


def test_a_forked_child_starts_with_free_locks():
    cache = GridCache("test")
    with cache._lock:
        child = os.fork()
        if child == 0:
            (tensor,) = cache.grid(lambda device: (torch.ones(3),), device=torch.device("cpu"))
            os._exit(0 if bool((tensor == 1).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_build_a_grid_once_and_ruin_nothing():
    cache = GridCache("test")
    device = torch.device("cpu")
    builds, wrong = [], []

    def build(n, device):
        builds.append(n)
        time.sleep(0.01)
        return (torch.full((64,), float(n)),)

    def work():
        for n in range(20):
            (tensor,) = cache.grid(build, n, device=device)
            if not bool((tensor == n).all()):
                wrong.append(n)
            tensor.zero_()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and sorted(builds) == list(range(20))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: NDRotaryEmbedding([15, 16], 10000), ValueError, "dim"),
        (lambda: NDRotaryEmbedding([], 10000), ValueError, "rope_dim_list"),
        (lambda: NDRotaryEmbedding([16], -1), ValueError, "theta"),
        (lambda: NDRotaryEmbedding([16], "x"), TypeError, "theta"),
        (lambda: NDRotaryEmbedding([16, 16], 10000, [1.0, 2.0, 3.0]), ValueError, "theta_rescale_factor"),
        (lambda: NDRotaryEmbedding([16], 10000, dtype="float32"), TypeError, "dtype"),
        (lambda: NDRotaryEmbedding([16], 10000).forward_from_grid((2, 3)), ValueError, "grid_size"),
        (lambda: NDRotaryEmbedding([16], 10000).forward_from_grid((0,)), ValueError, "grid_size"),
        (lambda: NDRotaryEmbedding([16], 10000).forward_from_grid(3, shard_dim=1), ValueError, "shard_dim"),
        (lambda: NDRotaryEmbedding([16], 10000)(torch.arange(3)), ValueError, "positions"),
        (lambda: get_1d_rotary_pos_embed(16, 0), ValueError, "pos"),
    ],
)
def test_bad_input_names_the_argument(make, error, words):
    with pytest.raises(error, match=words):
        make()
    assert not len(GRIDS)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
