"""LTX's embeddings: every axis has all frequencies, and their columns take turns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..apply import rotate_tokens
from ..grid_cache import GRIDS, cleanly, empty_result, table_device
from ..nd import HALVES, cos_sin_grid, frequencies, resolve
from .tables import from_cache, place


def _ltx_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """``theta ** (j / (n - 1)) * pi / 2`` for the n = dim // 6 frequencies of an axis."""
    steps = torch.linspace(math.log(1.0, theta), math.log(theta, theta), dim // 6, dtype=torch.float32, device=device)
    return theta**steps * math.pi / 2.0


def _padded(shape: tuple[int, ...], dim: int, pad: int, axes: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Empty cos and sin ``[*shape, dim]``, no rotation in the first ``pad`` columns; and the views ``[*shape, n, axes, 2]``
    that the others are filled through."""
    out = []
    for rest in (1.0, 0.0):
        table = empty_result((*shape, dim), torch.float32, device)
        table[..., :pad] = rest
        out.append((table, table[..., pad:].unflatten(-1, (-1, axes, 2))))
    return out


def _ltx_grid(batch: int, sizes: tuple, factors: tuple, dim: int, theta: float, device: torch.device) -> tuple:
    home = table_device(device)
    tables = _padded((batch, *sizes), dim, dim % 6, 3, device)
    inverse = _ltx_frequencies(dim, theta, home)
    for axis, (size, steps) in enumerate(zip(sizes, factors)):
        at = place(size, torch.float32, home)
        if steps is not None:
            at = at * steps[0] * steps[1] / steps[2]
        angles = (inverse * (at.unsqueeze(-1) * 2 - 1)).to(device)
        view = [1, 1, 1, 1, angles.shape[1], 1]
        view[1 + axis] = size
        for function, (_, columns) in zip((torch.cos, torch.sin), tables):
            columns[..., axis, :].copy_(function(angles).view(view))
    return tuple(table.flatten(1, 3) for table, _ in tables)


def _ltx_tokens(coords: Tensor, base: tuple, dim: int, theta: float) -> tuple[Tensor, ...]:
    batch, _, tokens = coords.shape
    grid = torch.stack([coords[:, axis] / size for axis, size in enumerate(base)], dim=-1)
    angles = _ltx_frequencies(dim, theta, coords.device) * (grid.unsqueeze(-1) * 2 - 1)
    tables = _padded((batch, tokens), dim, dim % 6, 3, coords.device)
    for function, (_, columns) in zip((torch.cos, torch.sin), tables):
        columns.copy_(function(angles).transpose(-1, -2).unsqueeze(-1))
    return tuple(table for table, _ in tables)


class LTXVideoRotaryPosEmbed(nn.Module):
    """LTX-Video's: cos and sin, float32 ``[B, tokens, dim]``, of a grid or of tokens at ``video_coords`` ``[B, 3, tokens]``;
    columns side by side in pairs, after ``dim % 6`` that do not rotate."""

    def __init__(
        self,
        dim: int,
        base_num_frames: int = 20,
        base_height: int = 2048,
        base_width: int = 2048,
        patch_size: int = 1,
        patch_size_t: int = 1,
        theta: float = 10000.0,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base_num_frames = base_num_frames
        self.base_height = base_height
        self.base_width = base_width
        self.patch_size = patch_size
        self.patch_size_t = patch_size_t
        self.theta = theta

    def forward(
        self,
        hidden_states: Tensor,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        rope_interpolation_scale: tuple[Tensor | float, float, float] | None = None,
        video_coords: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        base = (self.base_num_frames, self.base_height, self.base_width)
        if video_coords is not None:
            return GRIDS.at_positions(_ltx_tokens, video_coords, base, self.dim, self.theta)
        factors: tuple = (None,) * 3
        if rope_interpolation_scale is not None:
            patches = (self.patch_size_t, self.patch_size, self.patch_size)
            factors = tuple(zip(map(_number, rope_interpolation_scale), patches, base))
        args = (hidden_states.shape[0], (num_frames, height, width), factors, self.dim, self.theta)
        return from_cache(_ltx_grid, *args, device=hidden_states.device)


def _number(value: Tensor | float) -> float:
    return value.item() if isinstance(value, Tensor) else value


class LTX2AudioVideoRotaryPosEmbed(nn.Module):
    """LTX-2's, for video, audio and the attention across: of tokens at ``coords`` ``[B, axes, tokens]``, or the bounds of
    their patches ``[B, axes, tokens, 2]``, whose middle counts.

    Returns cos and sin, float32: "interleaved" ``[B, tokens, dim]`` with columns side by side in pairs, "split"
    ``[B, heads, tokens, dim / heads / 2]``; the columns left over at the start do not rotate.
    """

    def __init__(
        self,
        dim: int,
        patch_size: int = 1,
        patch_size_t: int = 1,
        base_num_frames: int = 20,
        base_height: int = 2048,
        base_width: int = 2048,
        sampling_rate: int = 16000,
        hop_length: int = 160,
        scale_factors: tuple[int, ...] = (8, 32, 32),
        theta: float = 10000.0,
        causal_offset: int = 1,
        modality: str = "video",
        double_precision: bool = True,
        rope_type: str = "interleaved",
        num_attention_heads: int = 32,
    ) -> None:
        super().__init__()
        if rope_type not in ("interleaved", "split"):
            raise ValueError(f'rope_type must be "interleaved" or "split", got {rope_type!r}')
        if modality not in ("video", "audio"):
            raise ValueError(f'modality must be "video" or "audio", got {modality!r}')
        self.dim = dim
        self.patch_size = patch_size
        self.patch_size_t = patch_size_t
        self.base_num_frames = base_num_frames
        self.base_height = base_height
        self.base_width = base_width
        self.sampling_rate = sampling_rate
        self.hop_length = hop_length
        self.audio_latents_per_second = float(sampling_rate) / float(hop_length) / float(scale_factors[0])
        self.scale_factors = scale_factors
        self.theta = theta
        self.causal_offset = causal_offset
        self.modality = modality
        self.double_precision = double_precision
        self.rope_type = rope_type
        self.num_attention_heads = num_attention_heads

    def prepare_video_coords(
        self, batch_size: int, num_frames: int, height: int, width: int, device: torch.device, fps: float = 24.0
    ) -> Tensor:
        """Bounds of the patches, float32 ``[B, 3, patches, 2]``: seconds, and pixels down and across."""
        patches = (self.patch_size_t, self.patch_size, self.patch_size)

        def build() -> Tensor:
            starts = [
                torch.arange(0, size, patch, dtype=torch.float32, device=device)
                for size, patch in zip((num_frames, height, width), patches)
            ]
            sizes = [len(axis) for axis in starts]
            out = torch.empty((batch_size, 3, *sizes, 2), dtype=torch.float32, device=device)
            for axis, (start, patch, scale) in enumerate(zip(starts, patches, self.scale_factors)):
                bounds = torch.stack([start, start + patch], dim=-1) * scale
                if axis == 0:
                    bounds = (bounds + self.causal_offset - scale).clamp(min=0) / fps
                view = [1, 1, 1, 2]
                view[axis] = sizes[axis]
                out[:, axis].copy_(bounds.view(view))
            return out.flatten(2, 4)

        return cleanly(build)

    def prepare_audio_coords(self, batch_size: int, num_frames: int, device: torch.device, shift: int = 0) -> Tensor:
        """Bounds of the patches in seconds, float32 ``[B, 1, patches, 2]``."""
        scale = self.scale_factors[0]

        def build() -> Tensor:
            first = torch.arange(shift, num_frames + shift, self.patch_size_t, dtype=torch.float32, device=device)
            bounds = [
                (at * scale + self.causal_offset - scale).clip(min=0) * self.hop_length / self.sampling_rate
                for at in (first, first + self.patch_size_t)
            ]
            return torch.stack(bounds, dim=-1).unsqueeze(0).expand(batch_size, -1, -1).unsqueeze(1)

        return cleanly(build)

    def prepare_coords(self, *args: Any, **kwargs: Any) -> Tensor:
        """The coordinates of this modality's patches."""
        prepare = self.prepare_video_coords if self.modality == "video" else self.prepare_audio_coords
        return prepare(*args, **kwargs)

    def forward(self, coords: Tensor, device: str | torch.device | None = None) -> tuple[Tensor, Tensor]:
        coords = coords.to(resolve(device)) if device else coords
        base = (self.base_num_frames, self.base_height, self.base_width)[: coords.shape[1]]
        heads = self.num_attention_heads if self.rope_type == "split" else 0
        dtype = torch.float64 if self.double_precision else torch.float32
        cos, sin = GRIDS.at_positions(_ltx2, coords, base, self.dim, self.theta, dtype, heads)
        return cos, sin


def _ltx2(coords: Tensor, base: tuple, dim: int, theta: float, dtype: torch.dtype, heads: int) -> tuple[Tensor, ...]:
    if coords.ndim == 4:
        start, stop = coords.unbind(-1)
        coords = (start + stop) / 2.0
    batch, axes, tokens = coords.shape
    grid = torch.stack([coords[:, axis] / size for axis, size in enumerate(base)], dim=-1)
    steps = torch.linspace(0.0, 1.0, dim // (2 * axes), dtype=dtype, device=coords.device)
    frequencies = (torch.pow(theta, steps) * torch.pi / 2.0).to(torch.float32)
    angles = (grid.unsqueeze(-1) * 2 - 1) * frequencies
    if not heads:
        tables = _padded((batch, tokens), dim, dim % (2 * axes), axes, coords.device)
        for function, (_, columns) in zip((torch.cos, torch.sin), tables):
            columns.copy_(function(angles).transpose(-1, -2).unsqueeze(-1))
        return tuple(table for table, _ in tables)
    out = []
    pad = dim // 2 - axes * len(frequencies)
    for function, rest in ((torch.cos, 1.0), (torch.sin, 0.0)):
        table = empty_result((batch, tokens, dim // 2), torch.float32, coords.device)
        table[..., :pad] = rest
        table[..., pad:].unflatten(-1, (-1, axes)).copy_(function(angles).transpose(-1, -2))
        out.append(table.unflatten(-1, (heads, -1)).transpose(1, 2))
    return tuple(out)


SanaWMLTX2AudioVideoRotaryPosEmbed = LTX2AudioVideoRotaryPosEmbed


def _decoder_grid(sizes: tuple, dims: tuple, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    home = table_device(device)
    tables = [
        torch.outer(place(size, torch.float32, home), frequencies(dim, base, torch.float64, home).float())
        for size, dim in zip(sizes, dims)
    ]
    return cos_sin_grid(tables, HALVES, device)


class LTX2VideoVaeRotaryPosEmbed3D(nn.Module):
    """LTX-2's diffusion decoder's: rotates ``[B, frames, height, width, heads, head_dim]`` itself; a quarter of the pairs by
    time, the others by height and width."""

    def __init__(self, head_dim: int, base: float = 10000.0):
        super().__init__()
        if head_dim % 8:
            raise ValueError(f"head_dim must be a multiple of 8, got {head_dim}")
        time = head_dim // 4 // 2 * 2
        if (head_dim - time) // 2 % 2:
            time -= 2
        side = (head_dim - time) // 2
        self.rope_dim_split = (time, side, side)
        self.base = base

    def forward(self, hidden_states: Tensor) -> Tensor:
        sizes = tuple(hidden_states.shape[1:4])
        cos, sin = GRIDS.grid(_decoder_grid, sizes, self.rope_dim_split, self.base, device=hidden_states.device)
        return rotate_tokens(hidden_states.flatten(1, 3), None, cos, sin)[0].unflatten(1, sizes)
