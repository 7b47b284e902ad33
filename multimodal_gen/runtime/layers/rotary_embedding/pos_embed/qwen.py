"""Qwen-Image's embeddings and their kin: complex numbers, images centred at zero, text after the largest image."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..grid_cache import GRIDS, empty_result, table_device
from ..nd import gather_columns, resolve
from .tables import angles, filled, unit_complex

logger = logging.getLogger("live_rope")

Span = tuple[int, int]  # first and last + 1 position on an axis


def _spans(grid: Sequence[int], frame: int, centred: bool) -> tuple[Span, Span, Span]:
    """The positions of an image: frames from ``frame`` on, sides from zero on or centred at zero."""
    frames, height, width = grid
    first, sides = (frame, frame + frames), []
    for size in (height, width):
        start = size // 2 - size if centred else 0
        sides.append((start, start + size))
    return first, sides[0], sides[1]


def _images(images: tuple, dims: tuple, theta: float, device: torch.device) -> tuple[Tensor]:
    """complex64 ``[tokens of all images, sum(dims)/2]``."""
    home = table_device(device)
    shapes = [[stop - start for start, stop in spans] for spans in images]
    tokens = [frames * height * width for frames, height, width in shapes]
    out = empty_result((sum(tokens), sum(dims) // 2), torch.complex64, device)
    row = 0
    for spans, shape, count in zip(images, shapes, tokens):
        columns = [
            (axis, unit_complex(angles(torch.arange(start, stop, device=home), dim, theta)))
            for axis, ((start, stop), dim) in enumerate(zip(spans, dims))
        ]
        filled(shape, columns, device, out[row : row + count].unflatten(0, shape))
        row += count
    return (out,)


def _text(start: int, count: int, dims: tuple, theta: float, device: torch.device) -> tuple[Tensor]:
    """complex64 ``[count, sum(dims)/2]``, all axes at the same position."""
    positions = torch.arange(start, start + count, device=table_device(device))
    return (torch.cat([unit_complex(angles(positions, dim, theta)) for dim in dims], dim=1).to(device),)


def _one_of_a_batch(grids: Any, name: str) -> list[tuple[int, int, int]]:
    """The grids of one sample: ``(f, h, w)``, a list of those (the batch), or a list of lists (the batch of lists)."""
    if isinstance(grids, list):
        if any(sample != grids[0] for sample in grids):
            logger.warning(
                "%s: the samples of the batch differ in size (%s); all get the table of the first", name, grids
            )
        grids = grids[0]
    return grids if isinstance(grids, list) else [grids]


class QwenEmbedRope(nn.Module):
    """Qwen-Image's: complex64 ``[image tokens, sum(axes_dim)/2]`` and ``[text tokens, sum(axes_dim)/2]``.

    Args:
        scale_rope: whether the sides of an image are centred at zero.

    Forward takes the grids (frames, height, width) of one or several images: image i stands at frame i, and the text
    comes after the largest side.
    """

    def __init__(self, theta: float, axes_dim: Sequence[int], scale_rope: bool = False):
        super().__init__()
        self.theta = theta
        self.axes_dim = axes_dim
        self.scale_rope = scale_rope

    def forward(
        self, video_fhw: Any, device: torch.device | None = None, max_txt_seq_len: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if max_txt_seq_len is None:
            raise ValueError("max_txt_seq_len must be given")
        grids = _one_of_a_batch(video_fhw, type(self).__name__)
        images = tuple(_spans(grid, self._frame(i, len(grids)), self.scale_rope) for i, grid in enumerate(grids))
        dims, device = tuple(self.axes_dim), resolve(device)
        image = GRIDS.grid(_images, images, dims, self.theta, device=device)[0]
        count = int(max_txt_seq_len)
        text = GRIDS.grid(_text, self._text_start(grids), count, dims, self.theta, device=device)[0]
        return image, text

    def _frame(self, index: int, images: int) -> int:
        return index

    def _text_start(self, grids: list) -> int:
        side = max(max(height, width) for _, height, width in grids)
        return side // 2 if self.scale_rope else side


class QwenEmbedLayer3DRope(QwenEmbedRope):
    """Qwen-Image-Layered's: as Qwen-Image's, but the last image is the condition and stands at frame -1."""

    def forward(
        self, video_fhw: Any, max_txt_seq_len: int | Tensor, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        return super().forward(video_fhw, device, max_txt_seq_len)

    def _frame(self, index: int, images: int) -> int:
        return index if index < images - 1 else -1

    def _text_start(self, grids: list) -> int:
        return max(super()._text_start(grids), len(grids) - 1)


class NucleusMoEEmbedRope(QwenEmbedRope):
    """Nucleus-MoE's: as Qwen-Image's, but the text comes after the last image's larger side."""

    def _text_start(self, grids: list) -> int:
        return super()._text_start(grids[-1:])


class QwenImage21Rope(nn.Module):
    """Qwen-Image-2.1's: complex64 ``[tokens, sum(axes_dim)/2]`` of text and images in one sequence.

    An image stands at one frame, its sides centred at zero; what follows it starts after its larger side.
    """

    def __init__(self, theta: float, axes_dim: Sequence[int]):
        super().__init__()
        self.theta = theta
        self.axes_dim = axes_dim

    def forward(self, img_shapes: list[tuple[int, int, int]], image_pad_mask: Tensor, device: torch.device) -> Tensor:
        """``image_pad_mask`` bool ``[tokens]``: which tokens are the images', in the order of ``img_shapes``."""
        shapes = tuple((height, width) for _, height, width in img_shapes)
        args = (shapes, tuple(self.axes_dim), self.theta)
        return GRIDS.at_positions(_interleaved, image_pad_mask.cpu(), *args)[0].to(device)


def _interleaved(mask: Tensor, shapes: tuple, dims: tuple, theta: float) -> tuple[Tensor]:
    is_image = mask.tolist()
    parts: list[Tensor] = []  # [3, tokens] each
    cursor = position = 0
    for height, width in shapes:
        start = is_image.index(True, cursor)
        parts.append(torch.arange(position, position + start - cursor).expand(3, -1))
        position += start - cursor
        down, across = (torch.arange(size // 2 - size, size // 2) for size in (height, width))
        parts.append(
            torch.stack(
                [
                    torch.full((height * width,), position),
                    down.repeat_interleave(width),
                    across.repeat(height),
                ]
            )
        )
        cursor = start + height * width
        position += max(height, width)
    if cursor < len(is_image):
        parts.append(torch.arange(position, position + len(is_image) - cursor).expand(3, -1))
    positions = torch.cat(parts, dim=1)
    return gather_columns(positions.unbind(0), lambda axis, values: (unit_complex(angles(values, dims[axis], theta)),))
