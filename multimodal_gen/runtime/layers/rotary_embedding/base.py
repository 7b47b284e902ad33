"""RotaryEmbedding: the diffusion subsystem's rotary layer, by its own table or by cos and sin that the caller brings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.rope_frequencies import RopeSpec, normalize_rope
from common.rope_kernel import live_rotate, rotate
from common.rope_table import RopeTable

from .apply import check_memory


class RotaryEmbedding(RopeTable):
    """Rotary position embedding (RoFormer, arXiv 2104.09864) for queries ``[batch, seq, heads, head_size]``.

    Args:
        head_size: elements of a head.
        rotary_dim: how many of them, from the first on, are rotated; even.
        max_position_embeddings: positions that the model is made for; the table grows beyond where the type allows.
        base: theta.
        is_neox_style: pairs ``(i, i + rotary_dim/2)``; else interleaved pairs ``(2i, 2i+1)``, as diffusion models have.
        dtype: the model's dtype, part of the cache key as upstream. The table is float32 whatever it is.
        rope_scaling: the rope type and its parameters as in a ``config.json``; None is the default type.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, its value and what was expected.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int = 4096,
        base: float = 10000,
        is_neox_style: bool = False,
        dtype: torch.dtype | None = None,
        rope_scaling: dict[str, Any] | None = None,
        *,
        spec: RopeSpec | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if spec is None:
            spec = normalize_rope(head_size, rotary_dim, max_position_embeddings, base, rope_scaling)
        super().__init__(spec, head_size, is_neox_style, device=device)
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.dtype = torch.get_default_dtype() if dtype is None else dtype

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        positions: Tensor | None = None,
        position_offset: int = 0,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        complex_freqs: Tensor | None = None,
        *,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate ``query`` and ``key``. ``(positions, query, key)``, the LLM subsystem's order, is understood too.

        Args:
            query: ``[batch, seq, heads, head_size]`` or ``[tokens, heads, head_size]``, last dimension contiguous.
            key: likewise, with its own number of heads, or None.
            positions: int32 or int64, ``[batch * seq]``, ``[batch, seq]`` or, shared over the batch, ``[seq]``; by
                default ``position_offset .. position_offset + seq - 1``.
            cos, sin: instead of the module's table, float32 ``[seq, rotary_dim/2]`` each, a row per token.
            complex_freqs: instead of both, ``cos + i sin``, ``[seq, rotary_dim/2]`` or ``[seq, 1, rotary_dim/2]``.
            inplace: write into ``query`` and ``key`` and return them; else new tensors are returned.

        Returns:
            the rotated query and key (None without a key), of the input's shapes and dtype.

        Raises:
            ValueError: shapes that do not belong together; only one of cos and sin.
            IndexError: a position is negative, or beyond a table that may not grow.
            DeadBufferError: the table was ruined and cannot be rebuilt here, or given cos and sin have no memory.
        """
        if not query.is_floating_point() and positions is not None:
            query, key, positions = key, positions, query
        if query.dim() not in (3, 4) or query.shape[-1] != self.head_size:
            raise ValueError(
                f"query has shape {tuple(query.shape)}; expected [batch, seq, heads, {self.head_size}] or "
                f"[tokens, heads, {self.head_size}]"
            )
        if complex_freqs is not None:
            if cos is not None or sin is not None:
                raise ValueError("complex_freqs and cos/sin were both given; expected one of them")
            if not complex_freqs.is_complex():
                raise ValueError(f"complex_freqs has dtype {complex_freqs.dtype}; expected a complex one")
            check_memory(query, complex_freqs=complex_freqs)
            freqs = complex_freqs.squeeze(-2) if complex_freqs.dim() == 3 else complex_freqs
            cos, sin = freqs.real, freqs.imag
        if (cos is None) != (sin is None):
            raise ValueError(f"only {'sin' if cos is None else 'cos'} was given; expected cos and sin together")
        if cos is not None:
            check_memory(query, cos=cos, sin=sin)
            return rotate(
                query,
                key,
                None,
                cos.float().contiguous(),
                sin=sin.float().contiguous(),
                is_neox_style=self.is_neox_style,
                inplace=inplace,
            )
        seq = query.shape[-3]
        if positions is None:
            positions = torch.arange(position_offset, position_offset + seq, device=query.device)
        elif query.dim() == 4 and positions.dim() == 1 and positions.shape[0] != seq:
            if positions.numel() != query.shape[0] * seq:
                raise ValueError(
                    f"positions has shape {tuple(positions.shape)}; expected [{seq}], [{query.shape[0]}, {seq}] or "
                    f"[{query.shape[0] * seq}]"
                )
            positions = positions.view(query.shape[0], seq)
        return live_rotate(self, positions, query, key, inplace=inplace)
