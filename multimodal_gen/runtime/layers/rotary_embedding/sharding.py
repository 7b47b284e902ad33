"""Sequence parallelism: which part of a grid or of a token sequence a rank holds."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_group: Any = None


def set_sequence_parallel_group(group: Any) -> None:
    """Make grids shard themselves over ``group``: a process group, a one-dimensional device mesh, or None for no sharding."""
    global _group
    _group = None if group is None else _process_group(group)


def get_sequence_parallel_group() -> Any:
    """The process group that grids shard themselves over, or None."""
    return _group


def _process_group(group: Any) -> Any:
    return group.get_group() if hasattr(group, "get_group") else group


def rank_and_size(group: Any = None) -> tuple[int, int]:
    """This process' rank in ``group`` (a process group or a one-dimensional device mesh) and the group's size.

    None stands for the group of :func:`set_sequence_parallel_group`, and (0, 1) where there is none.
    """
    group = _group if group is None else _process_group(group)
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def shard_bounds(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and last + 1 of the positions that ``rank`` holds of ``size``: as `torch.tensor_split` cuts, the first
    ``size % world_size`` ranks hold one more."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    share, extra = divmod(size, world_size)
    start = rank * share + min(rank, extra)
    return start, start + share + (rank < extra)
