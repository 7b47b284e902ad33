"""Llama4VisionRotaryEmbedding: one row for each patch of a square image and one for the class token."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from common.rope_frequencies import normalize_rope
from common.rope_kernel import live_rotate
from common.rope_table import RopeTable


class Llama4VisionRotaryEmbedding(RopeTable):
    """Llama 4's vision rope: the first half of the pairs turns by a patch's column, the second by its row, both counted
    from 1; the class token, last, stands still. Pairs are ``(2i, 2i+1)``.

    Args:
        head_size: elements of a head, all of them rotated.
        rotary_dim: half of them, upstream's way to say that each axis has a half.
        max_position_embeddings: patches of an image, a square number.
        base: theta.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool = False,
        dtype: torch.dtype | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if math.isqrt(max_position_embeddings) ** 2 != max_position_embeddings:
            raise ValueError(
                f"max_position_embeddings is {max_position_embeddings}; expected a square number of patches"
            )
        if 2 * rotary_dim != head_size:
            raise ValueError(f"rotary_dim is {rotary_dim}; expected half of head_size, {head_size // 2}")
        super().__init__(
            normalize_rope(head_size, rotary_dim, max_position_embeddings, base), head_size, False, device=device
        )
        self.dtype = torch.get_default_dtype() if dtype is None else dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"cos_sin_cache": (self.spec.max_position + 1, 2 * self.rotary_dim)}

    def derivation(self) -> Hashable:
        return ("llama4_vision", self.spec.max_position, *self._values_key)

    def derive(self) -> dict[str, Tensor]:
        inv_freq, _ = self.spec.frequencies()
        side = math.isqrt(self.spec.max_position)
        place = torch.arange(1, side + 1, dtype=torch.int32, device="cpu")
        across, down = (place[:, None] * inv_freq for _ in range(2))
        angles = torch.cat((across.repeat(side, 1), down.repeat_interleave(side, dim=0)), dim=1)
        angles = torch.cat((angles, torch.zeros_like(angles[:1])))
        return {"cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=1)}

    def reserve(self, rows: int) -> None:
        if rows > self.spec.max_position + 1:
            raise IndexError(f"token {rows - 1} is beyond the {self.spec.max_position} patches and the class token")

    def forward(
        self, query: Tensor, key: Tensor | None = None, *, inplace: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate ``query`` and ``key``, ``[batch, patches + 1, heads, head_size]``, patches in row-major order."""
        return live_rotate(self, None, query, key, inplace=inplace)
