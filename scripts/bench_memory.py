"""Memory and lifecycle: eight published long-context ropes served at 32768 positions, beside upstream's way.

Upstream's way, written here: a float32 table of all positions that the rope is made for, one per entry (as sglang and
vLLM make it; where they then cast it to the model's dtype, theirs holds half as much and loses accuracy).
"""

from __future__ import annotations

import gc
import json
import logging
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from common.cache_liveness import LiveBuffers, cache_report, clear_caches, release_memory
from common.rope_frequencies import RopeSpec, normalize_rope, set_table_limit
from srt.layers.rotary_embedding import get_rope
from srt.layers.rotary_embedding.factory import _ROPE_DICT

SERVED = 32768
THREADS, STEPS = 16, 10_000


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def spec_of(numbers: dict) -> RopeSpec:
    names = ("head_size", "rotary_dim", "max_position", "base", "rope_scaling")
    return normalize_rope(*(numbers[name] for name in names))


def upstreams_bytes(numbers: dict) -> int:
    spec = spec_of(numbers)
    return 4 * spec.full_rows * spec.rotary_dim


def upstreams_table(numbers: dict) -> torch.Tensor:
    spec = spec_of(numbers)
    inv_freq, scale = spec.frequencies()
    freqs = torch.outer(torch.arange(spec.full_rows, dtype=torch.float32), inv_freq)
    return torch.cat((freqs.cos() * scale, freqs.sin() * scale), dim=-1)


def ours(numbers: dict) -> torch.nn.Module:
    names = ("head_size", "rotary_dim", "max_position", "base", "is_neox_style", "rope_scaling")
    return get_rope(*(numbers[name] for name in names), dtype=torch.bfloat16)


def build_anew(numbers: dict) -> None:
    clear_caches()
    ours(numbers)


def rotate(module: torch.nn.Module, numbers: dict) -> None:
    module(torch.tensor([SERVED - 1]), torch.zeros(1, 1, numbers["head_size"]))


def churn() -> tuple[tuple, tuple]:
    """Objects, bytes and entries before and after many lookups and kills by many threads."""
    keys = [(10000.0, True), (10000.0, False), (500.0, True)]

    def state() -> tuple[int, int, int]:
        gc.collect()
        modules = sum(issubclass(type(o), LiveBuffers) for o in gc.get_objects())
        return modules, cache_report()["bytes"], len(_ROPE_DICT)

    def look_up() -> None:
        for base, neox in keys:
            get_rope(128, 128, 1024, base, neox)

    def live(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(STEPS // THREADS):
            module = get_rope(128, 128, 1024, *chance.choice(keys))
            if chance.random() < 0.02:
                module.to("meta")

    clear_caches()
    look_up()
    before = state()
    threads = [threading.Thread(target=live, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    look_up()
    return before, state()


def main() -> None:
    logging.getLogger("live_rope").setLevel(logging.CRITICAL)
    published = json.loads(Path(__file__).with_name("published_long_context.json").read_text())
    set_table_limit(SERVED)
    print(f"float32 tables; upstream's way for all positions, ours for {SERVED} served; best of 5 on the CPU")
    print(f"{'':<24}{'table, MiB':>30}{'start-up, ms':>30}{'wake, ms':>10}{'wake /':>10}")
    print(
        f"{'rope':<24}{'upstream':>10}{'ours':>10}{'ratio':>10}{'upstream':>10}{'ours':>10}{'ratio':>10}{'':>10}{'build':>10}"
    )
    held, startup, wake = {}, {}, {}
    for name, numbers in published.items():
        times = 1 if upstreams_bytes(numbers) > 1 << 30 else 3
        theirs = min(seconds(partial(upstreams_table, numbers)) for _ in range(times))
        builds, wakes = [], []
        for _ in range(5):  # by turns, so that both meet the same machine
            module = None  # or the new one would share its memory
            builds.append(seconds(partial(build_anew, numbers)))
            module = ours(numbers)
            module.release_memory()
            wakes.append(seconds(partial(rotate, module, numbers)))
        held[name] = upstreams_bytes(numbers), module.cos_sin_cache.nbytes
        startup[name] = theirs * 1e3, min(builds) * 1e3
        wake[name] = min(wakes) * 1e3
        sizes, spans = [n / 2**20 for n in held[name]], startup[name]
        print(
            f"{name:<24}{sizes[0]:>10.1f}{sizes[1]:>10.1f}{sizes[1] / sizes[0]:>10.4f}{spans[0]:>10.1f}{spans[1]:>10.1f}"
            f"{spans[1] / spans[0]:>10.4f}{wake[name]:>10.1f}{wake[name] / spans[1]:>10.2f}"
        )
    largest = max(published, key=lambda name: held[name][0])
    for what, pairs in (("bytes", held), ("start-up", startup)):
        whole = [sum(pair[side] for pair in pairs.values()) for side in range(2)]
        rest = [whole[side] - pairs[largest][side] for side in range(2)]
        print(
            f"{what}: ours / upstream's = {whole[1] / whole[0]:.4f} of all eight, {rest[1] / rest[0]:.4f} without "
            f"{largest} (target 0.1250)"
        )
    ratio = sum(wake.values()) / sum(mine for _, mine in startup.values())
    print(f"wake to the first right rotation / one build = {ratio:.2f} of all eight (target 1)")
    clear_caches()
    live = [ours(numbers) for numbers in published.values()]
    before = cache_report()["bytes"]
    freed = release_memory()
    print(
        f"release: {freed:,} of {before:,} table bytes of {len(live)} entries freed, {cache_report()['bytes']:,} left"
    )
    del live, module
    start, end = churn()
    print(f"{STEPS:,} lookups and kills by {THREADS} threads: modules, bytes, entries {start} before, {end} after")


if __name__ == "__main__":
    main()
