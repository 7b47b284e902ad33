"""The rotation against copying memory and against its peers, what the guard costs, and the table's build.

Every figure is a median of one run. Each function runs back to back, not in turns with its rival (whose dirty cache
lines it would pay for), in several rounds; a ratio is the median of the rounds' ratios. Peers that are not installed
say so. `--plot` draws the scaling from 1 to 65536 tokens.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from common import rope_kernel
from common.rope_frequencies import cos_sin_table, normalize_rope
from common.rope_kernel import rotate
from multimodal_gen.runtime.layers.rotary_embedding.apply import apply_rotary_emb
from srt.layers.rotary_embedding import get_rope
from srt.layers.rotary_embedding.factory import _ROPE_DICT, _get_live_rope_cache_entry

HEADS, KV_HEADS, SIZE, BASE, ROWS = 32, 8, 128, 10000.0, 65536
SIZES = (1, 16, 128, 512, 4096, 16384, 65536)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLE_ROWS = 131072


class Report:
    """The rows of the printed table; each is also a record for ``--json``."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def title(self, text: str) -> None:
        print(f"\n{text}")

    def row(self, name: str, ours: float, theirs: float, ratio: float, target: str, met: bool | None) -> None:
        self.rows.append(dict(name=name, ours=ours, theirs=theirs, ratio=ratio, target=target, met=met))
        mark = "" if met is None else "ok" if met else "MISSED"
        print(f"  {name:<50}{show(ours):>11}{show(theirs):>11}{ratio:>8.2f}  {target:<10}{mark}", flush=True)

    def at_most(self, name: str, ours: float, theirs: float, ratio: float, limit: float) -> None:
        self.row(name, ours, theirs, ratio, f"<= {limit:.4g}", ratio <= limit)

    def faster(self, name: str, ours: float, theirs: float, ratio: float, limit: float | None) -> None:
        self.row(name, ours, theirs, 1 / ratio, f">= {limit:g}" if limit else "", 1 / ratio >= limit if limit else None)


def show(seconds: float) -> str:
    unit, scale = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * scale:.3g} {unit}"


# --- timing ---------------------------------------------------------------------------------------------------------


