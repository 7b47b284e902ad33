"""Rotating queries and keys in the forms that diffusion models use, all by the one op of `common.rope_kernel`.

Everything here takes tables as the position embeddings return them. The rotation is computed in float32 or better and
rounded once to the query's dtype; gradients flow to queries and keys, not to tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.cache_liveness import DeadBufferError, tensor_fault
from common.rope_kernel import rotate


def rotate_tokens(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = True,
    sequence_dim: int = 1,
    start: int = 0,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotate the tokens ``start, start + 1, ...`` of ``query`` and ``key`` by the rows of cos and sin; the others, text
    before or after an image, stay.

    Args:
        query, key: ``[B, S, H, D]``, or ``[B, H, S, D]`` with ``sequence_dim`` 2; key may be None or have its own H.
        cos, sin: ``[rows, R/2]``, or ``[B, rows, R/2]``, one column for each pair; elements R..D of a head stay.
        interleaved: pairs (2i, 2i + 1); else (i, i + R/2).
        inplace: overwrite and return query and key; else they are left as they are.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if sequence_dim not in (1, 2):
        raise ValueError(f"sequence_dim must be 1 or 2, got {sequence_dim}")
    if query.ndim != 4:
        raise ValueError(f"query must have 4 dimensions, got {tuple(query.shape)}")
    rows, tokens = cos.shape[-2], query.shape[sequence_dim]
    if start < 0 or start + rows > tokens:
        raise ValueError(f"the {rows} rows from token {start} on do not fit into {tokens} tokens")
    heads_last = [x if x is None or sequence_dim == 1 else x.transpose(1, 2) for x in (query, key)]
    parts = [x if x is None else x[:, start : start + rows] for x in heads_last]
    turned = _rotate(parts[0], parts[1], cos, sin, interleaved, inplace)
    if inplace:
        return query, key
    results = [
        part if x is None or rows == tokens else torch.cat((x[:, :start], part, x[:, start + rows :]), dim=1)
        for x, part in zip(heads_last, turned)
    ]
    q, k = (x if x is None or sequence_dim == 1 else x.transpose(1, 2) for x in results)
    return q, k


def _rotate(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The op on ``[B, S, H, D]`` with a row for each token, ``[S, R/2]``, or one for each sample's, ``[B, S, R/2]``."""
    check_memory(query, cos=cos, sin=sin)
    positions = None
    if cos.ndim == 3:
        batch, rows = cos.shape[:2]
        if batch == 1:
            cos, sin = cos[0], sin[0]
        elif batch == query.shape[0]:
            positions = torch.arange(batch * rows, dtype=torch.int32, device=query.device).view(batch, rows)
            cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
        else:
            raise ValueError(f"cos has a batch of {batch}, query one of {query.shape[0]}")
    tables = [t.to(device=query.device, dtype=torch.float32).contiguous() for t in (cos, sin)]
    return rotate(query, key, positions, tables[0], sin=tables[1], is_neox_style=not interleaved, inplace=inplace)


def check_memory(query: Tensor, **tables: Tensor) -> None:
    """DeadBufferError for a table without memory: casting one whose storage was freed would end the process."""
    if query.is_meta or torch.compiler.is_compiling():  # nothing is read
        return
    for name, table in tables.items():
        fault = tensor_fault(table)
        if fault not in (None, "fake"):
            raise DeadBufferError(
                f"{name} is dead ({fault}) while query lies on {query.device}; pass one with its values"
            )


def _one_of_two(cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """A column for each pair, from tables ``[..., D]`` in which each stands twice: side by side, or in both halves."""
    if interleaved:
        return cos[..., 0::2], sin[..., 1::2]
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., :half]


def apply_rotary_emb(
    x: Tensor,
    freqs_cis: Tensor | tuple[Tensor, Tensor],
    use_real: bool = True,
    use_real_unbind_dim: int = -1,
    sequence_dim: int = 2,
) -> Tensor:
    """diffusers' function of that name.

    Args:
        x: with ``use_real`` ``[B, H, S, D]``, or ``[B, S, H, D]`` with ``sequence_dim`` 1; else ``[B, S, H, D]``.
        freqs_cis: with ``use_real`` (cos, sin), ``[S, D]`` each, every column twice: side by side (``use_real_unbind_dim``
            -1: FLUX, CogVideoX, HunyuanVideo) or all and then all again (-2: CogView4, Cosmos, OmniGen); else complex
            ``[B, S, D/2]`` (Lumina).
    """
    if not use_real:
        freqs = torch.view_as_real(freqs_cis)
        return _rotate(x, None, freqs[..., 0], freqs[..., 1], True)[0]
    if use_real_unbind_dim not in (-1, -2):
        raise ValueError(f"use_real_unbind_dim must be -1 or -2, got {use_real_unbind_dim}")
    interleaved = use_real_unbind_dim == -1
    cos, sin = _one_of_two(*freqs_cis, interleaved)
    return rotate_tokens(x, None, cos, sin, interleaved=interleaved, sequence_dim=sequence_dim)[0]


