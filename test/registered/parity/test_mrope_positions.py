"""Positions of mixed text and vision tokens against transformers' own get_rope_index, and by hand."""

import random
import sys
import types

import pytest
import torch
from transformers.models.glm4v.modeling_glm4v import Glm4vModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from common.ci_register import register_cpu_ci
from srt.layers.rotary_embedding import MRotaryEmbedding
from srt.layers.rotary_embedding.mrope_positions import get_next_input_positions, get_rope_index, mm_token_types

register_cpu_ci(est_time=15, suite="parity-test-cpu")

MODELS = {
    "qwen2_vl": Qwen2VLModel,
    "qwen2_5_vl": Qwen2_5_VLModel,
    "qwen3_vl": Qwen3VLModel,
    "glm4v": Glm4vModel,
}
FRAMES_APART = ("qwen3_vl", "glm4v")
IMAGE, VIDEO, START, END, VIDEO_START, VIDEO_END = 900, 901, 902, 903, 904, 905
MERGE, PER_SECOND = 2, 4


def transformers_rope_index(model_type, ids, types_, images, videos, seconds, mask):
    """Their method, on an object that has what it reads."""
    kind = MODELS[model_type]
    owner = types.SimpleNamespace(
        config=types.SimpleNamespace(
            vision_config=types.SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=PER_SECOND)
        )
    )
    owner.get_vision_position_ids = types.MethodType(kind.get_vision_position_ids, owner)
    extra = {"second_per_grid_ts": seconds} if model_type == "qwen2_5_vl" else {}
    return kind.get_rope_index(
        owner, ids, types_, image_grid_thw=images, video_grid_thw=videos, attention_mask=mask, **extra
    )


def sequence(draw, model_type):
    """Token ids of one random sequence, its image and its video grids."""
    ids, images, videos = [], [], []
    text = lambda: [draw.randrange(800) for _ in range(draw.randrange(1, 6))]  # noqa: E731
    ids += text()
    for _ in range(draw.randrange(4)):
        grid = [draw.randrange(1, 5), MERGE * draw.randrange(1, 5), MERGE * draw.randrange(1, 5)]
        tokens = grid[1] * grid[2] // MERGE**2
        if draw.random() < 0.5:
            images.append([1, *grid[1:]])
            ids += [START, *[IMAGE] * tokens, END]
        else:
            videos.append(grid)
            mark = IMAGE if model_type == "glm4v" else VIDEO
            if model_type in FRAMES_APART:
                frames = [token for _ in range(grid[0]) for token in (*text(), *[mark] * tokens)]
                ids += [VIDEO_START, *frames, VIDEO_END]
            else:
                ids += [START, *[mark] * (tokens * grid[0]), END]
        ids += text()
    return ids, images, videos


def batch(draw, model_type, size=3, left=False):
    rows = [sequence(draw, model_type) for _ in range(size)]
    longest = max(len(ids) for ids, _, _ in rows)
    pad = [longest - len(ids) for ids, _, _ in rows]
    ids = torch.tensor([[7] * p + r[0] if left else r[0] + [7] * p for p, r in zip(pad, rows)])
    mask = torch.tensor([[0] * p + [1] * len(r[0]) if left else [1] * len(r[0]) + [0] * p for p, r in zip(pad, rows)])
    images = [g for row in rows for g in row[1]]
    videos = [g for row in rows for g in row[2]]
    tensor = lambda grids: torch.tensor(grids) if grids else None  # noqa: E731
    return ids, mask, tensor(images), tensor(videos)


