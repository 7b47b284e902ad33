"""Memory and lifecycle: tables of the serving length, one memory for equal ones, sleep and wake, eviction."""

import ctypes
import gc
import logging
import random
import sys
import threading
import weakref

import pytest
import torch

from common import cache_liveness, rope_frequencies
from common.cache_liveness import (
    cache_report,
    clear_caches,
    evict_unused,
    invalidate_memory,
    release_memory,
    restore_memory,
    set_caches_weak,
)
from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding import get_rope as get_image_rope
from multimodal_gen.runtime.layers.rotary_embedding import get_rotary_pos_embed
from multimodal_gen.runtime.layers.rotary_embedding.grid_cache import GRIDS
from srt.layers.rotary_embedding import get_rope
from srt.layers.rotary_embedding.factory import _ROPE_DICT

register_cpu_ci(est_time=25, suite="base-a-test-cpu")
pytestmark = pytest.mark.usefixtures("alone")

DIM, TOP, BASE = 32, 4096, 10000.0
TABLE = TOP * DIM * 4


def rope(get=get_rope, neox=True, dtype=torch.float32, head=DIM, top=TOP, scaling=None):
    return get(head, DIM, top, BASE, neox, scaling, dtype)


def right(module, top=TOP, neox=True):
    positions = torch.tensor([0, 3, top - 1])
    query = torch.randn(3, 2, DIM, generator=torch.Generator().manual_seed(0))
    ours, _ = module(positions, query) if "srt" in type(module).__module__ else module(query, positions=positions)
    angle = positions.double()[:, None] * BASE ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    a, b = query.double().chunk(2, -1) if neox else (query.double()[..., ::2], query.double()[..., 1::2])
    true = (a * cos - b * sin, b * cos + a * sin)
    true = torch.cat(true, -1) if neox else torch.stack(true, -1).flatten(-2)
    return bool((ours.double() - true).abs().max() < 4 * top * 2**-22)


# --- the serving length ------------------------------------------------------------------------------------------------


def test_tables_begin_with_the_limit_and_grow_on_demand_to_the_same_bits():
    whole = rope().cos_sin_cache.clone()
    clear_caches()
    rope_frequencies.set_table_limit(64)
    module = rope()
    assert module.cos_sin_cache.shape == (64, DIM)
    rows = [64]
    for position in (63, 64, 130, 3000, TOP - 1):
        module(torch.tensor([position]), torch.randn(1, 1, DIM))
        rows.append(len(module.cos_sin_cache))
        assert torch.equal(module.cos_sin_cache, whole[: rows[-1]])
    assert rows == [64, 64, 128, 256, 3001, TOP]  # twice as many, or as many as are needed
    assert rope() is module and module.heals == 0


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [3.0] * 16, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    ],
)  # fmt: skip
def test_the_limit_never_changes_a_value(scaling):
    whole = rope(scaling=scaling).cos_sin_cache.clone()
    clear_caches()
    rope_frequencies.set_table_limit(10)
    module = rope(scaling=scaling)
    assert torch.equal(module.cos_sin_cache, whole[:10])
    module(torch.tensor([len(whole) - 1]), torch.randn(1, 1, DIM))
    assert torch.equal(module.cos_sin_cache, whole)


def test_the_limit_by_environment_and_its_errors(monkeypatch):
    monkeypatch.setenv("LIVE_ROPE_TABLE_LIMIT", "100")
    assert len(rope().cos_sin_cache) == 100
    monkeypatch.setenv("LIVE_ROPE_TABLE_LIMIT", "many")
    with pytest.raises(ValueError, match="LIVE_ROPE_TABLE_LIMIT is 'many'"):
        rope(top=TOP + 1)
    rope_frequencies.set_table_limit(None)
    assert len(rope(top=TOP + 1).cos_sin_cache) == TOP + 1
    for wrong in (0, -3, 2.5, True):
        with pytest.raises(ValueError, match="rows"):
            rope_frequencies.set_table_limit(wrong)


