"""Tear one of two models down in every way, and hold what the others rotate against float64 arithmetic.

For the published RoPE numbers of eight models (published_rope.json): two models share a cache entry, one is torn down,
a third is built. An unguarded cache (a dict of plain modules, as engines have it) is shown next to ours.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from multimodal_gen.runtime.layers.rotary_embedding import RotaryEmbedding as DiffusionRotaryEmbedding
from multimodal_gen.runtime.layers.rotary_embedding import get_rotary_pos_embed
from srt.layers.rotary_embedding import get_rope

LAYERS = 4
HEADS = 2  # of each layer; rows of the table, not heads, are what can go wrong
COLUMNS = "{:<17}{:<18}{:<14}{:<24}{:<16}{:>10}"


# --- the reference: float64 arithmetic, nothing of the packages -----------------------------------------------------


def reference_frequencies(numbers: dict) -> tuple[Tensor, float]:
    """Inverse frequencies in float64 and the factor on cos and sin, by the papers of Llama 3.1 and YaRN."""
    dim, base, scaling = numbers["rotary_dim"], numbers["base"], numbers["rope_scaling"]
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "llama3":
        turns = original * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (keep + (1 - keep) / factor), 1.0

    def pair_turning(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_turning(scaling.get("beta_fast", 32)), pair_turning(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    attention = 0.1 * math.log(factor) + 1.0
    if "mscale" in scaling:  # DeepSeek: the ratio of two such factors, the rest is in its softmax scale
        attention = (0.1 * scaling["mscale"] * math.log(factor) + 1.0) / (
            0.1 * scaling["mscale_all_dim"] * math.log(factor) + 1.0
        )
    return frequency * (1 - ramp + ramp / factor), attention


def reference_rotation(query: Tensor, angle: Tensor, scale: float, neox: bool) -> Tensor:
    """``query`` ``[tokens, heads, dim]`` turned by ``angle`` ``[tokens, dim/2]``, in float64."""
    cos, sin = angle.cos()[:, None] * scale, angle.sin()[:, None] * scale
    query = query.double()
    if neox:
        a, b = query.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = query[..., ::2], query[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


# --- models ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("demo_teardown::rotate_", mutates_args={"query"})
def unguarded_rotate_(query: Tensor, positions: Tensor, table: Tensor, neox: bool) -> None:
    cos, sin = table.index_select(0, positions)[:, None].chunk(2, dim=-1)
    a, b = query.chunk(2, dim=-1) if neox else (query[..., ::2], query[..., 1::2])
    pair = (a * cos - b * sin, b * cos + a * sin)
    query.copy_(torch.cat(pair, dim=-1) if neox else torch.stack(pair, dim=-1).flatten(-2))


@unguarded_rotate_.register_fake
def _(query: Tensor, positions: Tensor, table: Tensor, neox: bool) -> None:
    """What an in-place op does on meta: nothing, also when only its table is there."""


class Unguarded(nn.Module):
    """What engines cache: a plain module with a table, handed to an in-place op as it is."""

    def __init__(self, table: Tensor, neox: bool) -> None:
        super().__init__()
        self.neox = neox
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward(self, positions: Tensor, query: Tensor) -> Tensor:
        query = query.clone()
        unguarded_rotate_(query, positions, self.cos_sin_cache, self.neox)
        return query


class Case:
    """One published geometry: how its models get their entry, what is torn down, what is true."""

    def __init__(self, name: str, numbers: dict) -> None:
        self.name, self.numbers = name, numbers
        self.llm = numbers["subsystem"] == "srt"
        self.neox = numbers.get("is_neox_style", False)
        generator = torch.Generator().manual_seed(len(name))
        if self.llm:
            top = numbers["max_position"]
            self.positions = torch.unique(torch.cat((torch.arange(256), torch.tensor([1023, 4095, top // 2, top - 1]))))
            frequency, self.scale = reference_frequencies(numbers)
            self.angle = self.positions.double()[:, None] * frequency
        else:
            grid = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in numbers["grid"]), indexing="ij")
            self.scale = 1.0
            self.angle = torch.cat(
                [
                    axis.reshape(-1, 1) * numbers["base"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
                    for axis, dim in zip(grid, numbers["axes"])
                ],
                dim=1,
            )
            self.positions = torch.arange(self.angle.shape[0])
        self.query = torch.randn(len(self.angle), HEADS, numbers["head_size"], generator=generator)
        self.truth = reference_rotation(self.query, self.angle, self.scale, self.neox)
        # an angle is rounded twice to float32, as the frequency and as the product
        self.allowed = (self.angle.abs().amax(1) * 2**-22 + 2e-6)[:, None, None] * self.query.abs().amax() * 2
        self.entry = numbers["rope_scaling"]["rope_type"] if self.llm else "x".join(map(str, numbers["grid"])) + " grid"

    def build(self) -> list:
        """A model's layers, as an engine builds them: each asks for its entry."""
        n = self.numbers
        if self.llm:
            args = (n["head_size"], n["rotary_dim"], n["max_position"], n["base"], self.neox, n["rope_scaling"])
            return [get_rope(*args, dtype=torch.bfloat16) for _ in range(LAYERS)]
        width = n["head_size"] * n["heads"]
        return [get_rotary_pos_embed(n["grid"], width, n["heads"], n["axes"], n["base"]) for _ in range(LAYERS)]

    def rotate(self, layer) -> Tensor:
        if self.llm:
            return layer(self.positions, self.query)[0]
        cos, sin = layer
        apply = DiffusionRotaryEmbedding(self.numbers["head_size"], self.numbers["head_size"], 1)
        return apply(self.query, cos=cos, sin=sin)[0]

    def error(self, rotated: Tensor) -> float:
        """The largest error, infinite if any element is off by more than float32 angles explain."""
        if rotated.device.type != "cpu":
            return math.inf
        error = (rotated.double() - self.truth).abs()
        return float(error.max()) if bool((error <= self.allowed).all()) else math.inf

    def unguarded(self) -> Unguarded:
        rows = (torch.cat((self.angle.cos(), self.angle.sin()), dim=-1) * self.scale).float()
        table = torch.zeros(int(self.positions.max()) + 1, rows.shape[1])
        table[self.positions] = rows
        return Unguarded(table, self.neox)


