"""FourierRotaryEmbedding: a rotary layer whose table mixes frequencies by learned coefficients."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.cache_liveness import DeadBufferError, LiveBuffers, tensor_fault
from common.rope_frequencies import normalize_rope
from common.rope_kernel import live_rotate, register_live


class FourierRotaryEmbedding(LiveBuffers):
    """Fourier position embedding (FoPE, arXiv 2412.17739), sglang's layer of that name.

    cos and sin of the frequencies that turn at least once within ``max_position_embeddings`` are mixed by learned
    matrices, ``cos_coef`` and ``sin_coef`` ``[num_kv_heads, frequencies, frequencies]``; columns beyond are 1. Rows are
    no rotations, and each key head, with its group of query heads, has its own. The table follows the parameters, and
    the layer is never shared. Gradients flow to query and key, not to the matrices.

    Buffer ``cos_sin_cache``: float32 ``[max_position_embeddings, num_kv_heads * 2 * head_size]``.

    Args: as of :class:`RotaryEmbedding`, and
        num_kv_heads: key heads of this layer.
        fope_init_factor: kept for the config's sake; it scales the initialisation of training.
        fope_sep_head: each key head has its own coefficients; else the first head's serve all.
        num_inv_freq: how many frequencies to mix, instead of those that turn once.
    """

    learned = ("cos_coef", "sin_coef")

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool = True,
        dtype: torch.dtype | None = None,
        num_kv_heads: int = 1,
        *,
        fope_init_factor: float = 0.1,
        fope_sep_head: bool = True,
        num_inv_freq: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not is_neox_style:
            raise ValueError("is_neox_style is False; FoPE expects neox pairs")
        if isinstance(num_kv_heads, bool) or not isinstance(num_kv_heads, int) or num_kv_heads <= 0:
            raise ValueError(f"num_kv_heads is {num_kv_heads!r}; expected a positive int")
        self.spec = normalize_rope(head_size, rotary_dim, max_position_embeddings, base)
        self.head_size, self.rotary_dim = head_size, rotary_dim
        self.max_position_embeddings, self.base, self.is_neox_style = max_position_embeddings, base, is_neox_style
        self.num_kv_heads = num_kv_heads
        self.fope_init_factor, self.fope_sep_head, self.num_inv_freq = fope_init_factor, fope_sep_head, num_inv_freq
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        device = torch.get_default_device() if device is None else torch.device(device)
        frequencies = len(self._frequencies())
        for name in self.learned:
            identity = torch.eye(frequencies, dtype=torch.float32, device=device).repeat(num_kv_heads, 1, 1)
            self.register_parameter(name, nn.Parameter(identity, requires_grad=False))
        self.build_buffers(self.cos_coef.device)  # a loader may have taken the parameters to meta at once

    def _frequencies(self) -> Tensor:
        inv_freq, _ = self.spec.frequencies()
        if self.num_inv_freq is not None:
            return inv_freq[: self.num_inv_freq]
        return inv_freq[inv_freq > 2.0 * math.pi / self.max_position_embeddings]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"cos_sin_cache": (self.max_position_embeddings, self.num_kv_heads * 2 * self.head_size)}

    def derive(self) -> dict[str, Tensor]:
        positions = torch.arange(self.max_position_embeddings, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, self._frequencies())
        halves = []
        for values, name in ((angles.cos(), "cos_coef"), (angles.sin(), "sin_coef")):
            fault = tensor_fault(getattr(self, name))
            if fault is not None:
                raise DeadBufferError(
                    f"{name} is dead ({fault}), and the table is derived from it; load the parameters"
                )
            mixing = getattr(self, name).detach().to("cpu", torch.float32)
            if not self.fope_sep_head:
                mixing = mixing[:1].expand(self.num_kv_heads, -1, -1)
            mixed = torch.einsum("td,hde->the", values, mixing)
            half = F.pad(mixed, (0, self.head_size // 2 - mixed.shape[-1]), value=1.0)
            halves.append(torch.cat((half, half), dim=-1))
        return {"cos_sin_cache": torch.cat(halves, dim=-1).flatten(1).contiguous()}

    def _reset(self) -> None:
        super()._reset()
        self._handle = register_live(self)

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Apply the rows of ``positions`` ``[tokens]`` to ``query`` and ``key``, ``[tokens, heads * head_size]``.

        Raises:
            IndexError: a position is negative or beyond ``max_position_embeddings``.
            DeadBufferError: the table keeps being overwritten, or the parameters have no values.
        """
        if offsets is not None:
            positions = positions + offsets
        return live_rotate(self, positions.flatten(), query, key, head_size=self.head_size)

    def rotate_now(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        *,
        inplace: bool = False,
        inverse: bool = False,
        head_size: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply checked rows to ``[tokens, heads, head_size]``, or ``[tokens, heads * head_size]`` with ``head_size``.
        ``inverse`` transposes instead of inverting, for the rows are no rotations: it is the gradient."""
        low, high = (int(bound) for bound in torch.aminmax(positions)) if positions.numel() else (0, 0)
        if low < 0 or high >= self.max_position_embeddings:
            raise IndexError(
                f"position {low if low < 0 else high} is outside the {self.max_position_embeddings} of this FoPE table"
            )
        for _ in range(2):
            rows = self.live("cos_sin_cache", positions.device)[positions]
            expected = self._checks["cos_sin_cache"].to(positions.device)[positions]
            if torch.equal(self.checksum(rows), expected):
                return self._apply_rows(rows, query, key, inverse)
            fault = self.fault(verify=True)
            if fault is not None:
                self.heal(*fault)
        raise DeadBufferError("cos_sin_cache of FourierRotaryEmbedding is overwritten again after each rebuild")

    def rotate_exported(
        self, positions: Tensor, query: Tensor, key: Tensor | None, *, inplace: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """With the table as an input of the graph that is being exported, and the parameters as they are now."""
        return self._apply_rows(F.embedding(positions, self._buffers["cos_sin_cache"]), query, key, False)

    def _apply_rows(
        self, rows: Tensor, query: Tensor, key: Tensor | None, inverse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """A key head's row for its group of heads: float32 arithmetic, rounded once."""
        cos, sin = rows.unflatten(-1, (self.num_kv_heads, 1, 2, self.head_size)).unbind(-2)
        sin = -sin if inverse else sin
        outputs = []
        for x in (query, key):
            if x is None:
                outputs.append(None)
                continue
            heads = x.reshape(len(x), self.num_kv_heads, -1, self.head_size)
            heads = heads.to(torch.promote_types(x.dtype, torch.float32))
            first, second = heads.chunk(2, dim=-1)
            turned = heads * cos + torch.cat((-second, first), dim=-1) * sin
            outputs.append(turned.to(x.dtype).reshape(x.shape))
        return outputs[0], outputs[1]