def test_reserve_makes_room_at_once():
    rope_frequencies.set_table_limit(64)
    module = rope()
    module.reserve(1000)
    assert len(module.cos_sin_cache) == 1000
    address = module.cos_sin_cache.data_ptr()
    module(torch.tensor([999]), torch.randn(1, 1, DIM))
    assert module.cos_sin_cache.data_ptr() == address


def test_a_table_grows_while_other_threads_rotate():
    rope_frequencies.set_table_limit(16)
    module, wrong = rope(), []

    def use(seed):
        chance = random.Random(seed)
        for _ in range(40):
            if not right(module, chance.randint(10, TOP)):
                wrong.append(seed)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- one memory ----------------------------------------------------------------------------------------------------------


def family():
    """Entries that differ in style, head size or dtype only, of both subsystems."""
    return [
        rope(),
        rope(neox=False),
        rope(dtype=torch.bfloat16),
        rope(head=2 * DIM),
        rope(get_image_rope),
        rope(get_image_rope, neox=False),
    ]


def addresses(modules):
    return {module.cos_sin_cache.data_ptr() for module in modules}


def test_equal_tables_are_one_memory():
    modules = family()
    assert len(set(map(id, modules))) == len(modules)
    assert len(addresses(modules)) == 1
    assert cache_report()["bytes"] == TABLE
    for module in modules[:3] + modules[4:]:
        assert right(module, neox=module.is_neox_style)


def test_they_are_one_memory_again_after_sleep_and_growth():
    modules = family()
    release_memory()
    for module in modules:
        module.live("cos_sin_cache")
    assert len(addresses(modules)) == 1
    for module in modules:
        module.reserve(2 * TOP)
    assert len(addresses(modules)) == 1


def test_an_entry_takes_the_longer_table_of_an_equal_one():
    rope_frequencies.set_table_limit(64)
    grown, small = rope(), rope(neox=False)
    grown.reserve(1000)
    assert len(small.cos_sin_cache) == 64  # where nobody asked for more, nothing moves
    late = rope(get_image_rope)
    small(torch.tensor([70]), torch.randn(1, 1, DIM))
    assert len(addresses([grown, small, late])) == 1
    assert cache_report()["bytes"] == 1000 * DIM * 4
    assert right(small, 900, neox=False) and right(late, 900)


def test_they_are_one_memory_again_after_one_was_healed():
    modules = family()
    modules[0].cos_sin_cache.zero_()  # theirs too: it is one memory
    for neox, module in ((True, modules[0]), (False, modules[1]), (True, modules[4])):
        assert right(module, neox=neox)
    assert len(addresses(modules)) == 1 and cache_report()["bytes"] == TABLE
    modules[0]._buffers["cos_sin_cache"] = torch.zeros(TOP, DIM)
    assert right(modules[0])
    assert len(addresses(modules)) == 1 and cache_report()["bytes"] == TABLE


# --- sleep and wake -------------------------------------------------------------------------------------------------------


def test_release_frees_every_byte_and_the_next_use_is_right(caplog):
    modules = family()
    grid = get_rotary_pos_embed((2, 8, 8), 2 * DIM, 2, [8, 12, 12], BASE)
    held = cache_report()["bytes"]
    tensors = [module.cos_sin_cache for module in modules]
    with caplog.at_level(logging.WARNING, "live_rope"):
        assert release_memory() == held
        assert cache_report()["bytes"] == 0
        assert all(not t.untyped_storage().nbytes() for t in tensors)
        assert rope() is modules[0]  # asleep is not dead
        assert right(modules[0]) and right(modules[4])
    assert not caplog.records
    assert modules[0].cos_sin_cache is tensors[0]
    again = get_rotary_pos_embed((2, 8, 8), 2 * DIM, 2, [8, 12, 12], BASE)
    assert all(torch.equal(a, b) for a, b in zip(grid, again))


def test_release_by_device_leaves_the_others():
    module = rope()
    assert release_memory("cuda") == 0
    assert right(module) and cache_report()["bytes"] == TABLE
    assert release_memory("cpu") == TABLE


