"""RotaryEmbedding: the LLM subsystem's rotary layer, for positions of one axis."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from common import rope_kernel
from common.rope_frequencies import RopeSpec, normalize_rope
from common.rope_kernel import live_rotate
from common.rope_table import RopeTable


class RotaryEmbedding(RopeTable):
    """Rotary position embedding (RoFormer, arXiv 2104.09864), every rope type whose forward is one table lookup.

    Args:
        head_size: elements of a head.
        rotary_dim: how many of them, from the first on, are rotated; even.
        max_position_embeddings: positions that the model is made for; the table grows beyond where the type allows.
        base: theta.
        is_neox_style: pairs ``(i, i + rotary_dim/2)``; else GPT-J's ``(2i, 2i+1)``.
        dtype: the model's dtype, part of the cache key as upstream. The table is float32 whatever it is.
        rope_scaling: the rope type and its parameters as in a ``config.json``; None is the default type.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, its value and what was expected.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool = True,
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

    @classmethod
    def of(cls, spec: RopeSpec, *numbers: Any, device: torch.device | str | None = None) -> RotaryEmbedding:
        """The layer of ``spec``, whatever the arguments of the subclass' own constructor are."""
        layer = cls.__new__(cls)
        RotaryEmbedding.__init__(layer, *numbers, spec=spec, device=device)
        return layer

    def forward(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        offsets: Tensor | None = None,
        fused_set_kv_buffer_arg: None = None,
        *,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate ``query`` and ``key`` to ``positions``.

        Args:
            positions: int32 or int64, ``[tokens]`` or ``[batch, seq]``; ``[seq]`` is shared over a batch.
            query: ``[tokens, heads * head_size]``, ``[tokens, heads, head_size]``, ``[batch, seq, heads * head_size]``
                or ``[batch, seq, heads, head_size]``; the last dimension contiguous, slices of a fused qkv welcome.
            key: likewise, with its own number of heads, or None.
            offsets: added to the positions.
            inplace: write into ``query`` and ``key`` and return them; else new tensors are returned.

        Returns:
            the rotated query and key (None without a key), of the input's shapes and dtype, computed in more than
            float32 and rounded once.

        Raises:
            IndexError: a position is negative, or beyond a table that may not grow.
            DeadBufferError: the table was ruined and cannot be rebuilt here.
        """
        if fused_set_kv_buffer_arg is not None:
            raise NotImplementedError("fused_set_kv_buffer_arg is not supported: write the KV buffer after rotating")
        if offsets is not None:
            positions = positions + offsets
        if rope_kernel.short_way is not None and not is_dynamo_compiling():
            done = rope_kernel.short_way(self, positions, query, key, inplace)
            if done is not None:
                return done
        if positions.dim() == 1 and query.dim() == 2 and (key is None or key.dim() == 2):  # to the kernel as they are
            return live_rotate(self, positions, query, key, inplace=inplace, head_size=self.head_size)
        # positions of several axes have one more dimension in front
        axes = 1 if self.spec.pair_axes is not None and positions.dim() > 1 else 0
        tokens = math.prod(positions.shape[axes:])  # numel() would make a constant of it while exporting
        q = split_heads(query, tokens, self.head_size, "query")
        k = None if key is None else split_heads(key, tokens, self.head_size, "key")
        if q.dim() == 3 and positions.dim() == axes + 2:
            positions = positions.flatten(-2)
        elif q.dim() == 4 and positions.dim() == axes + 1 and q.shape[0] * q.shape[1] == tokens:
            positions = positions.unflatten(-1, q.shape[:2])
            if self.spec.pair_axes is not None and not axes:  # text: the same on every axis
                positions = positions.expand(1 + max(self.spec.pair_axes), -1, -1)
        q, k = live_rotate(self, positions, q, k, inplace=inplace)
        if inplace:
            return query, key
        if q.dim() == query.dim():
            return q, k
        return q.view(query.shape), None if key is None else k.view(key.shape)

    def get_cos_sin(self, seqlen: int) -> tuple[Tensor, Tensor]:
        """The first ``seqlen`` rows as ``(cos, sin)``, each float32 ``[seqlen, rotary_dim/2]``."""
        self.reserve(seqlen)
        return self.live("cos_sin_cache")[:seqlen].chunk(2, dim=-1)


def split_heads(tensor: Tensor, tokens: int, head_size: int, name: str) -> Tensor:
    """A view of ``tensor`` as ``[tokens, heads, head_size]`` or ``[batch, seq, heads, head_size]``."""
    dim, last = tensor.dim(), tensor.shape[-1]
    if last % head_size or dim not in (2, 3, 4):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected [tokens, heads * {head_size}], [tokens, heads, "
            f"{head_size}], [batch, seq, heads * {head_size}] or [batch, seq, heads, {head_size}]"
        )
    if dim == 2 or (dim == 3 and (last != head_size or tensor.shape[0] != tokens)):
        return tensor.unflatten(-1, (last // head_size, head_size))
    return tensor