def apply_rotary_emb_qwen(
    x: Tensor,
    freqs_cis: Tensor | tuple[Tensor, Tensor],
    use_real: bool = True,
    use_real_unbind_dim: int = -1,
) -> Tensor:
    """Qwen-Image's: ``x`` ``[B, S, H, D]`` by complex ``[S, D/2]`` (``use_real`` False), or by (cos, sin) ``[S, D]``."""
    return apply_rotary_emb(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim=1)


def apply_rotary_emb_wan(x: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Wan's: ``x`` ``[B, S, H, D]`` by cos and sin ``[1, S, 1, D]``, columns side by side in pairs."""
    cos, sin = _one_of_two(freqs_cos.squeeze(2), freqs_sin.squeeze(2), True)
    return _rotate(x, None, cos, sin, True)[0]


def apply_interleaved_rotary_emb(x: Tensor, freqs: tuple[Tensor, Tensor]) -> Tensor:
    """LTX's: ``x`` ``[B, S, C]``, all heads together, by cos and sin ``[B, S, C]``, columns side by side in pairs."""
    cos, sin = _one_of_two(*freqs, True)
    return _rotate(x.unsqueeze(2), None, cos, sin, True)[0].squeeze(2)


def apply_split_rotary_emb(x: Tensor, freqs: tuple[Tensor, Tensor]) -> Tensor:
    """LTX-2's: ``x`` ``[B, S, H * D]`` or ``[B, H, S, D]`` by cos and sin ``[B, H, S, D/2]``, each head by its own; pairs
    (i, i + D/2)."""
    cos, sin = freqs
    flat = x.ndim == 3
    heads_last = x.unflatten(-1, (cos.shape[1], -1)) if flat else x.transpose(1, 2)
    batch, tokens, heads, size = heads_last.shape
    rows = [t.expand(batch, -1, -1, -1).transpose(1, 2).reshape(-1, t.shape[-1]) for t in (cos, sin)]
    turned = _rotate(heads_last.reshape(1, -1, 1, size), None, *rows, False)[0].view(batch, tokens, heads, size)
    return turned.flatten(2) if flat else turned.transpose(1, 2)


def apply_rotary_emb_allegro(
    x: Tensor, freqs_cis: Sequence[tuple[Tensor, Tensor]], positions: Sequence[Tensor]
) -> Tensor:
    """Allegro's: each third of a head of ``x`` ``[B, H, S, D]`` by the rows of its own axis' tables ``[rows, D/3]`` at
    ``positions`` ``[B, S]`` or ``[1, S]``; pairs (i, i + D/6)."""
    thirds = []
    for part, (cos, sin), at in zip(x.transpose(1, 2).chunk(3, dim=-1), freqs_cis, positions):
        cos, sin = (t.to(x.device).contiguous() for t in _one_of_two(cos, sin, False))
        rows = at.to(x.device).expand(x.shape[0], -1)
        thirds.append(rotate(part, None, rows, cos, sin=sin, is_neox_style=True)[0])
    return torch.cat(thirds, dim=-1).transpose(1, 2)


def apply_rotation_matrices(x: Tensor, matrices: Tensor, sequence_dim: int = 1) -> Tensor:
    """HiDream's, PRX's and Kandinsky's: ``x`` ``[B, S, H, D]``, or ``[B, H, S, D]`` with ``sequence_dim`` 2, by rotation
    matrices ``[(B,) S, 1, D/2, 2, 2]``, or ``[B, 1, S, D/2, 2, 2]`` with ``sequence_dim`` 2."""
    rows = matrices.squeeze(-4 if sequence_dim == 1 else -5)
    return rotate_tokens(x, None, rows[..., 0, 0], rows[..., 1, 0], sequence_dim=sequence_dim)[0]
