"""The LLM subsystem's cache never hands out a dead or wrong table. Oracle: float64 arithmetic in this file."""

import sys
import threading

import pytest
import torch

from common.ci_register import register_cpu_ci
from srt.layers.rotary_embedding import get_rope
from srt.layers.rotary_embedding.factory import _ROPE_DICT, _get_live_rope_cache_entry

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

HEAD, ROWS, BASE = 64, 128, 10000.0


@pytest.fixture(autouse=True)
def empty_cache():
    _ROPE_DICT.clear()
    yield
    _ROPE_DICT.clear()


def rope(**changes):
    arguments = dict(head_size=HEAD, rotary_dim=HEAD, max_position=ROWS, base=BASE, dtype=torch.float32)
    return get_rope(**{**arguments, **changes})


def true_table(rows=ROWS, dim=HEAD, base=BASE):
    angle = torch.arange(rows, dtype=torch.float64)[:, None] * base ** (
        -torch.arange(0, dim, 2, dtype=torch.float64) / dim
    )
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def assert_right(module):
    table = module.cos_sin_cache
    assert table.device.type == "cpu" and table.dtype == torch.float32
    # float32 angles up to ROWS are off by at most half an ulp of ROWS plus that of the frequency
    assert (table.double() - true_table()).abs().max() < ROWS * 2**-22


def assert_rotates(module):
    positions = torch.tensor([0, 1, 77, ROWS - 1])
    query = torch.randn(4, 2, HEAD, generator=torch.Generator().manual_seed(0))
    rotated, _ = module(positions, query)
    cos, sin = true_table()[positions].unsqueeze(1).chunk(2, -1)
    first, second = query.double().chunk(2, -1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    assert (rotated.double() - expected).abs().max() < 1e-4


def key_of(module):
    return next(key for key, entry in _ROPE_DICT.items() if entry is module)


def test_rebuilt_after_another_owner_killed_it(teardown, caplog):
    dead = rope()
    right = dead.cos_sin_cache.clone()
    key = key_of(dead)
    teardown(dead)
    with caplog.at_level("WARNING", "live_rope"):
        fresh = rope()
    assert fresh is not dead
    assert torch.equal(fresh.cos_sin_cache, right)
    assert_right(fresh)
    assert rope() is fresh
    (warning,) = caplog.records
    assert str(key) in warning.getMessage() and "cos_sin_cache" in warning.getMessage()


def test_a_model_that_holds_the_dead_module_keeps_working(teardown, caplog):
    held = rope()
    teardown(held)
    with caplog.at_level("WARNING", "live_rope"):
        assert_rotates(held)
        assert_rotates(held)
    assert len(caplog.records) == 1
    assert_right(held)


def test_a_live_entry_is_shared():
    first = rope()
    assert rope() is first
    assert rope(rope_scaling={"rope_type": "default"}) is first
    assert rope(base=int(BASE)) is first
    assert rope(base=500000.0) is not first
    assert rope(is_neox_style=False) is not first
    assert rope(dtype=torch.bfloat16) is not first
    assert rope(max_position=2 * ROWS) is not first


def test_a_live_entry_is_shared_from_a_meta_pass_and_survives_what_is_done_to_the_meta_model():
    real = rope()
    with torch.device("meta"):
        assert rope() is real
        model = torch.nn.ModuleDict({"rope": rope(), "linear": torch.nn.Linear(2, 2)})
    model.to_empty(device="cpu")
    assert rope() is real
    assert_right(real)
    assert_rotates(real)


def test_meta_entries_are_shared_in_the_meta_pass_and_never_inherited():
    with torch.device("meta"):
        meta = rope()
        assert meta.cos_sin_cache.is_meta
        assert rope() is meta
    real = rope()
    assert real is not meta
    assert_right(real)
    assert rope() is real
    meta.to_empty(device="cpu")
    assert_right(meta)


def test_a_dead_entry_is_kept_while_the_default_device_is_meta():
    dead = rope()
    dead.to("meta")
    with torch.device("meta"):
        assert _get_live_rope_cache_entry(key_of(dead)) is dead
    assert _get_live_rope_cache_entry(key_of(dead)) is None


def test_changed_values_count_as_dead():
    wrong = rope()
    wrong.cos_sin_cache.zero_()
    fresh = rope()
    assert fresh is not wrong
    assert_right(fresh)
    equal = rope()
    equal.cos_sin_cache.copy_(equal.cos_sin_cache.clone())  # touched, not changed
    assert rope() is equal


def test_many_threads_build_one_entry():
    start = threading.Barrier(8)
    got = []

    def ask():
        start.wait()
        got.append(rope(max_position=4096))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8 and len(set(map(id, got))) == 1


def test_bad_arguments_leave_the_cache_as_it_was():
    kept = rope()
    for changes in (
        dict(rotary_dim=63),
        dict(rotary_dim=HEAD * 2),
        dict(base=0),
        dict(base=float("nan")),
        dict(max_position=0),
        dict(max_position=2.5),
        dict(head_size=-1),
        dict(rope_scaling={"rope_type": "yearn"}),
        dict(rope_scaling={"rope_type": "linear"}),
        dict(rope_scaling={"rope_type": "linear", "factor": "two"}),
        dict(rope_scaling=["linear"]),
        dict(dtype="float32"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            rope(**changes)
        named = next(iter(changes))
        assert named in str(caught.value) or "rope_type" in str(caught.value) or "factor" in str(caught.value)
    assert list(_ROPE_DICT.values()) == [kept]
    assert rope() is kept


def test_unknown_rope_types_list_the_known():
    with pytest.raises(ValueError, match="yarn"):
        rope(rope_scaling={"rope_type": "yearn"})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
