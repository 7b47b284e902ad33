"""Every rotary class of the installed transformers, from its default config: the same cos and sin, bit for bit."""

import importlib
import inspect
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from common.ci_register import register_cpu_ci
from common.rope_config import layer_types
from srt.layers.rotary_embedding import get_rope_from_config
from srt.layers.rotary_embedding.factory import _ROPE_DICT

register_cpu_ci(est_time=60, suite="parity-test-cpu")

MODELS = Path(transformers.__file__).parent / "models"
ROWS = 96

# Classes that are not a rope of a config, or that cannot be built from one, with the reason.
NOT_COVERED = {
    "BltRotaryEmbedding": "its config has no head size of its own; its parts' configs have",
    "ClvpRotaryPositionalEmbedding": "rotates by a learned width outside of its head, built for each input",
    "CohereCompassRotaryEmbedding": "transformers itself cannot build it from its default config",
    "DINOv3ViTRopePositionEmbedding": "positions are fractions of the image, not whole numbers",
    "DeepseekOcr2VisionRotaryEmbedding": "transformers itself cannot build it from its default config",
    "Dots3NoteTextRotaryEmbedding": "its numbers of heads differ by layer, under layer types that its config does not list",
    "EdgeTamVideoRoPECrossAttention": "an attention layer, not a rope",
    "EdgeTamVideoRoPESelfAttention": "an attention layer, not a rope",
    "EdgeTamVideoVisionRotaryEmbedding": "cos and sin of one fixed grid, stored as buffers",
    "EfficientLoFTRRotaryEmbedding": "positions are those of an aggregated feature map, counted from one",
    "EomtDinov3RotaryEmbedding": "positions are fractions of the image, not whole numbers",
    "EsmFold2RotaryEmbedding": "takes the config of one part under another name",
    "Glm4MoeRotaryEmbedding": "the default config's head of 42 gives an odd rotary width of 21",
    "Glm4vMoeTextRotaryEmbedding": "the default config's head of 42 gives an odd rotary width of 21",
    "Llama4VisionRotaryEmbedding": "positions are one patch's row and column, and the class token stands still",
    "MiniMaxM3VLRotaryEmbedding": "the default config names a rotary_dim that the class itself does not use",
    "MiniMaxM3VLVisionRotaryEmbedding": "three axes of a third of the head each, the rest unrotated",
    "Nemotron3DiarizationRotaryEmbedding": "transformers itself cannot build it from its default config",
    "Qwen3OmniMoeRotaryEmbedding": "the default config's head of 73 is odd",
    "Qwen3OmniMoeTalkerRotaryEmbedding": "the default config's head of 73 is odd",
    "Qwen3OmniMoeThinkerTextRotaryEmbedding": "the default config's head of 73 is odd",
    "Sam2VideoRoPEAttention": "an attention layer, not a rope",
    "Sam2VideoVisionRotaryEmbedding": "cos and sin of one fixed grid, stored as buffers",
    "Sam3TrackerVideoRoPEAttention": "an attention layer, not a rope",
    "Sam3TrackerVideoVisionRotaryEmbedding": "cos and sin of one fixed grid, stored as buffers",
    "Sam3ViTRoPEAttention": "an attention layer, not a rope",
    "Sapiens2RopePositionEmbedding": "positions are fractions of the image, not whole numbers",
    "SeamlessM4TConformerRotaryPositionalEmbedding": "its config says the width under names of its own parts",
    "VJEPA2RopeAttention": "an attention layer, not a rope",
    "Wav2Vec2BertRotaryPositionalEmbedding": "its base is called rotary_embedding_base, its table follows the input",
    "Wav2Vec2ConformerRotaryPositionalEmbedding": "its base is called rotary_embedding_base, its table follows the input",
}


def rotary_classes():
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        names = re.findall(r"^class (\w*(?:Rotary|RoPE|Rope)\w*)\(", path.read_text(), re.MULTILINE)
        for name in names:
            yield path.parent.name, path.stem, name


CASES = [pytest.param(*case, id=f"{case[0]}-{case[2]}") for case in rotary_classes() if case[2] not in NOT_COVERED]


def build(model, stem, name):
    """The class built from its default config, or from that config's text part, with the config."""
    module = importlib.import_module(f"transformers.models.{model}.{stem}")
    kind = getattr(module, name)
    annotation = next(p for p in inspect.signature(kind.__init__).parameters.values() if p.name == "config").annotation
    config = annotation()
    try:
        return kind(config), config
    except AttributeError:
        config = config.get_text_config()
        return kind(config), config


def test_the_classes_not_covered_exist(capsys):
    with capsys.disabled():
        print(
            f"\n{len(CASES)} of {len(list(rotary_classes()))} rotary classes of transformers {transformers.__version__}"
        )
    assert NOT_COVERED.keys() <= {name for _, _, name in rotary_classes()}


