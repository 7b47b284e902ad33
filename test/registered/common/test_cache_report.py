"""Seeing it: what the report says of every cache, and one line of log for each event."""

import gc
import logging
import sys

import pytest
import torch

from common import rope_frequencies
from common.cache_liveness import (
    cache_report,
    clear_caches,
    evict_unused,
    format_report,
    invalidate_memory,
    release_memory,
    restore_memory,
    set_caches_weak,
)
from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding import get_rope as get_image_rope
from multimodal_gen.runtime.layers.rotary_embedding import get_rotary_pos_embed
from srt.layers.rotary_embedding import get_rope

register_cpu_ci(est_time=8, suite="base-a-test-cpu")
pytestmark = pytest.mark.usefixtures("alone")

DIM, TOP, BASE = 32, 4096, 10000.0
TABLE = TOP * DIM * 4


def rope(neox=True, get=get_rope):
    return get(DIM, DIM, TOP, BASE, neox, None, torch.float32)


def use(module):
    module(torch.tensor([3]), torch.randn(1, 1, DIM))


def srt():
    return cache_report()["caches"]["srt.rope"]


def test_every_cache_of_both_subsystems_reports():
    grid = get_rotary_pos_embed((2, 8, 8), 2 * DIM, 2, [8, 12, 12], BASE)
    held = rope(), rope(get=get_image_rope), grid
    report = cache_report()
    assert {"srt.rope", "multimodal_gen.rope", "multimodal_gen.grids"} <= set(report["caches"])
    for name, cache in report["caches"].items():
        assert set(cache) == {"entries", "hits", "misses", "drops", "build_seconds"}, name
        for entry in cache["entries"]:
            assert set(entry) == {"key", "bytes", "device", "owners", "heals"}, name
    assert len(report["caches"]["multimodal_gen.grids"]["entries"]) == 1
    lent = sum(e["bytes"] for n in ("grids", "axes") for e in report["caches"][f"multimodal_gen.{n}"]["entries"])
    assert report["bytes"] == TABLE + lent  # the two tables are one memory
    del held


def test_the_report_says_what_is_held_and_what_happened():
    start = srt()
    first, second = rope(), rope()
    assert first is second
    first.to("meta")
    third = rope()
    third.cos_sin_cache.zero_()
    use(third)
    report = cache_report()
    cache = report["caches"]["srt.rope"]
    (entry,) = cache["entries"]
    assert entry["bytes"] == TABLE and entry["device"] == "cpu" and entry["heals"] == 1
    assert "4096 positions" in entry["key"] and "neox" in entry["key"] and "base 10000" in entry["key"]
    assert cache["hits"] == start["hits"] + 1
    assert cache["misses"] == start["misses"] + 2
    assert cache["drops"]["on meta"] == start["drops"].get("on meta", 0) + 1
    assert cache["build_seconds"] > start["build_seconds"]
    assert report["heals"] >= 1
    text = format_report(report)
    assert entry["key"] in text and f"{report['bytes']:,} bytes" in text and "on meta" in text


@pytest.mark.parametrize("weak", [False, True])
def test_owners_are_the_references_beside_the_cache(weak):
    set_caches_weak(weak)
    one = rope()
    assert [e["owners"] for e in srt()["entries"]] == [1]
    layers = torch.nn.ModuleList([rope() for _ in range(4)])
    assert [e["owners"] for e in srt()["entries"]] == [5]
    del layers
    assert [e["owners"] for e in srt()["entries"]] == [1]
    del one
    assert [e["owners"] for e in srt()["entries"]] == ([] if weak else [0])


def test_a_lookup_of_a_sleeping_entry_is_a_hit():
    module, start = rope(), srt()
    release_memory()
    assert rope() is module and srt()["hits"] == start["hits"] + 1
    (entry,) = srt()["entries"]
    assert entry["bytes"] == 0


def test_the_report_changes_nothing():
    module = rope()
    release_memory()
    cache_report()
    assert module._asleep and cache_report()["bytes"] == 0
    set_caches_weak()
    del module
    cache_report()
    gc.collect()
    assert not srt()["entries"]


def test_one_line_of_log_for_each_event(caplog):
    caplog.set_level(logging.INFO, "live_rope")
    rope_frequencies.set_table_limit(TOP)

    def lines(act):
        caplog.clear()
        result = act()
        assert {record.name for record in caplog.records} <= {"live_rope"}
        return result, [(record.levelname, record.getMessage()) for record in caplog.records]

    module, built = lines(rope)
    assert [level for level, _ in built] == ["INFO"] and "srt.rope: built default rope of 32 of 32" in built[0][1]
    assert lines(rope)[1] == lines(lambda: use(module))[1] == []  # nothing happened
    module.to("meta")
    fresh, dropped = lines(rope)
    assert [level for level, _ in dropped] == ["WARNING", "INFO"] and "on meta" in dropped[0][1]
    _, healed = lines(lambda: use(module))
    assert [level for level, _ in healed] == ["WARNING"] and "rebuilding buffer cos_sin_cache" in healed[0][1]
    assert lines(lambda: use(module))[1] == []
    for act, word in ((release_memory, "release_memory: "), (invalidate_memory, "invalidate_memory: ")):
        assert [text.startswith(word) for _, text in lines(act)[1]] == [True]
        _, after = lines(lambda: use(fresh))
        assert [text for _, text in after] == (
            ["RotaryEmbedding: waking cos_sin_cache"] if act is release_memory else []
        )
    assert "grew from 4096 to 5000 rows" in lines(lambda: fresh.reserve(5000))[1][0][1]
    for act in (evict_unused, clear_caches, restore_memory):
        assert [text.startswith(act.__name__) for _, text in lines(act)[1]] == [True]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
