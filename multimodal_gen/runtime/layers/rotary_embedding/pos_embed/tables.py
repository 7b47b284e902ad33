"""What the families share: frequencies, angles, and the layouts in which models want cos and sin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from common.rope_grid import Columns, fill_tables

from ..grid_cache import GRIDS, GridCache, cleanly, empty_result, traced
from ..nd import frequencies

# Positions on one axis: a count n for 0..n-1, the positions themselves, or a tensor of them that must not be read here.
Positions: TypeAlias = "int | tuple[float, ...] | Tensor"


def double_for(device: torch.device) -> torch.dtype:
    """The widest float that tables can be computed in on ``device``."""
    return torch.float32 if device.type in ("mps", "npu") else torch.float64


def angles(positions: Tensor, dim: int, theta: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Angles of ``positions`` ``[n]`` (any dtype): ``[n, dim/2]``, in the wider of their dtype and ``dtype``."""
    return torch.outer(positions, frequencies(dim, theta, dtype, positions.device))


def place(positions: Positions, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``positions`` as a tensor of ``dtype`` on ``device``."""
    if isinstance(positions, Tensor):
        return positions.to(device=device, dtype=dtype)
    if isinstance(positions, tuple):
        return torch.tensor(positions, dtype=dtype, device=device)
    return torch.arange(positions, dtype=dtype, device=device)


def hashable(positions: Tensor) -> Positions:
    """``positions`` as part of a key, where reading them costs no waiting."""
    if positions.device.type == "cpu" and not traced():
        return tuple(positions.tolist())
    return positions


def from_cache(
    form: Callable[..., tuple[Tensor, ...]], *args: Any, device: torch.device, cache: GridCache = GRIDS
) -> tuple[Tensor, ...]:
    """``form(*args, device)``, cached if the arguments can be a key."""
    if any(isinstance(part, Tensor) for arg in args for part in (arg if isinstance(arg, tuple) else (arg,))):
        return cleanly(form, *args, device)
    return cache.grid(form, *args, device=device)


def rotation_matrices(table: Tensor) -> Tensor:
    """Angles ``[n, w]`` as the rows of their rotation matrices, flat: ``[n, 4w]`` of cos, -sin, sin, cos."""
    cos, sin = table.cos(), table.sin()
    return torch.stack([cos, -sin, sin, cos], dim=-1).flatten(1)


def unit_complex(table: Tensor) -> Tensor:
    """``exp(i angle)``, complex64 for float32 angles, complex128 for float64."""
    return torch.polar(torch.ones_like(table), table)


def filled(
    shape: Sequence[int], parts: Sequence[tuple[int, Tensor]], device: torch.device, out: Tensor | None = None
) -> Tensor:
    """A grid ``[*shape, sum of widths]`` from ``(axis, columns [positions, width])``: see `nd.grid_tables`."""
    columns = [Columns(axis, values.to(device)) for axis, values in parts]
    if out is None:
        out = empty_result((*shape, sum(part.values.shape[1] for part in columns)), columns[0].values.dtype, device)
    fill_tables([out], [columns], shape)
    return out


def tiled_cos_sin(table: Tensor, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of angles ``[..., w]`` as ``[..., 2w]``, all columns and then all again, times ``scale``."""
    out = []
    for function in (torch.cos, torch.sin):
        half = function(table)
        half = (half if scale == 1.0 else half * scale).to(dtype)
        out.append(torch.cat((half, half), dim=-1))
    return out[0], out[1]
