"""The table functions of `diffusers.models.embeddings`, by their names, arguments and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..grid_cache import GRIDS, cleanly, empty_result, table_device
from ..nd import PAIRS, cos_sin_grid, frequencies, gather_columns, resolve, spread
from .tables import angles, filled, unit_complex


def get_1d_rotary_pos_embed(
    dim: int,
    pos: Any,
    theta: float = 10000.0,
    use_real: bool = False,
    linear_factor: float = 1.0,
    ntk_factor: float = 1.0,
    repeat_interleave_real: bool = True,
    freqs_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """One axis' table at ``pos``: a tensor or NumPy array ``[S]``, or a number S for positions 0..S-1.

    Returns:
        complex ``[S, dim/2]`` (complex64 for float32 frequencies, complex128 for float64); with ``use_real`` cos and sin,
        float32 ``[S, dim]``, each column twice: side by side (``repeat_interleave_real``), or all and then all again.

    Raises:
        ValueError: if ``dim`` is odd.
    """
    _multiple("dim", dim, 2)
    if isinstance(pos, int):
        pos = torch.arange(pos, device=torch.get_default_device())
    elif not isinstance(pos, Tensor):
        pos = torch.from_numpy(pos)

    def build() -> Any:
        inverse = frequencies(dim, theta * ntk_factor, freqs_dtype, pos.device) / linear_factor
        table = torch.outer(pos, inverse)
        if not use_real:
            return unit_complex(table)
        cos, sin = table.cos(), table.sin()
        if repeat_interleave_real:
            return spread(cos, PAIRS).float(), spread(sin, PAIRS).float()
        return torch.cat((cos, cos), dim=-1).float(), torch.cat((sin, sin), dim=-1).float()

    return cleanly(build)


def get_2d_rotary_pos_embed(
    embed_dim: int,
    crops_coords: Sequence[Sequence[float]],
    grid_size: Sequence[int],
    use_real: bool = True,
    device: torch.device | str | None = None,
    output_type: str = "pt",
) -> Tensor | tuple[Tensor, Tensor]:
    """HunyuanDiT's table of an image cropped from a larger one, tokens in row-major order; the width owns the first half
    of the columns.

    Args:
        crops_coords: (top, left) and (bottom, right) of the crop.
        grid_size: tokens down and across.

    Returns:
        cos and sin, float32 ``[tokens, embed_dim]``, or complex64 ``[tokens, embed_dim/2]`` without ``use_real``.
    """
    _multiple("embed_dim", embed_dim, 4)
    if output_type != "pt":
        raise ValueError(f'output_type must be "pt", got {output_type!r}')
    args = (embed_dim, *map(tuple, crops_coords), tuple(grid_size), use_real)
    result = GRIDS.grid(_cropped_image, *args, device=_device(device))
    return result if use_real else result[0]


def _cropped_image(
    embed_dim: int, start: tuple, stop: tuple, size: tuple, use_real: bool, device: torch.device
) -> tuple[Tensor, ...]:
    home = table_device(device)
    down, across = (
        angles(_crop(start[i], stop[i], size[i], home), embed_dim // 2, 10000.0, torch.float32) for i in range(2)
    )
    if not use_real:
        return (filled(size, [(1, unit_complex(across)), (0, unit_complex(down))], device).flatten(0, 1),)
    return tuple(
        filled(size, [(1, spread(f(across), PAIRS)), (0, spread(f(down), PAIRS))], device).flatten(0, 1)
        for f in (torch.cos, torch.sin)
    )


def _crop(start: float, stop: float, size: int, device: torch.device) -> Tensor:
    """``size`` positions from ``start`` to ``stop``, the end left out."""
    return torch.linspace(start, stop * (size - 1) / size, size, dtype=torch.float32, device=device)


def get_2d_rotary_pos_embed_from_grid(
    embed_dim: int, grid: Any, use_real: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The table of tokens at ``grid`` ``[2, ...]``: the positions of the first and of the second half of the columns."""
    _multiple("embed_dim", embed_dim, 4)
    positions = [torch.as_tensor(axis).reshape(-1) for axis in grid]

    def tables(axis: int, values: Tensor) -> tuple[Tensor, ...]:
        table = angles(values, embed_dim // 2, 10000.0, torch.float32)
        return (spread(table.cos(), PAIRS), spread(table.sin(), PAIRS)) if use_real else (unit_complex(table),)

    result = cleanly(gather_columns, positions, tables)
    return result if use_real else result[0]


def get_2d_rotary_pos_embed_lumina(
    embed_dim: int, len_h: int, len_w: int, linear_factor: float = 1.0, ntk_factor: float = 1.0
) -> Tensor:
    """Lumina-Next's table, complex64 ``[len_h, len_w, embed_dim/2]``: columns of height and width take turns."""
    _multiple("embed_dim", embed_dim, 4)
    device = _device(None)
    return GRIDS.grid(_lumina_image, embed_dim, len_h, len_w, linear_factor, ntk_factor, device=device)[0]


def _lumina_image(
    embed_dim: int, len_h: int, len_w: int, linear_factor: float, ntk_factor: float, device: torch.device
) -> tuple[Tensor]:
    home = table_device(device)
    inverse = frequencies(embed_dim // 2, 10000.0 * ntk_factor, torch.float32, home) / linear_factor
    down, across = (unit_complex(torch.outer(torch.arange(n, device=home), inverse)) for n in (len_h, len_w))
    out = empty_result((len_h, len_w, embed_dim // 4, 2), torch.complex64, device)
    out[..., 0].copy_(down.to(device).unsqueeze(1))
    out[..., 1].copy_(across.to(device))
    return (out.flatten(2),)


def get_3d_rotary_pos_embed(
    embed_dim: int,
    crops_coords: Sequence[Sequence[float]] | None,
    grid_size: Sequence[int],
    temporal_size: int,
    theta: float = 10000,
    use_real: bool = True,
    grid_type: str = "linspace",
    max_size: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """CogVideoX's table of a video: cos and sin, float32 ``[frames * height * width, embed_dim]``; a quarter of the
    columns is the time's, three eighths are the height's, three eighths the width's.

    Args:
        crops_coords: (top, left) and (bottom, right) of the crop, for ``grid_type`` "linspace".
        grid_size: tokens down and across.
        grid_type: "linspace": positions spread over the crop; "slice": the first positions of ``max_size``.
    """
    if use_real is not True:
        raise ValueError("use_real must be True: CogVideoX has no complex table")
    if grid_type not in ("linspace", "slice"):
        raise ValueError(f'grid_type must be "linspace" or "slice", got {grid_type!r}')
    if grid_type == "slice" and any(n > limit for n, limit in zip(grid_size, max_size)):
        raise ValueError(f"grid_size {tuple(grid_size)} does not fit into max_size {tuple(max_size)}")
    crop = None if grid_type == "slice" else tuple(map(tuple, crops_coords))
    return GRIDS.grid(_video, embed_dim, crop, tuple(grid_size), temporal_size, theta, device=_device(device))


def _video(
    embed_dim: int, crop: tuple | None, size: tuple, frames: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    home = table_device(device)
    if crop is None:
        positions = [torch.arange(n, dtype=torch.float32, device=home) for n in (frames, *size)]
    else:
        (top, left), (bottom, right) = crop
        bounds = ((0, frames, frames), (top, bottom, size[0]), (left, right, size[1]))
        positions = [_crop(*bound, home) for bound in bounds]
    dims = (embed_dim // 4, embed_dim // 8 * 3, embed_dim // 8 * 3)
    return cos_sin_grid([angles(p, dim, theta) for p, dim in zip(positions, dims)], PAIRS, device)


def get_3d_rotary_pos_embed_allegro(
    embed_dim: int,
    crops_coords: Sequence[Sequence[float]],
    grid_size: Sequence[int],
    temporal_size: int,
    interpolation_scale: Sequence[float] = (1.0, 1.0, 1.0),
    theta: float = 10000,
    device: torch.device | str | None = None,
) -> tuple[Any, ...]:
    """Allegro's tables, one for each axis (tokens look their rows up): (cos, sin) of time, height and width, float32
    ``[positions, embed_dim/3]`` with all columns and then all again, and the three axes' positions, float32."""
    start, stop = crops_coords
    device = _device(device)
    bounds = ((0, temporal_size, temporal_size), *zip(start, stop, grid_size))
    positions = [cleanly(lambda bound=bound: _crop(*bound, table_device(device)).to(device)) for bound in bounds]
    tables = [
        get_1d_rotary_pos_embed(embed_dim // 3, axis / scale, theta=theta, use_real=True, repeat_interleave_real=False)
        for axis, scale in zip(positions, interpolation_scale)
    ]
    return (*tables, *positions)


def _device(device: torch.device | str | None) -> torch.device:
    return resolve(torch.get_default_device() if device is None else device)


def _multiple(name: str, value: int, of: int) -> None:
    if not isinstance(value, int) or value <= 0 or value % of:
        raise ValueError(f"{name} must be a positive multiple of {of}, got {value!r}")