def test_what_was_overwritten_is_released_too():
    modules = [rope(), rope(get_image_rope)]
    overwritten = modules[0].cos_sin_cache.fill_(3.0)
    stranger = torch.zeros(TOP, DIM)
    modules[1]._buffers["cos_sin_cache"] = stranger
    release_memory()
    assert cache_report()["bytes"] == 0 and stranger.untyped_storage().nbytes() == TABLE
    assert right(modules[0]) and right(modules[1])
    assert modules[0].cos_sin_cache is overwritten


def test_a_module_that_goes_to_meta_asleep_is_dead_not_asleep():
    module = rope()
    release_memory()
    module.to("meta")
    fresh = rope()
    assert fresh is not module and fresh.cos_sin_cache.device.type == "cpu"
    module.release_memory()  # nothing to release, and still not asleep
    assert right(fresh) and right(module)


def overwrite(tensor, byte):
    """What an engine does that unmaps pages and maps others at the same address: PyTorch is not told."""
    ctypes.memset(tensor.data_ptr(), byte, tensor.nbytes)


@pytest.mark.parametrize("byte", [0, 0xFF, 0x3F])
def test_invalidated_memory_is_verified_before_it_is_used(byte):
    modules = [rope(), rope(get_image_rope)]
    address = modules[0].cos_sin_cache.data_ptr()
    overwrite(modules[0].cos_sin_cache, byte)
    invalidate_memory()
    for module in modules:
        assert torch.equal(module.live("cos_sin_cache")[1, :1], torch.tensor(1.0).cos().view(1))
        assert right(module)
    assert modules[0].cos_sin_cache.data_ptr() == address  # graphs that recorded it stay good


def test_memory_that_kept_its_contents_is_accepted_after_invalidation():
    module = rope()
    invalidate_memory()
    assert right(module) and module.heals == 0


@pytest.mark.skipif(sys.platform != "linux", reason="drops pages by madvise")
def test_pages_that_are_dropped_and_mapped_again():
    module = rope(top=1 << 16)
    table = module.cos_sin_cache
    page = 4096
    first = -(-table.data_ptr() // page) * page
    whole = (table.data_ptr() + table.nbytes - first) // page * page
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), 4) == 0  # MADV_DONTNEED: they read as zeros
    assert not table[-1000:-100].any()
    invalidate_memory()
    assert right(module, 1 << 16) and module.cos_sin_cache is table
    assert module.heals == 1


def recorded(module):
    """The address that a captured graph has recorded, and the row that its replay reads there, asking nobody."""
    address, width = module.cos_sin_cache.data_ptr(), 4 * DIM
    return lambda row: torch.frombuffer(bytearray(ctypes.string_at(address + row * width, width)), dtype=torch.float32)


def test_the_recipe_for_a_sleep_that_keeps_addresses():
    """vLLM's sleep at level 2, or torch_memory_saver's pause and resume around tables that lie in its region."""
    model = [rope(), rope(neox=False)]
    replay = recorded(model[0])
    row = model[0].cos_sin_cache[7].clone()
    overwrite(model[0].cos_sin_cache, 0xAB)  # sleep drops the pages, waking maps others at the same addresses
    assert not torch.equal(replay(7), row)
    invalidate_memory()  # after waking: nothing is trusted until it was compared
    assert restore_memory() == 1  # and before a captured graph is replayed; the other one shares the memory
    assert torch.equal(replay(7), row)
    assert right(model[0]) and right(model[1], neox=False)
    assert restore_memory() == 0


def test_the_recipe_for_a_sleep_that_gives_the_memory_back():
    """Trainer and engine in one process by turns: before the other's turn our bytes are zero, without a copy."""
    model = [rope(), rope(neox=False)]
    held = cache_report()["bytes"]
    assert release_memory() == held  # before the engine sleeps
    assert cache_report()["bytes"] == 0
    assert rope() is model[0] and cache_report()["bytes"] == 0  # a lookup alone wakes nothing
    assert restore_memory() == 2  # waking ahead of the first request, or by it
    assert cache_report()["bytes"] == held
    assert right(model[0]) and right(model[1], neox=False)


