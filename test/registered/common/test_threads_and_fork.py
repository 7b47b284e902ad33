"""Many threads look up, kill and rotate at once; forked and spawned children rotate: never wrong, never stuck."""

import os
import pickle
import random
import subprocess
import sys
import threading
import time
from functools import lru_cache

import pytest
import torch

from common import rope_kernel
from common.cache_liveness import release_memory
from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding import get_rope as get_image_rope
from srt.layers.rotary_embedding import get_rope
from srt.layers.rotary_embedding.factory import _ROPE_DICT

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

DIM, TOP = 32, 256
BASES = (10000.0, 500.0, 1e6)


def truth(query, positions, base):
    angle = positions.double()[:, None] * base ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    a, b = query.double().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@lru_cache
def question(base, seed):
    """Positions, a query and its true rotation. A forked child asks only what its parent has asked: torch's own cosine
    of float64 waits there for threads that stayed in the parent."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, TOP, (7,), generator=generator)
    query = torch.randn(7, 2, DIM, generator=generator)
    return positions, query, truth(query, positions, base)


def rotates_right(rope, base, seed):
    positions, query, expected = question(base, seed)
    ours, _ = rope(positions, query)
    return bool((ours.double() - expected).abs().max() < 1e-3)


def run(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


KILLS = (
    lambda rope: rope.to("meta"),
    lambda rope: rope.to_empty(device="cpu"),
    lambda rope: rope.half(),
    lambda rope: rope._buffers.pop("cos_sin_cache", None),
    lambda rope: rope._buffers.__setitem__("cos_sin_cache", torch.zeros(3)),
    lambda rope: rope._buffers["cos_sin_cache"].zero_(),
)


def test_many_threads_look_up_kill_and_rotate():
    torch.set_num_threads(1)
    wrong, stop = [], time.monotonic() + 6

    def kill(seed):
        chance = random.Random(seed)
        while time.monotonic() < stop:
            rope = get_rope(DIM, DIM, TOP, chance.choice(BASES), dtype=torch.float32)
            try:
                chance.choice(KILLS)(rope)
            except (KeyError, AttributeError, RuntimeError):
                pass  # another killer was faster: there is nothing left to kill
            time.sleep(0.002)

    def use(seed):
        chance = random.Random(seed)
        held = {base: get_rope(DIM, DIM, TOP, base, dtype=torch.float32) for base in BASES}
        count = 0
        while time.monotonic() < stop:
            base = chance.choice(BASES)
            rope = held[base] if chance.random() < 0.5 else get_rope(DIM, DIM, TOP, base, dtype=torch.float32)
            count += 1
            try:
                if not rotates_right(rope, base, count):
                    wrong.append(f"thread {seed}, call {count}, base {base}")
            except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
                wrong.append(repr(error))

    threads = [threading.Thread(target=use, args=(i,)) for i in range(8)]
    threads += [threading.Thread(target=kill, args=(100 + i,)) for i in range(2)]
    run(threads)
    assert not wrong, wrong[:5]


def test_memory_released_while_rotations_run_is_not_taken_from_under_them():
    rows = 1 << 17  # a table of megabytes goes back to the system at once: reading on would end the process
    rope = get_rope(DIM, DIM, rows, 10000.0, dtype=torch.float32)
    positions = torch.arange(0, rows, 9)
    query = torch.randn(len(positions), 1, DIM)
    right, wrong, stop = rope(positions, query)[0], [], time.monotonic() + 3

    def release():
        while time.monotonic() < stop:
            release_memory()
            time.sleep(0.001)

    def use():
        while time.monotonic() < stop:
            try:
                if not torch.equal(rope(positions, query)[0], right):
                    wrong.append("wrong")
            except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
                wrong.append(repr(error))

    threads = [threading.Thread(target=act) for act in (release, use, use)]
    run(threads)
    assert not wrong, wrong[:5]


def test_a_live_entry_survives_a_thread_that_builds_on_meta():
    real = get_rope(DIM, DIM, TOP, 10000.0, dtype=torch.float32)
    stop = threading.Event()

    def build_on_meta():
        while not stop.is_set():
            with torch.device("meta"):
                model = torch.nn.ModuleList([get_rope(DIM, DIM, TOP, 10000.0, dtype=torch.float32)])
            model.to_empty(device="cpu")

    thread = threading.Thread(target=build_on_meta)
    thread.start()
    try:
        for seed in range(200):
            assert get_rope(DIM, DIM, TOP, 10000.0, dtype=torch.float32) is real
            assert rotates_right(real, 10000.0, seed)
    finally:
        stop.set()
        thread.join()


def in_child(work, limit=30):
    """Run ``work`` in a forked child; its exit status, or None if it hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
@pytest.mark.parametrize("kernel", ["c", "torch"])
def test_a_forked_child_rotates_heals_grows_and_builds(kernel, monkeypatch):
    if kernel == "torch":
        monkeypatch.setattr(rope_kernel, "_library", None)
        monkeypatch.setattr(rope_kernel, "short_way", None)
    torch.set_num_threads(2)
    rope = get_rope(DIM, DIM, TOP, 10000.0, dtype=torch.float32)
    image = get_image_rope(DIM, DIM, TOP, 10000.0, True, dtype=torch.float32)
    big = torch.randn(4096, 32, DIM)
    rope(torch.arange(4096), big)  # torch's pool of threads runs in the parent, and stays there

    for base, seed in ((10000.0, 1), (10000.0, 2), (77.0, 3)):
        question(base, seed)

    def work():
        rope(torch.arange(4096), big)
        right = rotates_right(rope, 10000.0, 1)
        rope.to("meta")
        right &= rotates_right(rope, 10000.0, 2)
        positions, query, expected = question(10000.0, 1)
        ours, _ = image(query, positions=positions)
        right &= bool((ours.double() - expected).abs().max() < 1e-3)
        rope(torch.tensor([9 * TOP]), torch.randn(1, 2, DIM))
        return right & rotates_right(get_rope(DIM, DIM, TOP, 77.0, dtype=torch.float32), 77.0, 3)

    assert in_child(work) == 0
    assert rotates_right(rope, 10000.0, 4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_child_forked_while_another_thread_builds_is_not_stuck():
    stop = threading.Event()

    def build():
        while not stop.is_set():
            get_rope(DIM, DIM, 20000, random.random() + 1, dtype=torch.float32)
            _ROPE_DICT.clear()

    thread = threading.Thread(target=build)
    thread.start()
    try:
        time.sleep(0.05)
        for seed in range(3):
            question(3.0, seed)
            assert (
                in_child(lambda seed=seed: rotates_right(get_rope(DIM, DIM, TOP, 3.0, dtype=torch.float32), 3.0, seed))
                == 0
            )
    finally:
        stop.set()
        thread.join()


def test_a_rope_sent_to_a_spawned_process_is_right():
    rope = get_rope(DIM, DIM, TOP, 10000.0, dtype=torch.float32)
    rope.share_memory()
    rope.cos_sin_cache.data.zero_()
    script = (
        "import pickle, sys, torch\n"
        "rope = pickle.loads(sys.stdin.buffer.read())\n"
        f"angle = 3.0 * 10000.0 ** (-torch.arange(0, {DIM}, 2, dtype=torch.float64) / {DIM})\n"
        f"ours, _ = rope(torch.tensor([3]), torch.ones(1, 1, {DIM}))\n"
        "true = torch.cat((angle.cos() - angle.sin(), angle.cos() + angle.sin()))\n"
        "sys.exit(int((ours[0, 0].double() - true).abs().max() > 1e-5))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(rope), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
