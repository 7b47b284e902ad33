"""Embeddings of one axis: audio and text sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..grid_cache import GRIDS, table_device
from ..nd import TILED, cos_sin_grid, resolve
from .tables import angles


def _sequence(length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    positions = torch.arange(length, dtype=torch.float32, device=table_device(device))
    return cos_sin_grid([angles(positions, dim, theta)], TILED, device)


def _sequence_angles(length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor]:
    positions = torch.arange(length, dtype=torch.float32, device=table_device(device))
    table = angles(positions, dim, theta)
    return (torch.cat((table, table), dim=-1).to(device),)


class AudioDiTRotaryEmbedding(nn.Module):
    """LongCat-Audio-DiT's: cos and sin ``[seq_len, dim]`` of the hidden states' dtype; all columns and then all again."""

    def __init__(self, dim: int, max_position_embeddings: int = 2048, base: float = 100000.0):
        super().__init__()
        self.dim = dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base

    def forward(self, hidden_states: Tensor, seq_len: int | None = None) -> tuple[Tensor, Tensor]:
        seq_len = hidden_states.shape[1] if seq_len is None else seq_len
        cos, sin = GRIDS.grid(_sequence, seq_len, self.dim, self.base, device=hidden_states.device)
        return cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)


class MiniMaxMusic3RotaryEmbedding(nn.Module):
    """MiniMax-Music-3's: cos and sin, float32 ``[seq_len, rotary_dim]``; all columns and then all again."""

    def __init__(self, rotary_dim: int, theta: float = 10000.0):
        super().__init__()
        self.rotary_dim = rotary_dim
        self.theta = theta

    def forward(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return GRIDS.grid(_sequence, seq_len, self.rotary_dim, self.theta, device=resolve(device))


class SAMERotaryEmbedding(nn.Module):
    """The SAME autoencoder's (there: RotaryEmbedding): the angles themselves, float32 ``[seq_len, dim]``; all columns and
    then all again."""

    def __init__(self, dim: int, base: float = 10000):
        super().__init__()
        self.dim = dim
        self.base = base

    def forward(self, seq_len: int, device: torch.device) -> Tensor:
        return GRIDS.grid(_sequence_angles, seq_len, self.dim, self.base, device=resolve(device))[0]


class StableAudio3RotaryEmbedding(SAMERotaryEmbedding):
    """Stable Audio 3's: as SAME's. Its checkpoints hold the inverse frequencies under ``inv_freq``, so there is such a
    buffer; it is written to checkpoints and compared with what they hold, but nothing is computed from it."""

    def __init__(self, dim: int, base: float = 10000):
        super().__init__(dim, base)
        self.register_buffer("inv_freq", self._inverse(), persistent=True)

    def _inverse(self) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim
        return 1.0 / self.base**exponents

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        loaded = state_dict.get(prefix + "inv_freq")
        if loaded is not None and loaded.device.type != "meta":
            expected = self._inverse()
            if loaded.shape != expected.shape or not torch.allclose(loaded.float().cpu(), expected, rtol=1e-2):
                raise ValueError(f"{prefix}inv_freq in the checkpoint is not that of dim={self.dim}, base={self.base}")
        super()._load_from_state_dict(state_dict, prefix, *args)