@pytest.mark.parametrize(("model", "stem", "name"), CASES)
def test_same_bits(model, stem, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, config = build(model, stem, name)
    buffers = dict(theirs.named_buffers())
    frequencies = [n for n in buffers if n.endswith("inv_freq") and "original" not in n]
    longest = None if hasattr(config, "max_position_embeddings") else 1024
    if not frequencies:  # GPT-J's and Llama 4 vision's kind: the table itself
        ours = get_rope_from_config(config, max_position=longest)
        assert table_of(buffers, ours)
        return
    for buffer in frequencies:
        layer_type = buffer.removesuffix("_inv_freq") if buffer != "inv_freq" else None
        ours = get_rope_from_config(config, layer_type=layer_type, max_position=longest)
        prefix = f"{layer_type}_" if layer_type else ""
        scale = getattr(theirs, f"{prefix}attention_scaling", 1.0)
        inv_freq = buffers[buffer]
        angles = torch.arange(ROWS, dtype=torch.float32)[:, None] * inv_freq
        cos, sin = (angles.cos() * scale, angles.sin() * scale)
        ours.reserve(ROWS)
        table = ours.cos_sin_cache[:ROWS]
        our_cos, our_sin = table.chunk(2, dim=-1)
        if ours.spec.rope_type == "axial" and our_cos.shape[1] == 2 * cos.shape[1]:  # one table, used for both axes
            cos, sin = cos.repeat(1, 2), sin.repeat(1, 2)
        if (
            model.startswith("ernie4_5_vl") and ours.spec.rope_type == "default"
        ):  # Ernie keeps its pairs in another order
            order = torch.argsort(inv_freq, descending=True)
            cos, sin = cos[:, order], sin[:, order]
        assert torch.equal(our_cos, cos) and torch.equal(our_sin, sin)
        if layer_type is None and ours.spec.pair_axes is None:
            assert_forward_equal(theirs, ours)
    _ROPE_DICT.clear()


def assert_forward_equal(theirs, ours):
    """The cos and sin that the class itself returns for positions are rows of our table."""
    positions = torch.tensor([[0, 1, 5, ROWS - 1]])
    try:
        cos, sin = theirs(torch.zeros(1, 4, 8), positions)
    except (TypeError, ValueError, IndexError, RuntimeError, AttributeError):
        return  # another interface (vision grids); its frequencies were compared above
    our_cos, our_sin = (half[positions[0]] for half in ours.cos_sin_cache.chunk(2, dim=-1))
    for their, our in ((cos, our_cos), (sin, our_sin)):
        their = their.reshape(4, -1)
        half = our.shape[1]
        if their.shape[1] == half:
            assert torch.equal(their, our)
        elif their.shape[1] == 2 * half:
            assert torch.equal(their[:, :half], our) or torch.equal(their[:, ::2], our)


def table_of(buffers, ours):
    """Whether a class' stored table is ours: sines then cosines (GPT-J), or complex numbers."""
    (table,) = buffers.values()
    ours.reserve(len(table))
    cos, sin = ours.cos_sin_cache[: len(table)].chunk(2, dim=-1)
    if table.is_complex():
        return torch.equal(table.real.reshape(cos.shape), cos) and torch.equal(table.imag.reshape(sin.shape), sin)
    return torch.equal(table, torch.cat((sin, cos), dim=-1))


def test_a_config_json_of_each_age_reads_alike():
    new = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072}
    llama3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    ages = [
        {**new, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **llama3}},
        {**new, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **llama3}},
        {**new, "rope_theta": 500000, "rope_scaling": {"type": "llama3", **llama3}},
        {
            "model_type": "x",
            "text_config": {**new, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **llama3}},
        },
    ]
    assert len({id(get_rope_from_config(config)) for config in ages}) == 1
    assert layer_types(ages[0]) == ()


def test_a_rope_for_each_layer_type_needs_the_type():
    config = transformers.Gemma3TextConfig()
    assert set(layer_types(config)) == {"full_attention", "sliding_attention"}
    with pytest.raises(ValueError, match="layer_type"):
        get_rope_from_config(config)
    bases = {kind: get_rope_from_config(config, layer_type=kind).base for kind in layer_types(config)}
    assert bases == {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


def test_what_would_be_dropped_is_an_error():
    config = dict(hidden_size=64, num_attention_heads=2, max_position_embeddings=64)
    with pytest.raises(ValueError, match="wobble"):
        get_rope_from_config({**config, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 3}})
    with pytest.raises(ValueError, match="max_position"):
        get_rope_from_config(dict(hidden_size=64, num_attention_heads=2))
    with pytest.raises(ValueError, match="head_dim"):
        get_rope_from_config(dict(max_position_embeddings=64))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
