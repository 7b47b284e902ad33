"""Count what becomes of every kind of fault, cell by cell, beside the seed's way; and time the check and the guard.

A cell is one fault x one consumer (the next lookup, a model that holds the module, a compiled one that does) x one
subsystem, run in a forked child of its own, for it may crash. The seed's way, written here: a plain dict of modules, a
plain buffer, a plain-torch forward, nothing checked.

    python scripts/bench_faults.py [--costs-only] [--list]
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import platform
import signal
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import multimodal_gen.runtime.layers.rotary_embedding as image
import srt.layers.rotary_embedding as llm
from common import rope_kernel
from common.cache_liveness import clear_caches

DIM, TOP, BASE, TOKENS = 32, 64, 10000.0, 6
OUTCOMES = ("right", "error", "wrong", "crash")
CONSUMERS = ("next lookup", "holder", "compiled")
BACKEND = "aot_eager"  # what is compiled guards and reads its tensors as with any other backend, in a tenth of the time
LIMIT = 120  # seconds for a cell; one that hangs counts as a crash


def load_faults() -> dict[str, Callable[[nn.Module, str], object]]:
    """The tests' own list of faults."""
    spec = importlib.util.spec_from_file_location("faults", Path(__file__).parents[1] / "test" / "faults.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FAULTS


class DefaultDtype:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


BIRTHS = {
    "born in autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "born in inference mode": torch.inference_mode,
    "born without gradients": torch.no_grad,
    "born under float64": lambda: DefaultDtype(torch.float64),
    "born under bfloat16": lambda: DefaultDtype(torch.bfloat16),
    "born on meta": lambda: torch.device("meta"),
    "born among fake tensors": FakeTensorMode,
}


# --- the seed's way ---------------------------------------------------------------------------------------------------


class PlainRope(nn.Module):
    def __init__(self, neox: bool) -> None:
        super().__init__()
        self.neox = neox
        inverse = 1.0 / BASE ** (torch.arange(0, DIM, 2, dtype=torch.float) / DIM)
        angle = torch.einsum("i,j->ij", torch.arange(TOP, dtype=torch.float), inverse)
        self.register_buffer("cos_sin_cache", torch.cat((angle.cos(), angle.sin()), dim=-1), persistent=False)

    def forward(self, positions: Tensor, query: Tensor) -> Tensor:
        cos, sin = self.cos_sin_cache[positions].unsqueeze(-2).to(query.dtype).chunk(2, dim=-1)
        a, b = query.chunk(2, dim=-1) if self.neox else (query[..., ::2], query[..., 1::2])
        turned = (a * cos - b * sin, b * cos + a * sin)
        return torch.cat(turned, dim=-1) if self.neox else torch.stack(turned, dim=-1).flatten(-2)


class Before:
    """One of the seed's two copies of the engine."""

    def __init__(self, neox: bool) -> None:
        self.neox, self.cache = neox, {}

    def lookup(self) -> nn.Module:
        key = (DIM, DIM, TOP, BASE, self.neox, None, torch.float32)
        if key not in self.cache:
            self.cache[key] = PlainRope(self.neox)
        return self.cache[key]

    def call(self, rope: nn.Module, positions: Tensor, query: Tensor) -> Tensor:
        return rope(positions, query)


class After:
    """This package."""

    def __init__(self, neox: bool) -> None:
        self.neox = neox

    def lookup(self) -> nn.Module:
        get_rope = llm.get_rope if self.neox else image.get_rope
        return get_rope(DIM, DIM, TOP, BASE, self.neox, dtype=torch.float32)

    def call(self, rope: nn.Module, positions: Tensor, query: Tensor) -> Tensor:
        return (rope(positions, query) if self.neox else rope(query, positions=positions))[0]


# --- cells ------------------------------------------------------------------------------------------------------------


def is_right(rotated: Tensor, positions: Tensor, query: Tensor, neox: bool) -> bool:
    angle = positions.double()[:, None] * BASE ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    a, b = query.double().chunk(2, dim=-1) if neox else (query.double()[..., ::2], query.double()[..., 1::2])
    true = (a * cos - b * sin, b * cos + a * sin)
    true = torch.cat(true, dim=-1) if neox else torch.stack(true, dim=-1).flatten(-2)
    if rotated.device.type != "cpu" or rotated.shape != true.shape or rotated.dtype != query.dtype:
        return False
    return bool((rotated.double() - true).abs().max() < 1e-4)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.tensor([5, 0, 1, 33, 2, TOP - 1]), torch.randn(TOKENS, 2, DIM)


def compiled(engine: Before | After, rope: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(lambda p, q: engine.call(rope, p, q), fullgraph=True, dynamic=True, backend=BACKEND)


def run_cell(engine: Before | After, name: str, faults: dict, consumer: str, warm: Callable | None) -> str:
    """One of :data:`OUTCOMES` but the crash. ``warm`` is the engine's module, compiled."""
    positions, query = inputs()
    try:
        if name in BIRTHS:
            with BIRTHS[name]():
                rope = engine.lookup()
        else:
            rope = engine.lookup()
        rotate = lambda rope: lambda p, q: engine.call(rope, p, q)  # noqa: E731
        consume = rotate(rope)
        if consumer == "compiled":
            consume = warm if name in faults else compiled(engine, rope)
        if name in faults:
            faults[name](rope, "cos_sin_cache")
        if consumer == "next lookup":
            consume = rotate(engine.lookup())
        if name == "born in inference mode":  # then used in training
            query.requires_grad_()
            rotated = consume(positions, query)
            rotated.sum().backward()
            return "right" if is_right(rotated.detach(), positions, query.detach(), engine.neox) else "wrong"
        return "right" if is_right(consume(positions, query), positions, query, engine.neox) else "wrong"
    except Exception:  # noqa: BLE001 - a clear error, whatever its type
        return "error"


def outcome(engine: Before | After, name: str, faults: dict, consumer: str, warm: Callable | None) -> str:
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os._exit(OUTCOMES.index(run_cell(engine, name, faults, consumer, warm)))
    _, status = os.waitpid(child, 0)
    return OUTCOMES[os.waitstatus_to_exitcode(status)] if os.WIFEXITED(status) else "crash"


def count_cells(show: bool) -> None:
    faults = load_faults()
    names = [*faults, *BIRTHS]
    print(f"{len(names)} faults x {len(CONSUMERS)} consumers x 2 subsystems; right / error / wrong / crash")
    print(f"{'subsystem':<16}{'consumer':<14}{'before':>24}{'after':>24}")
    totals = {"before": Counter(), "after": Counter()}
    for neox, subsystem in ((True, "srt"), (False, "multimodal_gen")):
        for consumer in CONSUMERS:
            counts = {}
            for label, kind in (("before", Before), ("after", After)):
                engine = kind(neox)
                born = {name: outcome(engine, name, faults, consumer, None) for name in BIRTHS}
                warm = None
                if consumer == "compiled":
                    clear_caches()
                    warm = compiled(engine, engine.lookup())
                    warm(*inputs())
                found = {name: outcome(engine, name, faults, consumer, warm) for name in faults} | born
                counts[label] = Counter(found.values())
                totals[label] += counts[label]
                if show or label == "after":
                    for name, result in found.items():
                        if result != "right":
                            print(f"    {label}, {subsystem}, {consumer}: {name}: {result}")
            print(
                f"{subsystem:<16}{consumer:<14}{in_words(counts['before']):>24}{in_words(counts['after']):>24}",
                flush=True,
            )
    print(f"{'all':<30}{in_words(totals['before']):>24}{in_words(totals['after']):>24}")


def in_words(counts: Counter) -> str:
    return " / ".join(str(counts[name]) for name in OUTCOMES)


# --- costs ------------------------------------------------------------------------------------------------------------


def nanoseconds(calls: dict[str, Callable[[], object]], rounds: int = 41, repeat: int = 5000) -> dict[str, float]:
    """The median over rounds, in which the calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter_ns()
            for _ in range(repeat):
                call()
            times[name].append((time.perf_counter_ns() - started) / repeat)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_costs() -> None:
    clear_caches()
    rope = llm.get_rope(DIM, DIM, TOP, BASE, dtype=torch.float32)
    cache = llm._ROPE_DICT
    (key,) = cache
    plain, cpu = dict(cache), torch.device("cpu")
    buffers = rope._buffers
    times = nanoseconds(
        {
            "an unguarded dict hit, same key": lambda: plain.get(key),
            "torch.get_default_device()": torch.get_default_device,
            "the guard at a lookup": lambda: llm._get_live_rope_cache_entry(key),
            "reading a buffer, unchecked": lambda: buffers["cos_sin_cache"],
            "the check at a forward": lambda: rope.live("cos_sin_cache", cpu),
        }
    )
    hit, device = times["an unguarded dict hit, same key"], times["torch.get_default_device()"]
    print(f"{'cost, median':<36}{'ns':>8}{'x dict hit':>12}{'x default device':>18}")
    for name, value in times.items():
        print(f"{name:<36}{value:>8.0f}{value / hit:>12.2f}{value / device:>18.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--costs-only", action="store_true", help="leave the cells out")
    parser.add_argument("--list", action="store_true", help="name each cell that is not right, before too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("live_rope").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.compile(torch.sin, backend=BACKEND)(torch.zeros(1))  # children do not import the compiler each
    kernel = "C" if rope_kernel._library is not None else "plain torch"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {kernel} kernel")
    measure_costs()
    if not options.costs_only:
        count_cells(options.list)


if __name__ == "__main__":
    main()
