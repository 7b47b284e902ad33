"""Embeddings of tokens whose positions are given, token by token, one position for each axis.

On the CPU a table is known again by the content of the positions; elsewhere it is computed anew, without waiting for
the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..grid_cache import GRIDS
from ..nd import PAIRS, frequencies, gather_columns, spread
from .tables import angles, double_for, rotation_matrices, tiled_cos_sin, unit_complex

# --- FLUX and its kin -----------------------------------------------------------------------------------------------


def _flux(ids: Tensor, dims: tuple, theta: float) -> tuple[Tensor, Tensor]:
    dtype = double_for(ids.device)

    def tables(axis: int, values: Tensor) -> tuple[Tensor, Tensor]:
        table = angles(values, dims[axis], theta, dtype)
        return spread(table.cos(), PAIRS).float(), spread(table.sin(), PAIRS).float()

    return gather_columns(ids.float().unbind(-1), tables)


class FluxPosEmbed(nn.Module):
    """FLUX's: cos and sin, float32 ``[S, sum(axes_dim)]``, of tokens at ``ids`` ``[S, axes]``; columns side by side in
    pairs, frequencies in float64."""

    def __init__(self, theta: float, axes_dim: Sequence[int]):
        super().__init__()
        self.theta = theta
        self.axes_dim = axes_dim

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return GRIDS.at_positions(_flux, ids, tuple(self.axes_dim), self.theta)


class Flux2PosEmbed(FluxPosEmbed):
    """FLUX.2's: FLUX's, for as many axes as ``axes_dim`` has."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        dims = tuple(self.axes_dim)
        return GRIDS.at_positions(_flux, ids[..., : len(dims)], dims, self.theta)


BriaPosEmbed = BriaEmbedND = BriaFiboEmbedND = FluxPosEmbed
Krea2RotaryPosEmbed = LongCatImagePosEmbed = OvisImagePosEmbed = FluxPosEmbed
Flux3PosEmbed = Flux2PosEmbed


# --- rotation matrices ----------------------------------------------------------------------------------------------


def _matrices(ids: Tensor, dims: tuple, theta: float) -> tuple[Tensor]:
    dtype = double_for(ids.device)
    (table,) = gather_columns(
        ids.flatten(0, -2).unbind(-1),
        lambda axis, values: (rotation_matrices(angles(values, dims[axis], theta, dtype)).float(),),
    )
    return (table.view(*ids.shape[:-1], -1, 2, 2),)


class HiDreamImageEmbedND(nn.Module):
    """HiDream's: rotation matrices, float32 ``[B, S, 1, sum(axes_dim)/2, 2, 2]``, of tokens at ``ids`` ``[B, S, axes]``."""

    def __init__(self, theta: float, axes_dim: Sequence[int]):
        super().__init__()
        self.theta = theta
        self.axes_dim = axes_dim

    def forward(self, ids: Tensor) -> Tensor:
        dims = tuple(self.axes_dim)
        return GRIDS.at_positions(_matrices, ids, dims, self.theta)[0].unsqueeze(2)


class PRXEmbedND(nn.Module):
    """PRX's: HiDream's as ``[B, 1, S, sum(axes_dim)/2, 2, 2]``."""

    def __init__(self, dim: int, theta: float, axes_dim: Sequence[int]):
        super().__init__()
        self.dim = dim
        self.theta = theta
        self.axes_dim = axes_dim

    def forward(self, ids: Tensor) -> Tensor:
        dims = tuple(self.axes_dim)
        return GRIDS.at_positions(_matrices, ids, dims, self.theta)[0].unsqueeze(1)


# --- angles and complex numbers -------------------------------------------------------------------------------------


def _ernie(ids: Tensor, dims: tuple, theta: float) -> tuple[Tensor]:
    (table,) = gather_columns(
        ids.flatten(0, -2).unbind(-1),
        lambda axis, values: (spread(angles(values, dims[axis], theta), PAIRS).float(),),
    )
    return (table.view(*ids.shape[:-1], 1, -1),)


class ErnieImageEmbedND3(nn.Module):
    """ERNIE-Image's: the angles themselves, float32 ``[B, S, 1, sum(axes_dim)]``, of tokens at ``ids`` ``[B, S, 3]``;
    columns side by side in pairs."""

    def __init__(self, dim: int, theta: float, axes_dim: tuple[int, int, int]):
        super().__init__()
        self.dim = dim
        self.theta = theta
        self.axes_dim = list(axes_dim)

    def forward(self, ids: Tensor) -> Tensor:
        return GRIDS.at_positions(_ernie, ids[..., :3], tuple(self.axes_dim), self.theta)[0]


