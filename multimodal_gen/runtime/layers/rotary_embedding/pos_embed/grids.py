"""Embeddings of image and video grids: the shape of the latents says where the tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from common.rope_grid import Columns

from ..grid_cache import AXES, GRIDS, cleanly, empty_result, table_device
from ..nd import PAIRS, TILED, cos_sin_grid, frequencies, grid_tables, resolve, spread
from .functions import get_3d_rotary_pos_embed
from .tables import Positions, angles, filled, from_cache, hashable, place, unit_complex


def _thirds(head_dim: int) -> tuple[int, int, int]:
    """Wan's split of a head over time, height and width."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


# --- Wan and its kin ------------------------------------------------------------------------------------------------


def _wan(
    positions: tuple, dims: tuple, cuts: tuple, theta: float, layout: str, device: torch.device
) -> tuple[Tensor, ...]:
    """cos and sin ``[1, tokens, 1, sum(cuts)]``, or (``layout`` "complex64" or "complex128") ``[1, 1, tokens, sum(cuts)]``.

    ``cuts`` are the widths that each axis fills. Where they are not those of ``dims``, a model cuts its joint table
    elsewhere than it was put together: an axis takes some columns from its neighbour's table, at its own positions.
    """
    home = table_device(device)
    aligned = tuple(cuts) == (dims if layout == PAIRS else tuple(dim // 2 for dim in dims))
    axes = []
    start = 0
    for axis, cut in enumerate(cuts):
        own, first = (dims[axis : axis + 1], 0) if aligned else (dims, start)
        axes.append(AXES.grid(_wan_axis, positions[axis], own, (first, first + cut), theta, layout, device=home))
        start += cut
    tables = [[Columns(axis, values) for axis, values in enumerate(columns)] for columns in zip(*axes)]
    shape = [n if isinstance(n, int) else len(n) for n in positions]
    return tuple(t[None, :, None] if layout == PAIRS else t[None, None] for t in grid_tables(shape, tables, device))


def _wan_axis(
    positions: Positions, dims: tuple, cut: tuple[int, int], theta: float, layout: str, device: torch.device
) -> tuple[Tensor, ...]:
    """One axis' columns of cos and sin, or of complex numbers: those from ``cut`` on of the table of ``dims``."""
    at = place(positions, torch.int64, device)
    dtype = torch.float32 if layout == "complex64" else torch.float64
    table = torch.cat([angles(at, dim, theta, dtype) for dim in dims], dim=1)
    both = (
        [spread(f(table).float(), PAIRS) for f in (torch.cos, torch.sin)] if layout == PAIRS else [unit_complex(table)]
    )
    return tuple(part[:, cut[0] : cut[1]].contiguous() for part in both)


class WanRotaryPosEmbed(nn.Module):
    """Wan's and Sana-Video's: cos and sin, float32 ``[1, tokens, 1, head_dim]``, of latents ``[B, C, frames, height,
    width]`` cut into patches; columns side by side in pairs, frequencies in float64."""

    def __init__(
        self, attention_head_dim: int, patch_size: tuple[int, int, int], max_seq_len: int, theta: float = 10000.0
    ):
        super().__init__()
        self.attention_head_dim = attention_head_dim
        self.patch_size = patch_size
        self.max_seq_len = max_seq_len
        self.theta = theta
        self.t_dim, self.h_dim, self.w_dim = _thirds(attention_head_dim)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        _, _, frames, height, width = hidden_states.shape
        p_t, p_h, p_w = self.patch_size
        sizes = (frames // p_t, height // p_h, width // p_w)
        dims = (self.t_dim, self.h_dim, self.w_dim)
        return GRIDS.grid(_wan, sizes, dims, dims, self.theta, PAIRS, device=hidden_states.device)


class SkyReelsV2RotaryPosEmbed(WanRotaryPosEmbed):
    """SkyReels-V2's; the same as Wan's."""


class ChronoEditRotaryPosEmbed(nn.Module):
    """ChronoEdit's: Wan's, but two frames stand ``temporal_skip_len`` - 1 apart."""

    def __init__(
        self,
        attention_head_dim: int,
        patch_size: tuple[int, int, int],
        max_seq_len: int,
        theta: float = 10000.0,
        temporal_skip_len: int = 8,
    ):
        super().__init__()
        self.attention_head_dim = attention_head_dim
        self.patch_size = patch_size
        self.max_seq_len = max_seq_len
        self.theta = theta
        self.temporal_skip_len = temporal_skip_len

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        _, _, frames, height, width = hidden_states.shape
        p_t, p_h, p_w = self.patch_size
        times = (0, self.temporal_skip_len - 1) if frames == 2 else frames // p_t
        third = self.attention_head_dim // 3
        cuts = (self.attention_head_dim - 2 * third, third, third)
        positions = (times, height // p_h, width // p_w)
        dims = _thirds(self.attention_head_dim)
        return GRIDS.grid(_wan, positions, dims, cuts, self.theta, PAIRS, device=hidden_states.device)


class SanaWMRotaryPosEmbed(nn.Module):
    """Sana-WM's: complex64 ``[1, 1, tokens, head_dim/2]`` of a grid (frames, height, width)."""

    def __init__(
        self,
        attention_head_dim: int,
        patch_size: tuple[int, int, int],
        max_seq_len: int,
        theta: float = 10000.0,
        fhw_dim: tuple[int, int, int] | None = None,
    ):
        super().__init__()
        if fhw_dim is not None and sum(fhw_dim) != attention_head_dim:
            raise ValueError(f"fhw_dim must add up to attention_head_dim {attention_head_dim}, got {fhw_dim}")
        self.attention_head_dim = attention_head_dim
        self.patch_size = patch_size
        self.max_seq_len = max_seq_len
        self.theta = theta
        self.fhw_dim = fhw_dim

    def forward(self, fhw: tuple[int, int, int], device: torch.device | None = None) -> Tensor:
        dims = _thirds(self.attention_head_dim)
        cuts = tuple(dim // 2 for dim in dims)
        owned = dims if self.fhw_dim is None else tuple(self.fhw_dim)
        return GRIDS.grid(_wan, tuple(fhw), owned, cuts, self.theta, "complex64", device=resolve(device))[0]


class AnyFlowRotaryPosEmbed(nn.Module):
    """AnyFlow's: Wan's table as complex128 ``[1, 1, tokens, head_dim/2]``, under the keys "query" and "key"."""

    def __init__(
        self, attention_head_dim: int, patch_size: tuple[int, int, int], max_seq_len: int, theta: float = 10000.0
    ):
        super().__init__()
        self.attention_head_dim = attention_head_dim
        self.patch_size = patch_size
        self.max_seq_len = max_seq_len
        self.theta = theta

    def forward(self, layout_cfg: dict, device: torch.device) -> dict[str, Tensor]:
        sizes = (layout_cfg["total_frames"], *layout_cfg["full_frame_shape"])
        dims = _thirds(self.attention_head_dim)
        cuts = tuple(dim // 2 for dim in dims)
        table = GRIDS.grid(_wan, sizes, dims, cuts, self.theta, "complex128", device=resolve(device))[0]
        return {"query": table, "key": table}


class AnyFlowCausalRotaryPosEmbed(nn.Module):
    """AnyFlow's causal one: the first frames on a coarser grid, whose rotations are the means of those they cover, then
    the others on the full grid (twice if there are clean latents too)."""

    def __init__(
        self,
        attention_head_dim: int,
        patch_size: tuple[int, int, int],
        compressed_patch_size: tuple[int, int, int],
        max_seq_len: int,
        theta: float = 10000.0,
    ):
        super().__init__()
        self.attention_head_dim = attention_head_dim
        self.patch_size = patch_size
        self.compressed_patch_size = compressed_patch_size
        self.max_seq_len = max_seq_len
        self.theta = theta

    def forward(
        self, far_cfg: dict, device: torch.device, clean_hidden_states: Tensor | None = None
    ) -> dict[str, Tensor]:
        scales = tuple(c // p for c, p in zip(self.compressed_patch_size, self.patch_size))
        frames = (far_cfg["num_compressed_frames"], far_cfg["total_frames"])
        shapes = (tuple(far_cfg["compressed_frame_shape"]), tuple(far_cfg["full_frame_shape"]))
        copies = 1 if clean_hidden_states is None else 2
        args = (frames, shapes, scales, copies, self.attention_head_dim, self.theta)
        table = GRIDS.grid(_coarse_then_full, *args, device=resolve(device))[0]
        return {"query": table, "key": table}


def _coarse_then_full(
    frames: tuple, shapes: tuple, scales: tuple, copies: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor]:
    home = table_device(device)
    coarse_frames, total = frames
    coarse_frames = min(coarse_frames, total)
    dims = _thirds(head_dim)
    full = [coarse_frames, *shapes[1]]  # frames before the full grid's, then its height and width
    sizes = [(coarse_frames, *shapes[0]), (total - coarse_frames, *shapes[1])]
    tokens = [n * h * w for n, h, w in sizes]
    out = empty_result((tokens[0] + copies * tokens[1], head_dim // 2), torch.complex128, device)
    if tokens[0]:
        columns = []
        for axis, (n, scale, dim) in enumerate(zip(sizes[0], scales, dims)):
            fine = unit_complex(angles(torch.arange(n * scale, device=home), dim, theta, torch.float64))
            columns.append((axis, _mean_rotation(fine, scale)))
        filled(sizes[0], columns, device, out[: tokens[0]].unflatten(0, sizes[0]))
    if tokens[1]:
        times = torch.arange(full[0], total, device=home)
        positions = (times, *(torch.arange(n, device=home) for n in shapes[1]))
        columns = [
            (axis, unit_complex(angles(at, dim, theta, torch.float64)))
            for axis, (at, dim) in enumerate(zip(positions, dims))
        ]
        filled(sizes[1], columns, device, out[tokens[0] : tokens[0] + tokens[1]].unflatten(0, sizes[1]))
        if copies == 2:
            out[tokens[0] + tokens[1] :].copy_(out[tokens[0] : tokens[0] + tokens[1]])
    return (out[None, None],)


def _mean_rotation(table: Tensor, scale: int) -> Tensor:
    """The mean of each ``scale`` rows of unit complex numbers, brought back to length one."""
    real, imag = (
        nn.functional.avg_pool1d(part.T.unsqueeze(0), scale, scale).squeeze(0).T for part in (table.real, table.imag)
    )
    length = torch.sqrt(real**2 + imag**2)
    return torch.complex(real / length, imag / length)


# --- HunyuanVideo and its kin ---------------------------------------------------------------------------------------


def _hunyuan(
    positions: tuple, dims: tuple, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    home = table_device(device)
    axes = [
        from_cache(_hunyuan_axis, at, dim, theta, dtype, device=home, cache=AXES) for at, dim in zip(positions, dims)
    ]
    tables = [[Columns(axis, values) for axis, values in enumerate(columns)] for columns in zip(*axes)]
    cos, sin = grid_tables([len(cos) for cos, _ in axes], tables, device)
    return cos, sin


def _hunyuan_axis(
    positions: Positions, dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    table = angles(place(positions, torch.float32, device), dim, theta, dtype)
    return spread(table.cos(), PAIRS).float(), spread(table.sin(), PAIRS).float()


class HunyuanVideoRotaryPosEmbed(nn.Module):
    """HunyuanVideo's: cos and sin, float32 ``[tokens, sum(rope_dim)]``, of latents ``[B, C, frames, height, width]``."""

    frequency_dtype = torch.float32

    def __init__(self, patch_size: int, patch_size_t: int, rope_dim: Sequence[int], theta: float = 256.0) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.patch_size_t = patch_size_t
        self.rope_dim = rope_dim
        self.theta = theta

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        _, _, frames, height, width = hidden_states.shape
        sizes = (frames // self.patch_size_t, height // self.patch_size, width // self.patch_size)
        args = (sizes, tuple(self.rope_dim), self.theta, self.frequency_dtype)
        return GRIDS.grid(_hunyuan, *args, device=hidden_states.device)


class HunyuanVideo15RotaryPosEmbed(HunyuanVideoRotaryPosEmbed):
    """HunyuanVideo-1.5's; the same as HunyuanVideo's."""


class MotifVideoRotaryPosEmbed(HunyuanVideoRotaryPosEmbed):
    """Motif-Video's: HunyuanVideo's with frequencies in float64."""

    frequency_dtype = torch.float64


class HunyuanVideoFramepackRotaryPosEmbed(nn.Module):
    """HunyuanVideo-FramePack's: HunyuanVideo's with frames at given positions; ``height`` and ``width`` in latents."""

    def __init__(self, patch_size: int, patch_size_t: int, rope_dim: Sequence[int], theta: float = 256.0) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.patch_size_t = patch_size_t
        self.rope_dim = rope_dim
        self.theta = theta

    def forward(self, frame_indices: Tensor, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        positions = (hashable(frame_indices), height // self.patch_size, width // self.patch_size)
        return from_cache(_hunyuan, positions, tuple(self.rope_dim), self.theta, torch.float32, device=resolve(device))


class HunyuanImageRotaryPosEmbed(nn.Module):
    """HunyuanImage's: HunyuanVideo's for images ``[B, C, height, width]`` or videos, with a patch size for each axis."""

    def __init__(self, patch_size: Sequence[int], rope_dim: Sequence[int], theta: float = 256.0) -> None:
        super().__init__()
        for name, value in (("patch_size", patch_size), ("rope_dim", rope_dim)):
            if not isinstance(value, (tuple, list)) or len(value) not in (2, 3):
                raise ValueError(f"{name} must be a tuple or list of 2 or 3 numbers, got {value!r}")
        if len(patch_size) != len(rope_dim):
            raise ValueError(f"patch_size and rope_dim must be of equal length, got {patch_size} and {rope_dim}")
        self.patch_size = patch_size
        self.rope_dim = rope_dim
        self.theta = theta

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if hidden_states.ndim != len(self.patch_size) + 2:
            raise ValueError(
                f"hidden_states must have {len(self.patch_size) + 2} dimensions, got {tuple(hidden_states.shape)}"
            )
        sizes = tuple(n // patch for n, patch in zip(hidden_states.shape[2:], self.patch_size))
        args = (sizes, tuple(self.rope_dim), self.theta, torch.float32)
        return GRIDS.grid(_hunyuan, *args, device=hidden_states.device)


# --- halves: CogView4, GLM-Image, Cosmos ----------------------------------------------------------------------------


def _cogview(positions: tuple, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    home = table_device(device)
    tables = [angles(place(at, torch.int64, home), dim // 2, theta) for at in positions]
    return cos_sin_grid(tables, TILED, device)


class CogView4RotaryPosEmbed(nn.Module):
    """CogView4's: cos and sin, float32 ``[tokens, dim]``, columns of height and width and then both again; an image of any
    size is stretched over the positions ``rope_axes_dim``."""

    def __init__(self, dim: int, patch_size: int, rope_axes_dim: tuple[int, int], theta: float = 10000.0) -> None:
        super().__init__()
        self.dim = dim
        self.patch_size = patch_size
        self.rope_axes_dim = rope_axes_dim
        self.theta = theta

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        sizes = (n // self.patch_size for n in hidden_states.shape[2:])
        positions = tuple(
            tuple(i * reach // size for i in range(size)) for size, reach in zip(sizes, self.rope_axes_dim)
        )
        return GRIDS.grid(_cogview, positions, self.dim, self.theta, device=hidden_states.device)


class GlmImageRotaryPosEmbed(nn.Module):
    """GLM-Image's: CogView4's without the stretching."""

    def __init__(self, dim: int, patch_size: int, theta: float = 10000.0) -> None:
        super().__init__()
        self.dim = dim
        self.patch_size = patch_size
        self.theta = theta

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        sizes = tuple(n // self.patch_size for n in hidden_states.shape[2:])
        return GRIDS.grid(_cogview, sizes, self.dim, self.theta, device=hidden_states.device)


class CosmosRotaryPosEmbed(nn.Module):
    """Cosmos': cos and sin, float32 ``[tokens, hidden_size]``, columns of time, height and width and then all again; each
    axis has its own theta, raised by its scale (NTK), and time is counted in frames at ``base_fps``."""

    def __init__(
        self,
        hidden_size: int,
        max_size: tuple[int, int, int] = (128, 240, 240),
        patch_size: tuple[int, int, int] = (1, 2, 2),
        base_fps: int = 24,
        rope_scale: tuple[float, float, float] = (2.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        self.max_size = [size // patch for size, patch in zip(max_size, patch_size)]
        self.patch_size = patch_size
        self.base_fps = base_fps
        self.dim_h = self.dim_w = hidden_size // 6 * 2
        self.dim_t = hidden_size - self.dim_h - self.dim_w
        dims = (self.dim_t, self.dim_h, self.dim_w)
        factors = [scale ** (dim / (dim - 2)) for scale, dim in zip(rope_scale, dims)]
        self.t_ntk_factor, self.h_ntk_factor, self.w_ntk_factor = factors

    def forward(self, hidden_states: Tensor, fps: float | None = None) -> tuple[Tensor, Tensor]:
        sizes = tuple(n // patch for n, patch in zip(hidden_states.shape[2:], self.patch_size))
        rate = None if fps is None else (float(fps), self.base_fps)
        dims = (self.dim_t, self.dim_h, self.dim_w)
        factors = (self.t_ntk_factor, self.h_ntk_factor, self.w_ntk_factor)
        return GRIDS.grid(_cosmos, sizes, dims, factors, rate, device=hidden_states.device)


def _cosmos(
    sizes: tuple, dims: tuple, factors: tuple, rate: tuple | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    home = table_device(device)
    positions = [place(size, torch.float32, home) for size in sizes]
    if rate is not None:
        positions[0] = positions[0] / rate[0] * rate[1]
    tables = [angles(at, dim, 10000.0 * factor) for at, dim, factor in zip(positions, dims, factors)]
    return cos_sin_grid(tables, TILED, device)


# --- others ---------------------------------------------------------------------------------------------------------


class EasyAnimateRotaryPosEmbed(nn.Module):
    """EasyAnimate's: CogVideoX's table of the video fitted into a frame of 90 x 60 latents."""

    def __init__(self, patch_size: int, rope_dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.rope_dim = rope_dim

    def get_resize_crop_region_for_grid(
        self, src: tuple[int, int], tgt_width: int, tgt_height: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """(top, left) and (bottom, right) of ``src`` (height, width) scaled to fit the target and centred in it."""
        height, width = src
        if height / width > tgt_height / tgt_width:
            size = (tgt_height, round(tgt_height / height * width))
        else:
            size = (round(tgt_width / width * height), tgt_width)
        top, left = (round((room - n) / 2.0) for room, n in zip((tgt_height, tgt_width), size))
        return (top, left), (top + size[0], left + size[1])

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        _, _, frames, height, width = hidden_states.shape
        size = (height // self.patch_size, width // self.patch_size)
        crop = self.get_resize_crop_region_for_grid(size, 90 // self.patch_size, 60 // self.patch_size)
        return get_3d_rotary_pos_embed(self.rope_dim, crop, size, frames, device=hidden_states.device)


class HeliosRotaryPosEmbed(nn.Module):
    """Helios': cos and sin in one tensor, float32 ``[B, 2 * sum(rope_dim), frames, height, width]``, for frames at given
    positions ``[B, frames]``; columns side by side in pairs."""

    def __init__(self, rope_dim: tuple[int, int, int], theta: float):
        super().__init__()
        self.DT, self.DY, self.DX = rope_dim
        self.theta = theta

    def forward(self, frame_indices: Tensor, height: int, width: int, device: torch.device) -> Tensor:
        shape = (*frame_indices.shape, height, width)
        args = (hashable(frame_indices.flatten()), shape, (self.DT, self.DY, self.DX), self.theta)
        return from_cache(_helios, *args, device=resolve(device))[0]


def _helios(positions: Positions, shape: tuple, dims: tuple, theta: float, device: torch.device) -> tuple[Tensor]:
    home = table_device(device)
    batch, frames, height, width = shape
    views = ((batch, frames, 1, 1), (1, 1, height, 1), (1, 1, 1, width))
    tables = [
        torch.outer(frequencies(dim, theta, torch.float32, home), place(at, torch.float32, home))
        for at, dim in zip((positions, height, width), dims)
    ]
    out = empty_result((2 * sum(dims), *shape), torch.float32, device)
    row = 0
    for function in (torch.cos, torch.sin):
        for table, dim, view in zip(tables, dims, views):
            values = function(table).repeat_interleave(2, dim=0).to(device)
            out[row : row + dim].copy_(values.view(dim, *view))
            row += dim
    return (out.permute(1, 0, 2, 3, 4),)


class MochiRoPE(nn.Module):
    """Mochi's: cos and sin, ``[tokens, heads, pairs]``, of learned frequencies ``[3, heads, pairs]``; the area of the image
    is scaled to ``base_height * base_width``. Computed in float32, also under autocast; gradients reach the frequencies,
    so nothing is cached."""

    def __init__(self, base_height: int = 192, base_width: int = 192) -> None:
        super().__init__()
        self.target_area = base_height * base_width

    def forward(
        self,
        pos_frequencies: Tensor,
        num_frames: int,
        height: int,
        width: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        device, dtype = resolve(device), dtype or torch.float32
        scale = (self.target_area / (height * width)) ** 0.5

        def positions() -> Tensor:
            time = torch.arange(num_frames, device=device, dtype=dtype)
            sides = []
            for size in (height, width):
                edges = torch.linspace(-size * scale / 2, size * scale / 2, size + 1, device=device, dtype=dtype)
                sides.append((edges[:-1] + edges[1:]) / 2)
            return torch.stack(torch.meshgrid(time, *sides, indexing="ij"), dim=-1).flatten(0, 2).float()

        at = cleanly(positions)
        with torch.autocast(pos_frequencies.device.type, enabled=False):
            table = torch.einsum("nd,dhf->nhf", at, pos_frequencies.float())
            return table.cos(), table.sin()
