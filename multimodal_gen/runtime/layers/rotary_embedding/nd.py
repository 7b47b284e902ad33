"""N-dimensional rotary tables: a grid's cos and sin filled from small per-axis tables, in one pass.

A token of a grid has one position per axis, and each axis owns some columns of the table. So a table of T x H x W
tokens holds only T + H + W different rows of cosines; they are computed once and broadcast into the result. No
position tensor and no float64 intermediate of the full size is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from common.rope_grid import Columns, fill_tables

from .grid_cache import GRIDS, cleanly, empty_result, table_device, traced
from .sharding import rank_and_size, shard_bounds

HALVES = "halves"  # one column per pair:                     c0 c1 c2 ...
PAIRS = "pairs"  # each column twice, side by side:           c0 c0 c1 c1 ...
TILED = "tiled"  # all columns, then all of them again:       c0 c1 ... c0 c1 ...

_CPU = torch.device("cpu")

# --- filling a grid -------------------------------------------------------------------------------------------------


def grid_tables(shape: Sequence[int], tables: Sequence[Sequence[Columns]], device: torch.device) -> list[Tensor]:
    """The tables of a grid, each ``[tokens, sum of widths]``, contiguous, on ``device``, tokens in row-major order.

    Row ``(i0, i1, ...)`` of a table holds, one after another, row ``i_axis`` of each of its columns.
    """
    outs, moved = [], []
    for columns in tables:
        width = sum(part.values.shape[1] for part in columns)
        outs.append(empty_result((*shape, width), columns[0].values.dtype, device))
        moved.append([part._replace(values=part.values.to(device)) for part in columns])
    fill_tables(outs, moved, shape)
    return [out.flatten(0, -2) for out in outs]


def spread(values: Tensor, layout: str) -> Tensor:
    """``[n, w]`` with each column twice where ``layout`` is PAIRS."""
    return values.repeat_interleave(2, dim=1) if layout == PAIRS else values


def cos_sin_grid(angles: Sequence[Tensor], layout: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of a grid, float32 ``[tokens, columns]``, tokens in row-major order of the grid.

    Args:
        angles: for each axis its angles ``[positions, columns]``; their dtype is the one cos and sin are taken in.
        layout: HALVES, PAIRS or TILED.
    """
    tables = []
    for function in (torch.cos, torch.sin):
        columns = [Columns(i, spread(function(axis).float(), layout)) for i, axis in enumerate(angles)]
        tables.append(columns * 2 if layout == TILED else columns)
    cos, sin = grid_tables([axis.shape[0] for axis in angles], tables, device)
    return cos, sin


# --- arbitrary positions --------------------------------------------------------------------------------------------