@pytest.mark.parametrize("as_list", [False, True], ids=["seconds as tensor", "seconds as list"])
@pytest.mark.parametrize("model_type", MODELS)
def test_positions_and_delta_equal_transformers(model_type, as_list):
    draw = random.Random(f"{model_type}{as_list}")
    for trial in range(40):
        ids, mask, images, videos = batch(draw, model_type, left=trial % 2)
        seconds = None
        if videos is not None and trial % 3:
            seconds = [draw.choice([0.5, 1.0, 0.3, 1.7, 2.0833]) for _ in videos]
            seconds = seconds if as_list else torch.tensor(seconds)
        glm = {"video_start_token_id": VIDEO_START, "video_end_token_id": VIDEO_END} if model_type == "glm4v" else {}
        video_token = None if model_type == "glm4v" else VIDEO
        kinds = mm_token_types(ids, image_token_id=IMAGE, video_token_id=video_token, **glm)
        theirs = transformers_rope_index(model_type, ids, kinds, images, videos, seconds, mask)
        ours = get_rope_index(
            MERGE,
            IMAGE,
            video_token,
            START,
            model_type,
            PER_SECOND,
            ids,
            images,
            videos,
            seconds,
            attention_mask=mask,
            **glm,
        )
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_one_image_between_text():
    ids = torch.tensor([1, 2, *[IMAGE] * 6, 3])
    positions, delta = get_rope_index(2, IMAGE, VIDEO, START, "qwen2_vl", input_ids=ids, image_grid_thw=[[1, 4, 6]])
    time, height, width = [0, 1, *[2] * 6, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]
    assert positions.tolist() == [time, height, width]
    assert delta.tolist() == [6 - 9]
    assert get_next_input_positions(int(delta), 9, 11).tolist() == [[6, 7]] * 3


def test_the_layer_has_them_as_upstreams_does():
    ids = torch.arange(5)
    positions, delta = MRotaryEmbedding.get_rope_index(2, IMAGE, VIDEO, START, "qwen2_vl", None, ids)
    assert positions.tolist() == [list(range(5))] * 3
    assert MRotaryEmbedding.get_next_input_positions(int(delta), 5, 6).tolist() == [[5]] * 3


def test_text_alone_counts_up():
    positions, delta = get_rope_index(2, IMAGE, VIDEO, START, "qwen3_vl", input_ids=torch.arange(8).view(2, 4))
    assert positions.tolist() == [[[0, 1, 2, 3]] * 2] * 3
    assert delta.tolist() == [[0], [0]]


def test_images_side_by_side_are_told_apart_by_their_grids():
    ids = torch.tensor([*[IMAGE] * 5, 1])
    positions, _ = get_rope_index(
        1, IMAGE, VIDEO, START, "qwen2_vl", input_ids=ids, image_grid_thw=[[1, 2, 2], [1, 1, 1]]
    )
    assert positions[1].tolist() == [0, 0, 1, 1, 2, 3]


def test_text_after_a_long_video_by_either_convention():
    ids = torch.tensor([*[VIDEO] * 10, 1])
    arguments = dict(input_ids=ids, video_grid_thw=[[10, 2, 2]])
    assert get_rope_index(2, IMAGE, VIDEO, START, "qwen2_vl", **arguments)[0][:, -1].tolist() == [1] * 3
    last = get_rope_index(2, IMAGE, VIDEO, START, "qwen2_vl", **arguments, text_continues="last")
    assert last[0][:, -1].tolist() == [10] * 3
    assert last[1].tolist() == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(model_type="llama", input_ids=torch.arange(3)), "model_type is 'llama'; known are"),
        (dict(model_type="qwen2_vl"), "input_ids is None"),
        (dict(model_type="qwen2_vl", input_ids=torch.tensor([1, IMAGE])), "image_grid_thw has no grid"),
        (
            dict(model_type="qwen2_vl", input_ids=torch.tensor([1, IMAGE, 2]), image_grid_thw=[[1, 4, 4]]),
            r"image 0 of grid \[1, 4, 4\] takes 4 tokens",
        ),
        (
            dict(model_type="qwen2_vl", input_ids=torch.tensor([1, 2]), image_grid_thw=torch.tensor([[1, 2, 2]])),
            r"image 0 of grid \[1, 2, 2\] has no tokens",
        ),
        (dict(model_type="qwen2_5_vl", input_ids=torch.tensor([1])), "tokens_per_second is None"),
        (dict(model_type="qwen2_vl", input_ids=torch.tensor([1]), text_continues="end"), "text_continues is 'end'"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_rope_index(2, IMAGE, VIDEO, START, **arguments)


def test_positions_do_not_depend_on_the_default_device_or_dtype():
    ids = torch.tensor([1, *[VIDEO] * 6, 3])
    arguments = (2, IMAGE, VIDEO, START, "qwen2_5_vl", 25, ids, None, [[3, 2, 4]], [0.3])
    expected = get_rope_index(*arguments)
    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = get_rope_index(*arguments)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