def _z_image(ids: Tensor, dims: tuple, theta: float) -> tuple[Tensor]:
    dtype = double_for(ids.device)
    return gather_columns(
        ids.unbind(-1),
        lambda axis, values: (unit_complex(angles(values, dims[axis], theta, dtype).float()),),
    )


class RopeEmbedder:
    """Z-Image's and Bria-Fibo-2's, not a module: complex64 ``[S, sum(axes_dims)/2]`` of tokens at integer ``ids``
    ``[S, axes]``."""

    def __init__(
        self,
        theta: float = 256.0,
        axes_dims: Sequence[int] = (16, 56, 56),
        axes_lens: Sequence[int] = (64, 128, 128),
    ):
        if len(axes_dims) != len(axes_lens):
            raise ValueError(f"axes_dims and axes_lens must be of equal length, got {axes_dims} and {axes_lens}")
        self.theta = theta
        self.axes_dims = axes_dims
        self.axes_lens = axes_lens

    def __call__(self, ids: Tensor) -> Tensor:
        if ids.ndim != 2 or ids.shape[-1] != len(self.axes_dims):
            raise ValueError(f"ids must be [S, {len(self.axes_dims)}], got {tuple(ids.shape)}")
        return GRIDS.at_positions(_z_image, ids, tuple(self.axes_dims), self.theta)[0]


# --- one head's frequencies shared out among axes (mRoPE) -----------------------------------------------------------


def _shared_out(positions: Tensor, axis_of_pair: tuple, dim: int, theta: float, dtype: torch.dtype) -> tuple:
    """cos and sin ``[..., dim]`` of positions ``[..., axes]``, pair j turned by the position on its axis."""
    inverse = frequencies(dim, theta, torch.float32, positions.device)
    index = torch.tensor(axis_of_pair, device=positions.device)
    return tiled_cos_sin(positions.float().index_select(-1, index) * inverse, dtype)


def _take_turns(pairs: int, sections: Sequence[int]) -> tuple[int, ...]:
    """The axis of each pair where time, height and width take turns, up to three times the section of each side."""
    return tuple(j % 3 if j % 3 and j < 3 * sections[j % 3] else 0 for j in range(pairs))


