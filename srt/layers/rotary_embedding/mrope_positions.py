"""Positions of mixed text and vision tokens, for rotary layers whose positions have three axes: time, height, width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

TEXT, IMAGE, VIDEO = 0, 1, 2

# What the models do with a video, by model_type. "time": its frames are one grid, a step of time apart each;
# "seconds": one grid, `tokens_per_second * second_per_grid` apart; "frames": a timestamp in text between the frames,
# so that each is a grid of its own.
_VIDEOS = {
    "qwen2_vl": "time",
    "qwen2_5_vl": "seconds",
    "paddleocr_vl": "seconds",
    "qwen3_vl": "frames",
    "qwen3_vl_moe": "frames",
    "qwen3_5": "frames",
    "qwen3_5_moe": "frames",
    "glm4v": "frames",
    "glm4v_moe": "frames",
    "glm46v": "frames",
    "glm_ocr": "frames",
}


def mm_token_types(
    input_ids: Tensor,
    *,
    image_token_id: int,
    video_token_id: int | None = None,
    video_start_token_id: int | None = None,
    video_end_token_id: int | None = None,
) -> Tensor:
    """0 for text, 1 for image and 2 for video tokens, int64 of ``input_ids``' shape ``[..., tokens]``.

    Qwen marks a video's tokens with ``video_token_id``. GLM-4V uses the image token there as well, between
    ``video_start_token_id`` and ``video_end_token_id``: give these two instead.
    """
    image = input_ids == image_token_id
    if video_start_token_id is not None and video_end_token_id is not None:
        starts = (input_ids == video_start_token_id).cumsum(-1)
        ends = (input_ids == video_end_token_id).cumsum(-1)
        video = image & (starts > ends)
        image = image & ~video
    elif video_token_id is not None:
        video = input_ids == video_token_id
    else:
        video = torch.zeros_like(image)
    return image.long() * IMAGE + video.long() * VIDEO


def get_rope_index(
    spatial_merge_size: int,
    image_token_id: int,
    video_token_id: int | None,
    vision_start_token_id: int | None,
    model_type: str,
    tokens_per_second: float | None = None,
    input_ids: Tensor | None = None,
    image_grid_thw: Tensor | Sequence[Sequence[int]] | None = None,
    video_grid_thw: Tensor | Sequence[Sequence[int]] | None = None,
    second_per_grid_ts: Tensor | Sequence[float] | None = None,
    *,
    attention_mask: Tensor | None = None,
    mm_token_type_ids: Tensor | None = None,
    video_start_token_id: int | None = None,
    video_end_token_id: int | None = None,
    text_continues: str = "grid",
) -> tuple[Tensor, Tensor]:
    """Positions of a batch of sequences of text, image and video tokens, and what decoding adds to its own count.

    Equal to ``get_rope_index`` of transformers' models; text alone needs no grids.

    Args:
        spatial_merge_size: patches of a side that became one token (``vision_config.spatial_merge_size``).
        image_token_id, video_token_id, video_start_token_id, video_end_token_id: see :func:`mm_token_types`.
        vision_start_token_id: as upstream; not needed, since the types of tokens and the grids say all.
        model_type: Qwen2-VL's, Qwen2.5-VL's, Qwen3-VL's, Qwen3.5's, GLM-4V's and kin, as ``config.model_type`` says.
        tokens_per_second: of Qwen2.5-VL's ``vision_config``.
        input_ids: int, ``[batch, tokens]`` or ``[tokens]``.
        image_grid_thw, video_grid_thw: int ``[images, 3]``, ``[videos, 3]``: patches along time, height and width, in
            the order in which they stand in the batch, before merging.
        second_per_grid_ts: seconds between a video's grids in time, ``[videos]``; 1 if None.
        attention_mask: ``[batch, tokens]``; where it is 0, positions are 0 and tokens are not counted.
        mm_token_type_ids: the types, where the caller has them, instead of the ids.
        text_continues: where the text after an image or video goes on. ``grid``: after the longer of its height and
            width, as transformers does since 5.0; ``last``: after the largest position it has on any axis, as sglang,
            vLLM and earlier transformers do. They differ for videos that last longer than they are wide.

    Returns:
        positions int64 ``[3, batch, tokens]`` and delta int64 ``[batch, 1]`` (``[3, tokens]`` and ``[1]`` for one
        sequence): token ``n`` of the generated text has position ``n + delta`` on every axis.

    Raises:
        ValueError: an unknown model_type; tokens that do not fit the grids, or grids without tokens.
    """
    if model_type not in _VIDEOS:
        raise ValueError(f"model_type is {model_type!r}; known are {', '.join(sorted(_VIDEOS))}")
    if text_continues not in ("grid", "last"):
        raise ValueError(f"text_continues is {text_continues!r}; expected 'grid' or 'last'")
    if input_ids is None:
        raise ValueError("input_ids is None; expected token ids [batch, tokens] or [tokens]")
    if input_ids.dim() == 1:
        positions, delta = get_rope_index(
            spatial_merge_size,
            image_token_id,
            video_token_id,
            vision_start_token_id,
            model_type,
            tokens_per_second,
            input_ids[None],
            image_grid_thw,
            video_grid_thw,
            second_per_grid_ts,
            attention_mask=None if attention_mask is None else attention_mask.view(1, -1),
            mm_token_type_ids=None if mm_token_type_ids is None else mm_token_type_ids.view(1, -1),
            video_start_token_id=video_start_token_id,
            video_end_token_id=video_end_token_id,
            text_continues=text_continues,
        )
        return positions[:, 0], delta[0]
    types = mm_token_type_ids
    if types is None:
        types = mm_token_types(
            input_ids,
            image_token_id=image_token_id,
            video_token_id=video_token_id,
            video_start_token_id=video_start_token_id,
            video_end_token_id=video_end_token_id,
        )
    steps = _time_steps(_VIDEOS[model_type], tokens_per_second, second_per_grid_ts)
    grids = {
        IMAGE: _grids("image", image_grid_thw, spatial_merge_size, None, False),
        VIDEO: _grids("video", video_grid_thw, spatial_merge_size, steps, _VIDEOS[model_type] == "frames"),
    }
    counted = torch.ones_like(types, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    positions = torch.zeros((3, *types.shape), dtype=torch.int64, device="cpu")
    deltas = []
    for row, (kinds, mask) in enumerate(zip(types.cpu(), counted.cpu())):
        found = _sequence_positions(kinds[mask].tolist(), grids, text_continues)
        positions[:, row, mask] = found
        deltas.append(int(found.max()) + 1 - found.shape[1] if found.numel() else 0)
    for grid in grids.values():
        left = next(grid, None)
        if left is not None:
            raise ValueError(f"{left[0]} has no tokens in input_ids")
    delta = torch.tensor(deltas, dtype=torch.int64, device="cpu")[:, None]
    return positions.to(input_ids.device), delta.to(input_ids.device)


def get_next_input_positions(mrope_position_delta: int, context_len: int, seq_len: int) -> Tensor:
    """Positions of the text tokens ``context_len`` to ``seq_len`` that decoding adds: int64 ``[3, tokens]``."""
    first, last = context_len + mrope_position_delta, seq_len + mrope_position_delta
    return torch.arange(first, last, device="cpu").expand(3, -1)


def _time_steps(
    videos: str, tokens_per_second: float | None, seconds: Tensor | Sequence[float] | None
) -> Iterator[float | Tensor] | None:
    """The step in time from one grid of a video to the next, video by video; None where it is 1."""
    if videos != "seconds":
        return None
    if tokens_per_second is None:
        raise ValueError("tokens_per_second is None; expected the number in the model's vision_config")
    if seconds is None:
        seconds = ()

    def steps() -> Iterator[float | Tensor]:
        for second in seconds:  # an element of a float32 tensor keeps its precision, as in transformers
            yield tokens_per_second * second
        while True:
            yield tokens_per_second

    return steps()


def _grids(
    name: str,
    sizes: Tensor | Sequence[Sequence[int]] | None,
    merge: int,
    steps: Iterator[float | Tensor] | None,
    frame_by_frame: bool,
) -> Iterator[tuple[str, Tensor, int]]:
    """Each grid in turn: what it is, its positions int64 ``[3, tokens]`` from 0 on, and the longer of its sides."""
    sizes = sizes.tolist() if isinstance(sizes, Tensor) else (() if sizes is None else sizes)
    for index, (frames, height, width) in enumerate(sizes):
        shape = (1 if frame_by_frame else int(frames), int(height) // merge, int(width) // merge)
        times, rows, columns = (torch.arange(n, dtype=torch.float32, device="cpu") for n in shape)
        if steps is not None:
            times = times * next(steps)
        grid = torch.stack(torch.meshgrid(times.long(), rows.long(), columns.long(), indexing="ij")).reshape(3, -1)
        for _ in range(int(frames) if frame_by_frame else 1):
            yield f"{name} {index} of grid {[int(frames), int(height), int(width)]}", grid, max(height, width) // merge


def _sequence_positions(
    kinds: list[int], grids: dict[int, Iterator[tuple[str, Tensor, int]]], text_continues: str
) -> Tensor:
    """Positions int64 ``[3, tokens]`` of one sequence of token types."""
    parts, at, position = [], 0, 0
    while at < len(kinds):
        kind = kinds[at]
        if kind == TEXT:
            end = next((i for i in range(at, len(kinds)) if kinds[i] != TEXT), len(kinds))
            parts.append(torch.arange(position, position + end - at, device="cpu").expand(3, -1))
            position += end - at
            at = end
            continue
        if kind not in grids:
            raise ValueError(f"token {at} has the type {kind}; expected 0 (text), 1 (image) or 2 (video)")
        what, grid, longer_side = next(grids[kind], ("", None, 0))
        if grid is None:
            name = "image_grid_thw" if kind == IMAGE else "video_grid_thw"
            raise ValueError(f"token {at} begins an image or video that {name} has no grid for")
        end = at + grid.shape[1]
        if kinds[at:end] != [kind] * grid.shape[1]:
            raise ValueError(f"{what} takes {grid.shape[1]} tokens, but from token {at} on there are fewer of its kind")
        parts.append(grid + position)
        position = int(parts[-1].max()) + 1 if text_continues == "last" else position + int(longer_side)
        at = end
    return torch.cat(parts, dim=1) if parts else torch.zeros((3, 0), dtype=torch.int64, device="cpu")
