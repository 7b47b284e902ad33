"""Position grids of three published models: first build, hit and peak memory, beside diffusers' own forward.

Both sides take turns in one process; a first build finds the cache empty; the best of the rounds counts, for both,
because that is what is left when nothing else runs. Peak memory is how far the process' resident
size rises during one build, in a process of its own, over the bytes of the result.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from diffusers.models.transformers import transformer_flux, transformer_hunyuan_video, transformer_wan

from multimodal_gen.runtime.layers.rotary_embedding import pos_embed
from multimodal_gen.runtime.layers.rotary_embedding.grid_cache import GRIDS


def flux_ids(side: int, text: int) -> torch.Tensor:
    image = torch.cartesian_prod(torch.zeros(1), torch.arange(float(side)), torch.arange(float(side)))
    return torch.cat([torch.zeros(text, 3), image])


CASES = {
    "FLUX 1024x1024": (transformer_flux.FluxPosEmbed, pos_embed.FluxPosEmbed, (10000, [16, 56, 56]), lambda: flux_ids(64, 512)),
    "Wan 81 frames 720p": (
        transformer_wan.WanRotaryPosEmbed,
        pos_embed.WanRotaryPosEmbed,
        (128, (1, 2, 2), 1024),
        lambda: torch.empty(1, 1, 21, 90, 160),
    ),
    "HunyuanVideo 129 frames 720p": (
        transformer_hunyuan_video.HunyuanVideoRotaryPosEmbed,
        pos_embed.HunyuanVideoRotaryPosEmbed,
        (2, 1, [16, 56, 56]),
        lambda: torch.empty(1, 1, 33, 90, 160),
    ),
}  # fmt: skip


def resident(field: str) -> int:
    """``VmRSS`` or its peak ``VmHWM`` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def peak(name: str, side: str) -> float:
    """Rise of the resident size during one build, over the bytes of the result."""
    theirs, ours, init, make = CASES[name]
    module, given = (theirs if side == "diffusers" else ours)(*init), make()
    small = pos_embed.FluxPosEmbed(10000, [4, 6, 6])(flux_ids(2, 0))  # thread pool and kernels are loaded
    del small
    torch.ones(1 << 16).cos()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    result = module(given)
    return (resident("VmHWM") - before) / sum(t.nbytes for t in result)


def milliseconds(call) -> float:
    started = time.perf_counter()
    result = call()
    spent = time.perf_counter() - started
    del result
    return spent * 1e3


def measure(name: str, rounds: int) -> dict:
    theirs, ours, init, make = CASES[name]
    theirs, ours, given = theirs(*init), ours(*init), make()
    assert all(torch.equal(a, b) for a, b in zip(ours(given), theirs(given)))
    first, reference = [], []
    for _ in range(rounds):
        GRIDS.clear()
        first.append(milliseconds(lambda: ours(given)))
        reference.append(milliseconds(lambda: theirs(given)))
    ours(given)
    hits = []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(1000):
            ours(given)
        hits.append((time.perf_counter() - started) * 1e3)
    row = {"first": min(first), "theirs": min(reference), "hit_us": min(hits)}
    for side in ("ours", "diffusers"):
        command = [sys.executable, __file__, "--peak", name, side]
        row["peak_" + side] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="one line for machines instead of the table")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak(*arguments.peak))
        return
    rows = {name: measure(name, arguments.rounds) for name in CASES}
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{'grid':30} {'first':>9} {'diffusers':>10} {'faster':>7} {'peak':>6} {'theirs':>7} {'hit':>8}")
    for name, r in rows.items():
        print(
            f"{name:30} {r['first']:6.2f} ms {r['theirs']:7.2f} ms {r['theirs'] / r['first']:6.1f}x "
            f"{r['peak_ours']:5.2f}x {r['peak_diffusers']:6.2f}x {r['hit_us']:5.2f} us"
        )
    print("targets: first build >= 4x faster, peak <= 1.5x the result, hit <= 5 us")


if __name__ == "__main__":
    main()
