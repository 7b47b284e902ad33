"""Kandinsky's embeddings: tables of rotation matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..grid_cache import table_device
from .tables import Positions, filled, from_cache, hashable, place, rotation_matrices


def _angles(positions: Positions, dim: int, max_period: float, scaling: float, home: torch.device) -> Tensor:
    pairs = dim // 2
    steps = torch.arange(0, pairs, dtype=torch.float32, device=home)
    frequencies = torch.exp(-math.log(max_period) * steps / pairs)
    frequencies = frequencies if scaling == 1.0 else frequencies * scaling
    return torch.outer(place(positions, torch.float32, home), frequencies)


def _line(positions: Positions, dim: int, max_period: float, scaling: float, device: torch.device) -> tuple[Tensor]:
    table = rotation_matrices(_angles(positions, dim, max_period, scaling, table_device(device)))
    return (table.to(device).view(len(table), dim // 2, 2, 2),)


def _volume(
    positions: tuple, batch: int | None, dims: tuple, max_period: float, scales: tuple, device: torch.device
) -> tuple[Tensor]:
    home = table_device(device)
    first = 0 if batch is None else 1
    parts, shape = [], [] if batch is None else [batch]
    for axis, (at, dim, scale) in enumerate(zip(positions, dims, scales), start=first):
        table = rotation_matrices(_angles(at, dim, max_period, 1.0, home) / scale)
        parts.append((axis, table))
        shape.append(len(table))
    return (filled(shape, parts, device).unflatten(-1, (-1, 2, 2)).unsqueeze(-4),)


class Kandinsky6RoPE1D(nn.Module):
    """Kandinsky 6's text and audio: rotation matrices, float32 ``[*pos.shape, 1, dim/2, 2, 2]``."""

    def __init__(self, dim: int, max_pos: int = 2048, max_period: float = 10000.0, freqs_scaling: float = 1.0):
        super().__init__()
        self.dim = dim
        self.max_pos = max_pos
        self.max_period = max_period
        self.freqs_scaling = freqs_scaling

    def forward(self, pos: Tensor) -> Tensor:
        args = (hashable(pos.flatten()), self.dim, self.max_period, self.freqs_scaling)
        (table,) = from_cache(_line, *args, device=pos.device)
        return table.unflatten(0, pos.shape).unsqueeze(-4)


class Kandinsky5RoPE1D(Kandinsky6RoPE1D):
    """Kandinsky 5's text: rotation matrices, float32 ``[*pos.shape, 1, dim/2, 2, 2]``."""

    def __init__(self, dim: int, max_pos: int = 1024, max_period: float = 10000.0):
        super().__init__(dim, max_pos, max_period)


class Kandinsky6RoPE3D(nn.Module):
    """Kandinsky 6's video: rotation matrices, float32 ``[frames, height, width, 1, sum(axes_dims)/2, 2, 2]``, of the grid
    that the positions of the three axes span; ``scale_factor`` divides their angles."""

    def __init__(
        self,
        axes_dims: Sequence[int],
        max_pos: Sequence[int] = (128, 128, 128),
        max_period: float = 10000.0,
    ):
        super().__init__()
        self.axes_dims = axes_dims
        self.max_pos = max_pos
        self.max_period = max_period

    def forward(self, pos: Sequence[Tensor], scale_factor: Sequence[float] = (1.0, 1.0, 1.0)) -> Tensor:
        return self._table(None, pos, scale_factor)

    def _table(self, batch: int | None, pos: Sequence[Tensor], scale_factor: Sequence[float]) -> Tensor:
        args = (tuple(map(hashable, pos)), batch, tuple(self.axes_dims), self.max_period, tuple(scale_factor))
        return from_cache(_volume, *args, device=pos[0].device)[0]


class Kandinsky5RoPE3D(Kandinsky6RoPE3D):
    """Kandinsky 5's: as Kandinsky 6's, repeated for each sample: ``shape`` is (batch, frames, height, width)."""

    def forward(
        self, shape: Sequence[int], pos: Sequence[Tensor], scale_factor: Sequence[float] = (1.0, 1.0, 1.0)
    ) -> Tensor:
        return self._table(shape[0], pos, scale_factor)


Kandinsky6SRRoPE3D = Kandinsky6RoPE3D