def distinct(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The different values among ``positions`` ``[S]`` and the index of each position among them."""
    low, high = (bound.item() for bound in torch.aminmax(positions))
    if high - low < 2 * positions.numel() + 256 and low == int(low):  # false where any is infinite or not a number
        index = (positions.double() - low).to(torch.int64) if positions.is_floating_point() else positions.long() - low
        values = torch.arange(low, high + 1, dtype=torch.float64, device="cpu").to(positions.dtype)
        if torch.equal(values[index], positions):
            return values, index
    return torch.unique(positions, return_inverse=True)


def gather_columns(
    positions: Sequence[Tensor], tables: Callable[[int, Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Tables of tokens at arbitrary positions: ``tables(axis, values [n])`` gives that axis' columns ``[n, w]``, for
    one or more tables; returned are these tables ``[S, sum of w]``.

    On the CPU each different position is computed once; elsewhere (or in a trace) each token's is, which asks nothing
    of the device that would have to be waited for.
    """
    once = positions[0].device.type == "cpu" and not traced() and positions[0].numel() > 0
    parts, indices = [], []
    for axis, at in enumerate(positions):
        values, index = distinct(at) if once else (at, None)
        parts.append(tables(axis, values))
        indices.append(index)
    if not once:
        return tuple(torch.cat(columns, dim=1) for columns in zip(*parts))
    tables = [[Columns(axis, values) for axis, values in enumerate(columns)] for columns in zip(*parts)]
    outs = [
        empty_result((len(indices[0]), sum(part.values.shape[1] for part in columns)), columns[0].values.dtype, _CPU)
        for columns in tables
    ]
    fill_tables(outs, tables, [part.values.shape[0] for part in tables[0]], indices)
    return tuple(outs)


# --- frequencies ----------------------------------------------------------------------------------------------------


def frequencies(dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``1 / theta ** (2j / dim)``, ``[dim/2]``, in the order of operations of sglang and diffusers."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)


def _axis_angles(spec: tuple, positions: Tensor) -> Tensor:
    dim, theta, rescale, interpolation, dtype = spec
    if rescale != 1.0:
        theta = theta * rescale ** (dim / (dim - 2))
    return torch.outer(positions.to(dtype) * interpolation, frequencies(dim, theta, dtype, positions.device))


def _nd_grid(specs: tuple, span: tuple, layout: str, device: torch.device) -> tuple[Tensor, Tensor]:
    size, shard_dim, start, rank, world_size = span
    sizes = (size,) * len(specs) if isinstance(size, int) else size
    if len(sizes) != len(specs):
        raise ValueError(f"grid_size must be one number or {len(specs)}, got {size}")
    for size in sizes:
        _positive("grid_size", size)
    if not -len(specs) <= shard_dim < len(specs):
        raise ValueError(f"shard_dim must be an axis of {len(specs)}, got {shard_dim}")
    spans = [(0, size) for size in sizes]
    spans[shard_dim] = shard_bounds(sizes[shard_dim], rank, world_size)
    spans[0] = (spans[0][0] + start, spans[0][1] + start)
    home = table_device(device)
    angles = [
        _axis_angles(spec, torch.arange(first, last, dtype=spec[-1], device=home))
        for spec, (first, last) in zip(specs, spans)
    ]
    return cos_sin_grid(angles, layout, device)


def _nd_positions(positions: Tensor, specs: tuple, layout: str) -> tuple[Tensor, Tensor]:
    def tables(axis: int, values: Tensor) -> tuple[Tensor, Tensor]:
        angles = _axis_angles(specs[axis], values)
        return spread(angles.cos().float(), layout), spread(angles.sin().float(), layout)

    return gather_columns(positions.unbind(-1), tables)


# --- upstream's names -----------------------------------------------------------------------------------------------


def get_1d_rotary_pos_embed(
    dim: int,
    pos: Tensor | int,
    theta: float = 10000.0,
    theta_rescale_factor: float = 1.0,
    interpolation_factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of one axis, ``[S, dim/2]`` each, of ``dtype``; sglang's function of that name.

    Args:
        dim: columns of the head that this axis rotates; even.
        pos: positions ``[S]``, or a number S for positions 0..S-1.
        theta_rescale_factor: NTK factor; raises theta to ``theta * factor ** (dim / (dim - 2))``.
        interpolation_factor: positions are multiplied by it.
        dtype: the precision of the computation and of the result.
        device: where the result lies; by default where ``pos`` does, or on the default device.

    Raises:
        ValueError: naming the argument that is out of range.
    """
    spec = _spec(dim, theta, theta_rescale_factor, interpolation_factor, dtype)
    if isinstance(pos, int):
        _positive("pos", pos)
        device = torch.device(device) if device is not None else torch.get_default_device()
        pos = torch.arange(pos, dtype=dtype, device=table_device(device))
    else:
        device = torch.device(device) if device is not None else pos.device

    def build() -> tuple[Tensor, Tensor]:
        angles = _axis_angles(spec, pos.to(table_device(device)) if pos.device.type != "meta" else pos)
        return angles.cos().to(device), angles.sin().to(device)

    return cleanly(build)


class OneDRotaryEmbedding(nn.Module):
    """cos and sin of one axis, float32 ``[S, dim/2]``, or ``[S, dim]`` with ``use_real`` and ``repeat_interleave_real``.

    Arguments as of :func:`get_1d_rotary_pos_embed`; ``dtype`` is the precision of the computation, not of the result.
    The module holds no state but these numbers: its tables live in a guarded cache shared by the process, and each
    call gets tensors of its own (see `grid_cache.py`).
    """

    def __init__(
        self,
        dim: int,
        theta: float = 10000.0,
        theta_rescale_factor: float = 1.0,
        interpolation_factor: float = 1.0,
        dtype: torch.dtype = torch.float32,
        use_real: bool = False,
        repeat_interleave_real: bool = False,
    ):
        super().__init__()
        self.dim = dim
        self.theta = theta
        self.theta_rescale_factor = theta_rescale_factor
        self.interpolation_factor = interpolation_factor
        self.dtype = dtype
        self.use_real = use_real
        self.repeat_interleave_real = repeat_interleave_real
        self._specs = (_spec(dim, theta, theta_rescale_factor, interpolation_factor, dtype),)
        self._layout = PAIRS if use_real and repeat_interleave_real else HALVES

    def forward(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at positions ``pos`` ``[S]``, on their device."""
        return GRIDS.at_positions(_nd_positions, pos.unsqueeze(-1), self._specs, self._layout)

    def forward_from_grid(self, seq_len: int, start_pos: int, device_str: str | torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin at positions ``start_pos .. start_pos + seq_len - 1``."""
        return GRIDS.grid(
            _nd_grid, self._specs, (seq_len, 0, start_pos, 0, 1), self._layout, device=resolve(device_str)
        )


class NDRotaryEmbedding(nn.Module):
    """cos and sin of tokens with several positions each, float32 ``[tokens, sum(rope_dim_list)/2]`` (twice as wide with
    ``use_real`` and ``repeat_interleave_real``: each column side by side with its copy).

    Args:
        rope_dim_list: columns of the head that each axis rotates; even.
        rope_theta: base of the frequencies, the same for all axes.
        theta_rescale_factor, interpolation_factor: see :func:`get_1d_rotary_pos_embed`; one number, or one for each axis.
        dtype: the precision of the computation, not of the result.

    The module holds no state but these numbers; see :class:`OneDRotaryEmbedding`.
    """

    def __init__(
        self,
        rope_dim_list: Sequence[int],
        rope_theta: float,
        theta_rescale_factor: float | Sequence[float] = 1.0,
        interpolation_factor: float | Sequence[float] = 1.0,
        use_real: bool = False,
        repeat_interleave_real: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.rope_dim_list = list(rope_dim_list)
        self.ndim = len(self.rope_dim_list)
        _positive("len(rope_dim_list)", self.ndim)
        self.rope_theta = rope_theta
        self.theta_rescale_factor = _per_axis("theta_rescale_factor", theta_rescale_factor, self.ndim)
        self.interpolation_factor = _per_axis("interpolation_factor", interpolation_factor, self.ndim)
        self.dtype = dtype
        self._specs = tuple(
            _spec(dim, rope_theta, rescale, interpolation, dtype)
            for dim, rescale, interpolation in zip(
                self.rope_dim_list, self.theta_rescale_factor, self.interpolation_factor
            )
        )
        self._layout = PAIRS if use_real and repeat_interleave_real else HALVES

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at ``positions`` ``[tokens, ndim]``, on their device; known again by content on the CPU."""
        return GRIDS.at_positions(_nd_positions, self._checked(positions), self._specs, self._layout)

    def forward_uncached(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`forward`, computed anew."""
        return cleanly(_nd_positions, self._checked(pos), self._specs, self._layout)

    def _checked(self, positions: Tensor) -> Tensor:
        if positions.ndim != 2 or positions.shape[1] != self.ndim:
            raise ValueError(f"positions must be [tokens, {self.ndim}], got {tuple(positions.shape)}")
        return positions

    def forward_from_grid(
        self,
        grid_size: int | Sequence[int],
        shard_dim: int = 0,
        start_frame: int = 0,
        device: torch.device | str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of a grid's tokens in row-major order, on ``device`` (CPU by default).

        Args:
            grid_size: positions on each axis, or one number for all.
            shard_dim: the axis that is cut over the sequence-parallel group, if one is set (see `sharding.py`); uneven
                sizes are cut as `torch.tensor_split` does.
            start_frame: first position on axis 0.
        """
        size = grid_size if isinstance(grid_size, (int, tuple)) else tuple(grid_size)
        span = (size, shard_dim, start_frame, *rank_and_size())
        return GRIDS.grid(_nd_grid, self._specs, span, self._layout, device=resolve(device))


def resolve(device: torch.device | str | None) -> torch.device:
    """``device`` with the index that "cuda" leaves out; CPU for None."""
    if device is None or device == "cpu":
        return _CPU
    device = torch.device(device)
    if device.index is None and device.type not in ("cpu", "meta"):
        device = torch.device(device.type, getattr(torch, device.type).current_device())
    return device


def _spec(dim: int, theta: float, rescale: float, interpolation: float, dtype: torch.dtype) -> tuple:
    """The numbers that determine an axis' angles, checked."""
    if not isinstance(dim, int) or dim <= 0 or dim % 2:
        raise ValueError(f"dim must be a positive even number, got {dim!r}")
    _positive("theta", theta)
    _positive("theta_rescale_factor", rescale)
    _positive("interpolation_factor", interpolation)
    if rescale != 1.0 and dim == 2:
        raise ValueError(
            "theta_rescale_factor must be 1 for an axis of 2 columns, whose frequency does not depend on theta"
        )
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    return dim, theta, rescale, interpolation, dtype


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


def _per_axis(name: str, value: float | Sequence[float], ndim: int) -> list[float]:
    values = [value] if isinstance(value, (int, float)) else list(value)
    values = values * ndim if len(values) == 1 else values
    if len(values) != ndim:
        raise ValueError(f"{name} must be one number or {ndim}, got {value!r}")
    return values