def test_a_sleep_without_any_call_is_noticed_by_the_rotation():
    """The engine slept and told nobody: the rows that the rotation reads are compared as it reads them."""
    model = [rope(), rope(neox=False)]
    overwrite(model[0].cos_sin_cache, 0xAB)
    assert right(model[0]) and right(model[1], neox=False)


def test_positions_that_grids_were_asked_for_are_let_go_too():
    GRIDS.at_positions(_of_positions, torch.arange(1000))
    assert GRIDS._seen
    release_memory("cuda")
    assert GRIDS._seen
    release_memory()
    assert not GRIDS._seen


def _of_positions(positions):
    return (positions.float(),)


# --- nobody is kept alive by the cache alone -------------------------------------------------------------------------------


def test_evict_unused_drops_what_no_model_holds():
    held = rope()
    rope(top=2 * TOP)
    assert evict_unused() == 2 * TABLE
    assert list(_ROPE_DICT.values()) == [held] and rope() is held
    del held
    assert evict_unused() == TABLE and len(_ROPE_DICT) == 0


def test_evict_unused_sees_through_reference_cycles():
    module = rope()
    model = {"rope": module}
    model["self"] = model
    gc.disable()
    try:
        del module, model
        assert evict_unused() == TABLE and len(_ROPE_DICT) == 0
    finally:
        gc.enable()


def test_an_entry_that_goes_while_others_are_evicted():
    rope()
    rope(neox=False)
    first, second = _ROPE_DICT
    weakref.finalize(_ROPE_DICT[first], _ROPE_DICT.pop, second)
    assert evict_unused() == TABLE and len(_ROPE_DICT) == 0


@pytest.mark.parametrize("weak", [False, True])
def test_eviction_while_other_threads_look_up(weak):
    set_caches_weak(weak)
    held, wrong, stop = rope(top=64), [], threading.Event()

    def use():
        try:
            while not stop.is_set():
                if rope(top=64) is not held:
                    wrong.append("the held entry was lost")
                if not right(rope(top=128), 128):
                    wrong.append("wrong")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            wrong.append(repr(error))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(12):
        evict_unused()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]
    assert rope(top=64) is held


def test_weak_caches_let_go_with_the_last_model():
    set_caches_weak()
    held = rope()
    assert rope() is held
    rope(top=2 * TOP)
    gc.collect()
    assert list(_ROPE_DICT.values()) == [held]
    del held
    gc.collect()
    assert len(_ROPE_DICT) == 0 and cache_report()["bytes"] == 0


def test_clear_caches_frees_what_models_do_not_hold():
    held = rope()
    rope(top=2 * TOP)
    assert clear_caches() == 2 * TABLE
    assert right(held) and cache_report()["bytes"] == TABLE
    other = rope()
    assert other is not held and addresses([other]) == addresses([held])


def test_many_lookups_and_kills_leak_nothing_and_lose_no_entry():
    def objects():
        gc.collect()
        return sum(issubclass(type(o), cache_liveness.LiveBuffers) for o in gc.get_objects())

    logging.getLogger("live_rope").setLevel(logging.CRITICAL)
    keys = [(BASE, True), (BASE, False), (500.0, True)]
    modules = [get_rope(DIM, DIM, 64, *key, dtype=torch.float32) for key in keys]
    before = objects(), cache_report()["bytes"], len(_ROPE_DICT)
    del modules

    def live(seed):
        chance = random.Random(seed)
        for _ in range(625):
            module = get_rope(DIM, DIM, 64, *chance.choice(keys), dtype=torch.float32)
            if chance.random() < 0.1:
                chance.choice(
                    [lambda m: m.to("meta"), lambda m: m._buffers.__setitem__("cos_sin_cache", torch.zeros(1))]
                )(module)

    try:
        threads = [threading.Thread(target=live, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for key in keys:
            get_rope(DIM, DIM, 64, *key, dtype=torch.float32)
        assert (objects(), cache_report()["bytes"], len(_ROPE_DICT)) == before
    finally:
        logging.getLogger("live_rope").setLevel(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
