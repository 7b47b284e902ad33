"""Sequence parallelism: which part of a grid or of a token sequence a rank holds, and the rows of a table that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Tables = TypeVar("Tables", bound="Tensor | tuple | list | dict")

_group: Any = None


def set_sequence_parallel_group(group: Any) -> None:
    """Make grids shard themselves over ``group``: a process group, a device mesh, or None for no sharding."""
    global _group
    _group = group


def get_sequence_parallel_group() -> Any:
    """The process group or device mesh that grids shard themselves over, or None."""
    return _group


def rank_and_size(group: Any = None) -> tuple[int, int]:
    """This process' place in ``group`` and how many places there are.

    A device mesh of several dimensions (ring x Ulysses, say) counts its places in row-major order. None stands for
    the group of :func:`set_sequence_parallel_group`, and gives (0, 1) where there is none.
    """
    group = _group if group is None else group
    if group is None:
        return 0, 1
    if not hasattr(group, "get_coordinate"):
        return dist.get_rank(group), dist.get_world_size(group)
    rank = 0
    for place, size in zip(group.get_coordinate(), group.shape):
        rank = rank * size + place
    return rank, group.size()


def shard_bounds(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and last + 1 of the positions that ``rank`` holds of ``size``: as `torch.tensor_split` cuts, the first
    ``size % world_size`` ranks hold one more."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    share, extra = divmod(size, world_size)
    start = rank * share + min(rank, extra)
    return start, start + share + (rank < extra)


LAYOUTS = ("ulysses", "ring", "zigzag")


def shard_tokens(
    image: int | Sequence[int],
    rank: int,
    world_size: int,
    *,
    axis: int | None = None,
    text: tuple[int, int] = (0, 0),
    replicate_text: bool = False,
    layout: str = "ulysses",
) -> Tensor:
    """The tokens that ``rank`` holds, int64, in its order: text before the image, image, text after it.

    Arguments as of :func:`shard`.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    grid = (image,) if isinstance(image, int) else tuple(image)

    def cut(tokens: Tensor, dim: int = 0) -> Tensor:
        if layout != "zigzag":
            start, stop = shard_bounds(tokens.shape[dim], rank, world_size)
            return tokens.narrow(dim, start, stop - start)
        chunks = [shard_bounds(tokens.shape[dim], i, 2 * world_size) for i in (rank, 2 * world_size - 1 - rank)]
        return torch.cat([tokens.narrow(dim, start, stop - start) for start, stop in chunks], dim=dim)

    before, after = text
    middle = torch.Size(grid).numel()
    tokens = torch.arange(before + middle + after, dtype=torch.int64, device="cpu")
    first, here, last = tokens.split([before, middle, after])
    here = cut(here) if axis is None else cut(here.view(grid), axis).flatten()
    if not replicate_text:
        first, last = cut(first), cut(last)
    return torch.cat([first, here, last])


def shard(
    tables: Tables,
    group: Any = None,
    *,
    dim: int = 0,
    grid: Sequence[int] | None = None,
    axis: int | None = None,
    text: tuple[int, int] = (0, 0),
    replicate_text: bool = False,
    layout: str = "ulysses",
) -> Tables:
    """The rows of ``tables`` that belong to this rank's part of the sequence, in memory of their own.

    Args:
        tables: a tensor, or tuples, lists and dicts of tensors, with the tokens along ``dim``.
        group: process group or device mesh; by default that of :func:`set_sequence_parallel_group`.
        grid, axis: cut the image's grid along this axis; by default its tokens are cut as one sequence.
        text: text tokens before and after the image's; they are cut on their own, or ``replicate_text``.
        layout: "ulysses" and "ring": one stretch per rank, the longer ones first; "zigzag": one stretch from the
            front and its mirror image from the back, which balances causal ring attention.

    The shards of all ranks are the whole: no token is left out, none but replicated text is held twice.

    Raises:
        ValueError: the tokens along ``dim`` are not those of ``grid`` and ``text``.
    """
    rank, world_size = rank_and_size(group)

    def part(table: Tensor) -> Tensor:
        image = table.shape[dim] - sum(text)
        shape = (image,) if grid is None else tuple(grid)
        if image < 0 or torch.Size(shape).numel() != image:
            raise ValueError(f"tables have {table.shape[dim]} tokens, not the {sum(text)} of text and those of {shape}")
        if axis is not None and grid is None:
            raise ValueError("axis needs grid")
        options = {"axis": axis, "text": text, "replicate_text": replicate_text, "layout": layout}
        tokens = shard_tokens(shape, rank, world_size, **options)
        return table.index_select(dim, tokens.to(table.device))

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            return part(value)
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return type(value)(walk(item) for item in value)

    return walk(tables)
