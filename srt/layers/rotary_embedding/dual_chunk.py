"""DualChunkRotaryEmbedding: the five rotated queries of dual chunk attention."""

from __future__ import annotations

import torch
from torch import Tensor

from srt.layers.rotary_embedding.base import RotaryEmbedding, split_heads


class DualChunkRotaryEmbedding(RotaryEmbedding):
    """Dual chunk attention (arXiv 2402.17463), as Qwen2.5-1M is served with it.

    Keys take their position within their chunk of ``chunk_size - local_size`` tokens. A query is rotated five times,
    for keys of its own chunk, of the one before it, of earlier ones, and the last two again without the bound on
    distances, for the queries where attention is computed critically. Every one is a row of the same plain table.

    Args: as of :class:`RotaryEmbedding`, and
        chunk_size, local_size: tokens.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool = True,
        dtype: torch.dtype | None = None,
        *,
        chunk_size: int,
        local_size: int,
        **keywords,
    ) -> None:
        for name, value in (("chunk_size", chunk_size), ("local_size", local_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; expected a whole number of tokens")
        if chunk_size <= local_size:
            raise ValueError(f"chunk_size is {chunk_size}; expected more than local_size, {local_size}")
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, **keywords)
        self.chunk_size, self.local_size = chunk_size, local_size

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate ``key`` once and ``query`` five times.

        Args:
            positions: int32 or int64 ``[tokens]``.
            query, key: ``[tokens, heads * head_size]`` or ``[tokens, heads, head_size]``.

        Returns:
            queries ``[tokens, 5 * heads * head_size]``: within the chunk, to the one before, to earlier ones, and the
            last two without the bound; and the key ``[tokens, heads * head_size]``.
        """
        if offsets is not None:
            positions = positions + offsets
        length = self.chunk_size - self.local_size
        tokens = positions.numel()
        within = positions.flatten() % length
        before = within + length
        # a rotation by the query's own position alone: rows are the same for each head
        farthest = torch.full_like(within, min(2 * length - 1, self.chunk_size))
        places = (within, before.clamp(max=self.chunk_size), farthest, before, within + self.chunk_size)
        heads = split_heads(query, tokens, self.head_size, "query")
        first, rotated_key = self._rotate(within, heads, split_heads(key, tokens, self.head_size, "key"))
        queries = [first, *(self._rotate(place, heads, None)[0] for place in places[1:])]
        return torch.cat([q.flatten(1) for q in queries], dim=-1), rotated_key.flatten(1)

    def _rotate(self, positions: Tensor, query: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return super().forward(positions, query, key)