class Ideogram4MRoPE(nn.Module):
    """Ideogram-4's: cos and sin, float32 ``[B, S, head_dim]``, of tokens at ``position_ids`` ``[B, S, 3]``; all columns and
    then all again. Float32 also under autocast."""

    def __init__(self, head_dim: int, base: float, mrope_section: Sequence[int]) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        self.mrope_section = tuple(mrope_section)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if position_ids.ndim != 3 or position_ids.shape[-1] != 3:
            raise ValueError(f"position_ids must be [B, S, 3], got {tuple(position_ids.shape)}")
        axes = _take_turns(self.head_dim // 2, self.mrope_section)
        return GRIDS.at_positions(_shared_out, position_ids, axes, self.head_dim, self.base, torch.float32)


class Cosmos3VLTextRotaryEmbedding(nn.Module):
    """Cosmos-3's: cos and sin ``[B, S, head_dim]`` of ``dtype``, of tokens at ``position_ids`` ``[B, S]`` or ``[3, B, S]``."""

    def __init__(self, head_dim: int, rope_theta: float, rope_axes_dim: tuple[int, int, int]):
        super().__init__()
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.rope_axes_dim = rope_axes_dim

    def forward(self, position_ids: Tensor, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        pairs = self.head_dim // 2
        flat = position_ids.ndim == 2
        axes = (0,) * pairs if flat else _take_turns(pairs, self.rope_axes_dim)
        positions = position_ids.unsqueeze(-1) if flat else position_ids.movedim(0, -1)
        args = (axes, self.head_dim, self.rope_theta, dtype)
        return GRIDS.at_positions(_shared_out, positions.to(device), *args)


class AnimaRotaryEmbedding(nn.Module):
    """Anima's text condition: cos and sin ``[B, S, head_dim]`` of the hidden states' dtype, of tokens at ``position_ids``
    ``[B, S]``; all columns and then all again."""

    def __init__(self, head_dim: int, rope_theta: float = 10000.0):
        super().__init__()
        self.head_dim = head_dim
        self.rope_theta = rope_theta

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        args = ((0,) * (self.head_dim // 2), self.head_dim, self.rope_theta, hidden_states.dtype)
        return GRIDS.at_positions(_shared_out, position_ids.unsqueeze(-1).to(hidden_states.device), *args)


def _minimax(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    inverse = frequencies(dim, theta, torch.float32, positions.device)
    return tiled_cos_sin((positions.float().unsqueeze(-1) * inverse).flatten(1))


class MiniMaxH3RotaryPosEmbed(nn.Module):
    """MiniMax-H3's: cos and sin, float32 ``[S, 6 * rope_freq_dim]``, of tokens at ``position_ids`` ``[S, 3]``; every axis
    has all frequencies, and all columns stand there twice."""

    def __init__(self, rope_freq_dim: int = 16, rope_theta: float = 10000.0):
        super().__init__()
        self.rope_freq_dim = rope_freq_dim
        self.rope_theta = rope_theta

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return GRIDS.at_positions(_minimax, position_ids, 2 * self.rope_freq_dim, self.rope_theta)


def _minimax_video(positions: Tensor, dim: int, theta: float, axes: int) -> tuple[Tensor, Tensor]:
    inverse = 1.0 / theta ** torch.arange(0, 1, 2 * axes / dim, dtype=torch.float32, device=positions.device)
    table = 2.0 * math.pi * positions.unsqueeze(-1) * inverse
    cos, sin = tiled_cos_sin(table.flatten(2, 3))
    return cos.unsqueeze(2), sin.unsqueeze(2)


class MiniMaxH3VideoRotaryPosEmbed(nn.Module):
    """The MiniMax-H3 autoencoder's: cos and sin, float32 ``[B, S, 1, dim]``, of tokens at ``position_ids`` ``[B, S, 3]``
    in [-1, 1), which are turned once around by it; all columns and then all again."""

    def __init__(self, dim: int, theta: float = 100.0, num_axes: int = 3) -> None:
        super().__init__()
        if dim % (2 * num_axes):
            raise ValueError(f"dim must be a multiple of 2 * num_axes = {2 * num_axes}, got {dim}")
        self.dim = dim
        self.theta = theta
        self.num_axes = num_axes

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return GRIDS.at_positions(_minimax_video, position_ids, self.dim, self.theta, self.num_axes)


# --- OmniGen --------------------------------------------------------------------------------------------------------


def _omnigen(positions: Tensor, dim: int, base: float, factors: tuple, scale: float) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=positions.device).float() / dim
    stretch = torch.tensor(factors, dtype=torch.float32, device=positions.device)
    return tiled_cos_sin(torch.outer(positions.float(), 1.0 / (stretch * base**exponents)), scale=scale)


class OmniGenSuScaledRotaryEmbedding(nn.Module):
    """OmniGen's (longrope): cos and sin, float32 ``[S, dim]``, of the first sequence of ``position_ids`` ``[B, S]``, with the
    long factors if any position of the batch is beyond the original maximum; times the attention scale."""

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 131072,
        original_max_position_embeddings: int = 4096,
        base: float = 10000,
        rope_scaling: dict | None = None,
    ):
        super().__init__()
        for name in ("short_factor", "long_factor"):
            if rope_scaling is None or len(rope_scaling.get(name, ())) != dim // 2:
                raise ValueError(f"rope_scaling must hold {name!r} with dim/2 = {dim // 2} numbers, got {rope_scaling}")
        self.dim = dim
        self.max_position_embeddings = max_position_embeddings
        self.original_max_position_embeddings = original_max_position_embeddings
        self.base = base
        self.short_factor = rope_scaling["short_factor"]
        self.long_factor = rope_scaling["long_factor"]

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        original = self.original_max_position_embeddings
        ratio = self.max_position_embeddings / original
        scale = 1.0 if ratio <= 1.0 else math.sqrt(1 + math.log(ratio) / math.log(original))
        factors = self.long_factor if int(position_ids.max()) + 1 > original else self.short_factor
        positions = position_ids[0].to(hidden_states.device)
        return GRIDS.at_positions(_omnigen, positions, self.dim, self.base, tuple(factors), scale)
