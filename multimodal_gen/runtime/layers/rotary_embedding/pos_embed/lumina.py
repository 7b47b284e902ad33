"""Lumina 2's embedding: caption tokens first, then the image, for samples with captions of different length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..grid_cache import GRIDS, table_device
from .tables import angles, filled, unit_complex


class Lumina2RotaryPosEmbed(nn.Module):
    """Cuts an image into patches and gives complex128 tables for captions, image and both together."""

    def __init__(
        self,
        theta: float,
        axes_dim: Sequence[int],
        axes_lens: Sequence[int] = (300, 512, 512),
        patch_size: int = 2,
    ):
        super().__init__()
        self.theta = theta
        self.axes_dim = axes_dim
        self.axes_lens = axes_lens
        self.patch_size = patch_size

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int], list[int]]:
        """
        Args:
            hidden_states: latents ``[B, C, height, width]``.
            attention_mask: ``[B, caption]``, which caption tokens count; they come first.

        Returns:
            the patches ``[B, tokens, patch * patch * C]``; the captions' table ``[B, caption, sum(axes_dim)/2]`` and the
            image's ``[B, tokens, ...]`` (zero where there is no token); that of both, ``[B, longest, ...]`` (no rotation
            where there is no token); the captions' lengths; the sequences' lengths.
        """
        batch, channels, height, width = hidden_states.shape
        patch = self.patch_size
        down, across = height // patch, width // patch
        captions = [int(length) for length in attention_mask.sum(dim=1).tolist()]
        lengths = [caption + down * across for caption in captions]
        args = (tuple(captions), attention_mask.shape[1], (down, across), tuple(self.axes_dim), self.theta)
        text, image, both = GRIDS.grid(_lumina, *args, device=hidden_states.device)
        patches = hidden_states.view(batch, channels, down, patch, across, patch).permute(0, 2, 4, 3, 5, 1)
        return patches.flatten(3).flatten(1, 2), text, image, both, captions, lengths


def _lumina(
    captions: tuple, longest: int, size: tuple, dims: tuple, theta: float, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    home = table_device(device)
    tokens, width = size[0] * size[1], sum(dims) // 2
    both = torch.ones((len(captions), max(captions) + tokens, width), dtype=torch.complex128, device=device)
    text = torch.zeros((len(captions), longest, width), dtype=torch.complex128, device=device)
    image = torch.empty((len(captions), tokens, width), dtype=torch.complex128, device=device)
    time = unit_complex(angles(torch.arange(max(captions) + 1, device=home), dims[0], theta, torch.float64))
    sides = [
        unit_complex(angles(torch.arange(n, device=home), dim, theta, torch.float64)) for n, dim in zip(size, dims[1:])
    ]
    for i, caption in enumerate(captions):
        both[i, :caption, : dims[0] // 2] = time[:caption].to(device)
        text[i, :caption] = both[i, :caption]
        columns = [(0, time[caption : caption + 1]), *enumerate(sides)]
        filled(size, columns, device, image[i].unflatten(0, size))
        both[i, caption : caption + tokens] = image[i]
    return text, image, both