# --- teardown -------------------------------------------------------------------------------------------------------


def tensors(model: list) -> Iterator[Tensor]:
    for layer in model:
        yield from layer.buffers() if isinstance(layer, nn.Module) else layer


def to_meta(model: list) -> None:
    for layer in model:
        if isinstance(layer, nn.Module):
            layer.to("meta")
        else:  # a grid's tensors: the offloader's way
            for tensor in layer:
                tensor.data = torch.empty(0)


def free_storages(model: list) -> None:
    for tensor in tensors(model):
        tensor.untyped_storage().resize_(0)


def overwrite(model: list) -> None:
    for tensor in tensors(model):
        tensor.zero_()


TEARDOWNS: dict[str, Callable[[list], None]] = {"to meta": to_meta, "storage freed": free_storages, "zeroed": overwrite}


def outcome_unguarded(case: Case, teardown: Callable[[list], None]) -> str:
    """What a survivor of an unguarded cache gives; in a process of its own, since it may not survive."""

    def run(pipe) -> None:
        torch.set_num_threads(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        shared = case.unguarded()
        teardown([shared])
        try:
            rotated = shared(case.positions, case.query)
            if torch.equal(rotated, case.query):
                pipe.send("UNROTATED, no error")
            elif case.error(rotated) < math.inf:
                pipe.send("right")
            else:
                pipe.send("WRONG, no error")
        except (RuntimeError, NotImplementedError, IndexError) as error:
            pipe.send(f"{type(error).__name__} later")

    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=run, args=(there,))
    child.start()
    there.close()
    try:
        said = here.recv()
    except EOFError:
        said = "process crashed"
    child.join()
    return said


def main() -> int:
    logging.getLogger("live_rope").setLevel(logging.ERROR)
    published = json.loads(Path(__file__).with_name("published_rope.json").read_text())
    cases = [Case(name, numbers) for name, numbers in published.items()]
    before = {
        (case.name, way): outcome_unguarded(case, teardown) for case in cases for way, teardown in TEARDOWNS.items()
    }
    print(COLUMNS.format("model", "entry", "teardown", "an unguarded cache", "live-rope", "max error"))
    wrong = 0
    for case in cases:
        for way, teardown in TEARDOWNS.items():
            torn, survivor = case.build(), case.build()
            shared = torn[0] is survivor[0] if case.llm else torn[0][0] is not survivor[0][0]
            errors = [case.error(case.rotate(layer)) for layer in (*torn, *survivor)]
            teardown(torn)
            third = case.build()
            errors += [case.error(case.rotate(layer)) for layer in (*survivor, *third)]
            worst = max(errors)
            right = worst < math.inf and shared
            wrong += not right
            print(
                COLUMNS.format(
                    case.name, case.entry, way, before[case.name, way], "right" if right else "WRONG", f"{worst:.1e}"
                )
            )
    print(f"{len(cases) * len(TEARDOWNS) - wrong} of {len(cases) * len(TEARDOWNS)} teardowns survived")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