def times(call: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of one call, from calls in a row that together take about ``seconds``."""
    call()
    started = time.perf_counter()
    call()
    once = max(time.perf_counter() - started, 1e-7)
    inner = max(1, int(2e-4 / once))  # short calls are timed many at a time
    timer = timeit.Timer(call)
    return [timer.timeit(inner) / inner for _ in range(max(3, min(200, int(seconds / (once * inner)))))]


class Race:
    """Several functions that do the same work, timed in the same rounds."""

    def __init__(self, calls: dict[str, Callable[[], object]], seconds: float, rounds: int) -> None:
        self.rounds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                self.rounds[name].append(statistics.median(times(call, seconds)))

    def median(self, name: str) -> float:
        return statistics.median(self.rounds[name])

    def ratio(self, name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(self.rounds[name], self.rounds[other]))


# --- the peers ------------------------------------------------------------------------------------------------------


def plain_torch(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation as engines write it without a kernel: look the rows up, halve, multiply, join."""
    cos, sin = (part.unsqueeze(-2) for part in table.index_select(0, positions).chunk(2, dim=-1))

    def turn(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    return turn(query), turn(key)


def hugging_face(tokens: int, dtype: torch.dtype, query: Tensor, key: Tensor, positions: Tensor) -> dict:
    """transformers' function on the layout its models have, alone and with the rotary module's forward before it."""
    if find_spec("transformers") is None:
        return {}
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    rope_parameters = {"rope_type": "default", "rope_theta": BASE}
    config = LlamaConfig(head_dim=SIZE, max_position_embeddings=ROWS, rope_parameters=rope_parameters)
    module = LlamaRotaryEmbedding(config)
    q, k = query[None].transpose(1, 2), key[None].transpose(1, 2)
    ids = positions[None]
    cos, sin = module(q, ids)
    return {
        "Hugging Face": lambda: apply_rotary_pos_emb(q, k, cos, sin),
        "Hugging Face with its rotary module": lambda: apply_rotary_pos_emb(q, k, *module(q, ids)),
    }


def gpu_engines(positions: Tensor, query: Tensor, key: Tensor, table: Tensor) -> dict:
    """The in-place kernels of engines that are installed."""
    flat = query.flatten(1), key.flatten(1)
    found = {}
    if find_spec("flashinfer") is not None and query.is_cuda:
        from flashinfer import apply_rope_with_cos_sin_cache_inplace

        found["flashinfer"] = lambda: apply_rope_with_cos_sin_cache_inplace(positions, *flat, SIZE, table, True)
    if find_spec("vllm") is not None:
        from vllm import _custom_ops

        rows = table.to(query.dtype)
        found["vllm"] = lambda: _custom_ops.rotary_embedding(positions, *flat, SIZE, rows, True)
    if find_spec("sgl_kernel") is not None and query.is_cuda:
        from sgl_kernel import apply_rope_with_cos_sin_cache_inplace as sgl_rope

        found["sglang"] = lambda: sgl_rope(positions, *flat, SIZE, table, True)
    return found


# --- what is measured -----------------------------------------------------------------------------------------------


def inputs(tokens: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    query = torch.randn(tokens, HEADS, SIZE, device=device).to(dtype)
    key = torch.randn(tokens, KV_HEADS, SIZE, device=device).to(dtype)
    return torch.randint(0, ROWS, (tokens,), device=device), query, key


def copying(report: Report, options: argparse.Namespace, layer: torch.nn.Module) -> None:
    report.title(f"{'rotation against copying the same q and k':<52}{'ours':>11}{'copy':>11}{'ratio':>8}  target")
    checks = layer._checks["cos_sin_cache"]
    for tokens, limit in ((4096, 1.3), (512, 3.0)):
        for dtype in DTYPES:
            positions, query, key = inputs(tokens, dtype)
            other = query.clone(), key.clone()
            for style in ("neox", "gptj"):
                turn = functools.partial(
                    rotate, query, key, positions, layer.cos_sin_cache, is_neox_style=style == "neox", row_checks=checks
                )
                race = Race(
                    {
                        "copy": lambda: (other[0].copy_(query), other[1].copy_(key)),  # noqa: B023
                        "in place": lambda: turn(inplace=True),  # noqa: B023
                        "clone": lambda: (query.clone(), key.clone()),  # noqa: B023
                        "new": turn,
                    },
                    options.seconds,
                    options.rounds,
                )
                name = f"{tokens} tokens, {str(dtype)[6:]}, {style}, "
                for ours, theirs in (("in place", "copy"), ("new", "clone")):
                    words = name + ("in place" if ours == "in place" else "new (against clone)")
                    report.at_most(words, race.median(ours), race.median(theirs), race.ratio(ours, theirs), limit)


def peers(report: Report, options: argparse.Namespace, layer: torch.nn.Module) -> dict[str, list[float]]:
    """Whole module calls against the peers, bfloat16, neox, new tensors; medians by name and size, for the plot."""
    report.title(
        f"{'whole module call against peers (bfloat16, neox)':<52}{'ours':>11}{'peer':>11}{'faster':>8}  target"
    )
    lines: dict[str, list[float]] = {}
    limits = {"plain torch": 5, "torch.compile": 2.5, "Hugging Face": 5}
    for tokens in SIZES[:5] if options.quick else SIZES:
        positions, query, key = inputs(tokens, torch.bfloat16)
        flat_query, flat_key = query.view(tokens, -1), key.view(tokens, -1)
        torch.compiler.reset()
        compiled = torch.compile(plain_torch, dynamic=False)  # made for this one length: its best case
        other = query.clone(), key.clone()
        calls = {
            "ours": lambda: layer(positions, flat_query, flat_key),  # noqa: B023
            "plain torch": lambda: plain_torch(positions, query, key, layer.cos_sin_cache),  # noqa: B023
            "torch.compile": lambda: compiled(positions, query, key, layer.cos_sin_cache),  # noqa: B023
            **hugging_face(tokens, torch.bfloat16, query, key, positions),
            **gpu_engines(positions, query, key, layer.cos_sin_cache),
            "ours, in place": lambda: layer(positions, flat_query, flat_key, inplace=True),  # noqa: B023
            "copy": lambda: (other[0].copy_(query), other[1].copy_(key)),  # noqa: B023
        }
        ours = layer(positions, query, key)
        for name in ("plain torch", "torch.compile"):
            for mine, theirs in zip(ours, calls[name]()):
                torch.testing.assert_close(mine, theirs)
        race = Race(calls, options.seconds, 3 if tokens > 4096 else options.rounds)
        for name in calls:
            lines.setdefault(name, []).append(race.median(name))
            if name not in ("ours", "ours, in place", "copy"):
                limit = 6 if tokens == 1 and name == "Hugging Face" else limits.get(name)
                words = f"{tokens} token{'s'[: tokens > 1]}: {name}"
                report.faster(words, race.median("ours"), race.median(name), race.ratio("ours", name), limit)
        if "Hugging Face" in calls:
            words, mine = f"{tokens} token{'s'[: tokens > 1]}: Hugging Face, ours in place", "ours, in place"
            report.faster(words, race.median(mine), race.median("Hugging Face"), race.ratio(mine, "Hugging Face"), None)
        if tokens == 1:
            spent = race.median("ours")
            report.row(
                "1 token: whole call with its check, of 15 us", spent, 15e-6, spent / 15e-6, "<= 1", spent <= 15e-6
            )
    for name in ("transformers", "diffusers", "flashinfer", "vllm", "sgl_kernel"):
        if find_spec(name) is None:
            print(f"  {name}: not installed")
    return lines


def diffusion(report: Report, options: argparse.Namespace) -> None:
    if find_spec("diffusers") is None:
        return
    from diffusers.models.embeddings import apply_rotary_emb as theirs

    report.title(f"{'FLUX, one of q and k: [1, 4608, 24, 128]':<52}{'ours':>11}{'diffusers':>11}{'faster':>8}  target")
    angles = torch.outer(torch.arange(4608.0), 1 / BASE ** (torch.arange(0, SIZE, 2) / SIZE)).repeat_interleave(2, 1)
    grid = angles.cos(), angles.sin()
    for dtype in DTYPES:
        x = torch.randn(1, 4608, 24, SIZE).to(dtype)
        calls = {
            "ours": lambda: apply_rotary_emb(x, grid, sequence_dim=1),  # noqa: B023
            "diffusers": lambda: theirs(x, grid, sequence_dim=1),  # noqa: B023
        }
        torch.testing.assert_close(calls["ours"](), calls["diffusers"]())
        race = Race(calls, options.seconds, options.rounds)
        words = f"apply_rotary_emb, {str(dtype)[6:]}"
        report.faster(words, race.median("ours"), race.median("diffusers"), race.ratio("ours", "diffusers"), 10)


def guard(report: Report, layer: torch.nn.Module) -> None:
    """What the guard adds to a lookup hit and the check to a forward, against asking torch for its default device."""
    report.title(f"{'the guard, in default-device calls':<52}{'ours':>11}{'torch':>11}{'ratio':>8}  target")
    key = next(key for key, entry in _ROPE_DICT.items() if entry is layer)
    names = {
        "nothing": "pass",
        "device": "get_default_device()",
        "dict": "entries.get(key)",
        "guarded": "lookup(key)",
        "buffer": "layer._buffers['cos_sin_cache']",
        "live": "layer.live('cos_sin_cache', device)",
    }
    known = dict(
        get_default_device=torch.get_default_device,
        entries={key: layer},
        lookup=_get_live_rope_cache_entry,
        key=key,
        layer=layer,
        device=torch.device("cpu"),
    )
    rounds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(101):
        for name, statement in names.items():
            rounds[name].append(timeit.Timer(statement, globals=known).timeit(1000) / 1000)
    spent = {name: statistics.median(rounds[name]) - statistics.median(rounds["nothing"]) for name in names}
    hit, check = spent["guarded"] - spent["dict"], spent["live"] - spent["buffer"]
    report.at_most(
        f"added to a dict hit of {spent['dict'] * 1e6:.2f} us", hit, spent["device"], hit / spent["device"], 1 / 6
    )
    report.at_most("added to reading the buffer in a forward", check, spent["device"], check / spent["device"], 1 / 6)


def naive_table(inv_freq: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(TABLE_ROWS, dtype=torch.float32), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def our_table(inv_freq: Tensor) -> Tensor:
    return cos_sin_table(inv_freq, 1.0, TABLE_ROWS)


def frequencies() -> Tensor:
    return normalize_rope(SIZE, SIZE, TABLE_ROWS, BASE, None).frequencies()[0]


def peak(side: str) -> float:
    """How far the resident size of this process rises while a table is built, over the bytes of the table."""
    inv_freq = frequencies()
    cos_sin_table(inv_freq, 1.0, 1 << 13)  # the kernels and torch's threads are there
    make = {"ours": our_table, "naive": naive_table, "module": lambda _: get_rope(SIZE, SIZE, TABLE_ROWS, BASE)}[side]
    if side == "module":
        get_rope(SIZE, SIZE, 1 << 13, BASE)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    made = make(inv_freq)
    rise = resident("VmHWM") - before
    del made
    return rise / (TABLE_ROWS * SIZE * 4)


def resident(field: str) -> int:
    """``VmRSS`` or its peak ``VmHWM`` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def building(report: Report, options: argparse.Namespace) -> None:
    report.title(f"{f'a table of {TABLE_ROWS} x {SIZE}':<52}{'ours':>11}{'naive':>11}{'ratio':>8}  target")
    inv_freq = frequencies()
    assert torch.equal(our_table(inv_freq), naive_table(inv_freq))

    def module() -> object:
        return get_rope(SIZE, SIZE, TABLE_ROWS, BASE, cache={})

    calls = {"ours": lambda: our_table(inv_freq), "naive": lambda: naive_table(inv_freq), "module": module}
    race = Race(calls, options.seconds, options.rounds)
    report.at_most("time to fill it", race.median("ours"), race.median("naive"), race.ratio("ours", "naive"), 1.0)
    ratio = race.ratio("module", "naive")
    report.row(
        "a whole get_rope miss: clean thread, checksums", race.median("module"), race.median("naive"), ratio, "", None
    )
    if not Path("/proc/self/clear_refs").exists():
        print("  peak memory: not measured (no /proc/self/clear_refs)")
        return
    ours, naive, whole = (
        float(
            subprocess.run(
                [sys.executable, __file__, "--peak", side], check=True, capture_output=True, text=True
            ).stdout
        )
        for side in ("ours", "naive", "module")
    )
    for name, rise in (("to fill it", ours), ("of a whole get_rope miss", whole)):
        report.rows.append(dict(name="peak memory " + name, ratio=rise, theirs=naive, target="<= 1.2", met=rise <= 1.2))
        mark = "ok" if rise <= 1.2 else "MISSED"
        print(
            f"  {'peak memory ' + name + ', in tables':<50}{'':>11}{f'{naive:.2f}':>11}{rise:>8.2f}  <= 1.2    {mark}"
        )


def gpu(report: Report, options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        print("\nGPU: not measured (none here)")
        return
    report.title(f"{'on ' + torch.cuda.get_device_name():<52}{'ours':>11}{'peer':>11}{'ratio':>8}  target")
    table = cos_sin_table(frequencies(), 1.0, ROWS).cuda()
    for tokens in (1, 512, 4096, 65536):
        positions, query, key = inputs(tokens, torch.bfloat16, "cuda")
        other = query.clone(), key.clone()

        def synchronized(call: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                call()
                torch.cuda.synchronize()

            return run

        calls = {
            "ours": lambda: rotate(query, key, positions, table, is_neox_style=True, inplace=True),  # noqa: B023
            "device copy": lambda: (other[0].copy_(query), other[1].copy_(key)),  # noqa: B023
            **gpu_engines(positions, query, key, table),
        }
        race = Race({name: synchronized(call) for name, call in calls.items()}, options.seconds, options.rounds)
        for name in list(calls)[1:]:
            words = f"{tokens} tokens, bfloat16, in place: {name}"
            report.row(words, race.median("ours"), race.median(name), race.ratio("ours", name), "", None)


def draw(lines: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    for name, seconds in lines.items():
        sizes = SIZES[: len(seconds)]
        ours = name.startswith("ours")
        style = dict(color="black", linestyle=":") if name == "copy" else {}
        axes.plot(
            sizes,
            [s * 1e3 for s in seconds],
            marker="o",
            markersize=4,
            linewidth=2.4 if ours else 1.2,
            label=name,
            **style,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SIZES, [str(n) for n in SIZES])
    axes.set_xlabel("tokens")
    axes.set_ylabel("milliseconds per call")
    axes.set_title(
        f"Rotating {HEADS} query and {KV_HEADS} key heads of {SIZE}, bfloat16, {torch.get_num_threads()} threads"
    )
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    print(f"\nplot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each comparison (default: 9)")
    parser.add_argument("--seconds", type=float, default=0.05, help="seconds per function and round (default: 0.05)")
    parser.add_argument("--quick", action="store_true", help="no more than 4096 tokens")
    parser.add_argument("--only", help="copying, peers, diffusion, guard, building or gpu")
    parser.add_argument("--plot", type=Path, help="draw the scaling into this file")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak(options.peak))
        return
    library = rope_kernel._library
    kernel = "plain torch" if library is None else f"C kernel, {isa(library)}"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {kernel}; medians of {options.rounds} rounds")
    layer = get_rope(SIZE, SIZE, ROWS, BASE, dtype=torch.bfloat16)
    report = Report()
    lines: dict[str, list[float]] = {}
    parts = {
        "copying": lambda: copying(report, options, layer),
        "peers": lambda: lines.update(peers(report, options, layer)),
        "diffusion": lambda: diffusion(report, options),
        "guard": lambda: guard(report, layer),
        "building": lambda: building(report, options),
        "gpu": lambda: gpu(report, options),
    }
    with torch.inference_mode():
        for name, part in parts.items():
            if options.only in (None, name):
                part()
    missed = [row["name"] for row in report.rows if row["met"] is False]
    print(f"\n{len(missed)} targets missed" + (": " + "; ".join(missed) if missed else ""))
    if options.json:
        options.json.write_text(json.dumps(report.rows, indent=1))
    if options.plot and lines:
        draw(lines, options.plot)


def isa(library) -> str:
    import ctypes

    library.rope_isa.restype = ctypes.c_char_p
    return library.rope_isa().decode()


if __name__ == "__main__":
    main()
