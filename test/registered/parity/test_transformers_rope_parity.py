"""Every rotary class of the installed transformers, from its default config: the same cos and sin, bit for bit."""

import copy
import importlib
import inspect
import json
import re
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from common.ci_register import register_cpu_ci
from common.rope_config import layer_types, read_rope_config
from srt.integrations.transformers import use_live_rope
from srt.layers.rotary_embedding import get_rope_from_config
from srt.layers.rotary_embedding.factory import _ROPE_DICT

register_cpu_ci(est_time=50, suite="parity-test-cpu")

MODELS = Path(transformers.__file__).parent / "models"
ROWS = 96

# Rotary classes whose cos and sin are not compared, with the reason. Attention layers that have Rope in their names
# are no rotary classes.
NOT_COVERED = {
    "BltRotaryEmbedding": "its default config has no head size of its own; its parts' configs have",
    "ClvpRotaryPositionalEmbedding": "rotates by a learned width outside of its head, built for each input",
    "CohereCompassRotaryEmbedding": "transformers itself cannot build it from its default config",
    "DINOv3ViTRopePositionEmbedding": "positions are fractions of the image, not whole numbers",
    "DeepseekOcr2VisionRotaryEmbedding": "transformers itself cannot build it from its default config",
    "EdgeTamVideoVisionRotaryEmbedding": "its head size is said under names of its memory attention",
    "EfficientLoFTRRotaryEmbedding": "positions are those of an aggregated feature map, counted from one",
    "EomtDinov3RotaryEmbedding": "positions are fractions of the image, not whole numbers",
    "EsmFold2RotaryEmbedding": "positions are coordinates in space",
    "Glm4MoeRotaryEmbedding": "the default config's head of 42 gives an odd rotary width of 21",
    "Glm4vMoeTextRotaryEmbedding": "the default config's head of 42 gives an odd rotary width of 21",
    "Glm4vTextRotaryEmbedding": "the default config's head does not fit the sections that its code has",
    "GlmImageTextRotaryEmbedding": "the default config's head does not fit the sections that its code has",
    "HunYuanVLRotaryEmbedding": "transformers itself cannot run it without the sections that its default config lacks",
    "Llama4VisionRotaryEmbedding": "a table of one image's patches: srt's Llama4VisionRotaryEmbedding, tested there",
    "MiniMaxM3VLRotaryEmbedding": "the default config names a rotary_dim that the class itself does not use",
    "MiniMaxM3VLVisionRotaryEmbedding": "three axes of a third of the head each, the rest unrotated",
    "MusicFlamingoRotaryEmbedding": "positions are seconds; its config is read for the language model in it",
    "Nemotron3DiarizationRotaryEmbedding": "transformers itself cannot build it from its default config",
    "Qwen3OmniMoeRotaryEmbedding": "the default config's head of 73 is odd",
    "Qwen3OmniMoeTalkerRotaryEmbedding": "the default config's head of 73 is odd",
    "Qwen3OmniMoeThinkerTextRotaryEmbedding": "the default config's head of 73 is odd",
    "Qwen4ExpTextRotaryEmbedding": "the default config's head does not fit the sections that its code has",
    "Sam2VideoVisionRotaryEmbedding": "its head size is said under names of its memory attention",
    "Sam3TrackerVideoVisionRotaryEmbedding": "its head size is said under names of its memory attention",
    "Sapiens2RopePositionEmbedding": "positions are fractions of the image, not whole numbers",
    "SeamlessM4TConformerRotaryPositionalEmbedding": "its config says the number of heads under its parts' names",
}


def rotary_classes():
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w*(?:Rotary|RoPE|Rope)\w*)\(", path.read_text(), re.MULTILINE):
            if "Attention" not in name:
                yield path.parent.name, path.stem, name


ALL = list(rotary_classes())
CASES = [pytest.param(*case, id=f"{case[0]}-{case[2]}") for case in ALL if case[2] not in NOT_COVERED]
each_class = pytest.mark.parametrize(("model", "stem", "name"), CASES)


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    monkeypatch.setenv("LIVE_ROPE_TABLE_LIMIT", "8192")  # they grow where a test goes further
    yield
    _ROPE_DICT.clear()


@cache
def build(model, stem, name):
    """The class built from its default config, or from that config's text part; the config; its module."""
    module = importlib.import_module(f"transformers.models.{model}.{stem}")
    kind = getattr(module, name)
    annotation = list(inspect.signature(kind.__init__).parameters.values())[1].annotation
    if annotation is inspect.Parameter.empty:
        annotation = next(v for k, v in vars(module).items() if k.endswith("Config") and inspect.isclass(v))
    config = annotation()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return kind(config), config, module
        except AttributeError:
            config = config.get_text_config()
            return kind(config), config, module


def style_unknown(config):
    """Given where the config is that of a nameless part, or (NanoChat) of a model that turns backwards."""
    return True if config.model_type in ("", "nanochat") else None


def kinds_of(rotary):
    """The layer types that a rotary module has a rope of its own for; (None,) where all share one."""
    names = [name for name, _ in rotary.named_buffers()]
    return tuple(n.removesuffix("_inv_freq") for n in names if n.endswith("_inv_freq") and "original" not in n) or (
        None,
    )


def probe(ours):
    """Positions ``[axes, tokens]``, different on each axis, or ``[tokens]``."""
    last = min(ours.spec.full_rows, 8192) - 1
    positions = torch.cat((torch.arange(ROWS), torch.linspace(0, last, 16).long())).clamp(max=last)
    axes = ours.spec.pair_axes
    return positions if axes is None else torch.stack([positions.roll(7 * axis) for axis in range(1 + max(axes))])


def our_cos_sin(ours, positions):
    """cos and sin, each ``[tokens, pairs]``, as the module's own forward applies them: to the vectors (1, 0)."""
    unit = torch.zeros(ours.head_size)
    half = ours.rotary_dim // 2
    unit[: half if ours.is_neox_style else ours.rotary_dim : 1 if ours.is_neox_style else 2] = 1.0
    turned, _ = ours(positions, unit.expand(positions.shape[-1], 1, -1))
    turned = turned[:, 0, : ours.rotary_dim]
    return (turned[:, :half], turned[:, half:]) if ours.is_neox_style else (turned[:, ::2], turned[:, 1::2])


def their_output(rotary, positions, kind):
    """What ``rotary`` itself returns for ``positions``, by whichever interface it has."""
    x = torch.zeros(1, positions.shape[-1], 8)
    extra = () if kind is None else (kind,)
    if "hidden_states" in inspect.signature(rotary.forward).parameters:  # wav2vec2's: all tokens of x in turn
        table = rotary(torch.zeros(1, int(positions.max()) + 1, 8))
        return tuple(part[positions, 0] for part in table)
    if positions.dim() == 1:
        return rotary(x, positions[None], *extra)
    if "axial" in getattr(rotary, "rope_type", ""):
        ids = positions.T.contiguous()
        return rotary(x, ids[None] if getattr(rotary.config, "model_type", "") == "gemma4_vision" else ids, *extra)
    return rotary(x, positions[:, None], *extra)


def halves(table):
    """``[tokens, pairs]`` of a table that has each pair's value once or twice."""
    width = table.shape[-1] // 2
    if torch.equal(table[:, :width], table[:, width:]):
        return table[:, :width]
    if torch.equal(table[:, ::2], table[:, 1::2]):
        return table[:, ::2]
    quarter = width // 2  # Gemma 4's vision tower: rows twice, then columns twice
    if torch.equal(table[:, :quarter], table[:, quarter:width]) and torch.equal(
        table[:, width:-quarter], table[:, -quarter:]
    ):
        return torch.cat((table[:, :quarter], table[:, width:-quarter]), dim=-1)
    return table


def test_the_classes_not_covered_exist(capsys):
    with capsys.disabled():
        print(f"\n{len(CASES)} of {len(ALL)} rotary classes of transformers {transformers.__version__} are compared")
    assert NOT_COVERED.keys() <= {name for _, _, name in ALL}


@each_class
def test_same_bits(model, stem, name):
    rotary, config, _ = build(model, stem, name)
    longest = None if hasattr(config, "max_position_embeddings") else 1024
    for kind in kinds_of(rotary):
        ours = get_rope_from_config(config, layer_type=kind, max_position=longest, is_neox_style=style_unknown(config))
        positions = probe(ours)
        mine = our_cos_sin(ours, positions)
        theirs = their_output(rotary, positions, kind)
        if isinstance(theirs, torch.Tensor) and theirs.is_complex():
            # torch.polar rounds otherwise than cos and sin: to the bit are the angles that it is given
            assert torch.equal(rotary.inv_freq, ours.spec.frequencies()[0])
            for part, our in zip((theirs.real, theirs.imag), mine):
                torch.testing.assert_close(part[0], our, rtol=0, atol=6e-8)
            continue
        if name in ("CodeGenRotaryEmbedding", "GPTJRotaryEmbedding"):
            theirs = theirs[::-1]
        for their, our in zip(theirs, mine):
            their = their.reshape(positions.shape[-1], -1)
            their = their if their.shape == our.shape else halves(their)
            assert torch.equal(their, our)


def apply_function(module, name):
    """The function of a rotary class' module that turns queries by its cos and sin."""
    vision = "Vision" in name
    order = ("apply_rotary_pos_emb_vision", "apply_rotary_pos_emb_2d") if vision else ()
    order += () if "Audio" in name else ("apply_rotary_pos_emb_interleave",)
    for wanted in (*order, "apply_rotary_pos_emb", "apply_rotary_emb"):
        if hasattr(module, wanted):
            return getattr(module, wanted)
    return None


def turned_by(function, query, output):
    """``query``, ``[1, heads, tokens, width]``, turned by ``function``."""
    if isinstance(output, torch.Tensor):  # complex: [batch, tokens, heads, width] for Llama 4
        result = function(query, query, output)
    else:
        cos, sin = (part.float() for part in output)
        count = len([p for p in inspect.signature(function).parameters.values() if p.default is p.empty])
        if "vision" in function.__name__:
            flat = query[0].transpose(0, 1)
            result = [part.transpose(0, 1)[None] for part in function(flat, flat, cos, sin)]
        else:
            result = function(query, cos, sin) if count == 3 else function(query, query, cos, sin)
    return result[0] if isinstance(result, (tuple, list)) else result


@each_class
def test_same_pairs(model, stem, name):
    rotary, config, module = build(model, stem, name)
    function = apply_function(module, name)
    kind = kinds_of(rotary)[0]
    longest = None if hasattr(config, "max_position_embeddings") else 1024
    ours = get_rope_from_config(config, layer_type=kind, max_position=longest, is_neox_style=style_unknown(config))
    output = their_output(rotary, probe(ours), kind)
    if function is None or name in ("CodeGenRotaryEmbedding", "GPTJRotaryEmbedding"):
        pytest.skip(f"{module.__name__} has no function that applies cos and sin in the usual order")
    tokens, width = probe(ours).shape[-1], ours.rotary_dim

    def support(element):
        """Which elements of a head are reached from ``element``, at the token of position 1."""
        query = torch.zeros(1, 1, tokens, width)
        query[..., element] = 1.0
        turned = turned_by(function, query, output)
        if turned.numel() != query.numel():  # it wants the tokens before the heads
            turned = turned_by(function, query.transpose(1, 2), output)
        return frozenset(turned.reshape(tokens, width)[1:3].abs().sum(0).nonzero().flatten().tolist())

    partner = next(e for e in range(1, width) if support(e) == support(0))
    assert partner == (width // 2 if ours.is_neox_style else 1)


# --- the same ropes from other spellings ------------------------------------------------------------------------------


def config_classes():
    """Every config class that a rotary class is built from, or that such a config holds for its text."""
    seen = {}
    for model, stem, name in ALL:
        if name in NOT_COVERED:
            continue
        _, config, _ = build(model, stem, name)
        if config.model_type and hasattr(config, "rope_parameters"):
            seen[type(config).__name__] = config
    return seen


def reading(config, kind):
    try:
        return read_rope_config(config, layer_type=kind, is_neox_style=True)
    except ValueError as error:
        if "give max_position" not in str(error):
            raise
        return read_rope_config(config, layer_type=kind, max_position=1024, is_neox_style=True)


def test_a_config_json_reads_as_its_config():
    for name, config in config_classes().items():
        for kind in layer_types(config) or (None,):
            assert reading(config.to_dict(), kind) == reading(config, kind), name


def test_an_older_config_json_reads_as_its_config():
    """rope_theta, rope_scaling and partial_rotary_factor beside each other, as before transformers 5."""
    read = 0
    for name, config in config_classes().items():
        old = config.to_dict()
        parameters = dict(old.pop("rope_parameters") or {})
        if any(isinstance(value, dict) for value in parameters.values()) or parameters.get("rope_type") == "axial":
            continue
        old["rope_theta"] = parameters.pop("rope_theta")
        if parameters.get("partial_rotary_factor") is not None:
            old["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
        parameters["type"] = parameters.pop("rope_type")
        old["rope_scaling"] = None if parameters == {"type": "default"} else parameters
        assert reading(old, None) == reading(config, None), name
        read += 1
    assert read > 100


def test_a_config_json_without_its_rope_reads_as_its_class_would():
    """What a class has as a default is known: a base, a partial factor, sections of axes. A whole scaling is not, and is
    asked for."""
    read = 0
    for name, config in config_classes().items():
        bare = config.to_dict()
        for key in ("rope_parameters", "rope_theta", "partial_rotary_factor", "rope_scaling"):
            bare.pop(key, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = type(config)(**bare)
        for kind in layer_types(whole) or (None,):
            try:
                ours = reading(bare, kind)
            except ValueError as error:
                assert "rope_parameters, which model_type" in str(error), name
                continue
            assert ours == reading(whole, kind), name
            read += 1
    assert read > 150


def test_a_config_of_several_parts_reads_as_its_text_part():
    read = 0
    for path in sorted(MODELS.glob("*/configuration_*.py")):
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for kind in vars(module).values():
            if not (inspect.isclass(kind) and issubclass(kind, transformers.PreTrainedConfig)):
                continue
            try:
                config = kind()
                text = config.get_text_config()
            except Exception:  # noqa: BLE001 - a class without a default config says so in many ways
                continue
            if text is config or not getattr(text, "rope_parameters", None):
                continue
            for layer_type in layer_types(text) or (None,):
                try:
                    expected = reading(text, layer_type)
                except ValueError:  # one of those not covered, see above
                    continue
                assert reading(config, layer_type) == reading(config.to_dict(), layer_type) == expected
                read += 1
    assert read > 100


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def test_a_config_json_of_each_age_gives_the_same_module():
    new = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072}
    ages = [
        {**new, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {**new, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {**new, "rope_theta": 500000, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {
            "model_type": "x",
            "text_config": {**new, "rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        },
    ]
    assert len({id(get_rope_from_config(config)) for config in ages}) == 1
    assert layer_types(ages[0]) == ()


# --- other parameters than the defaults ------------------------------------------------------------------------------

SCALED = {
    "linear": dict(factor=4.0),
    "llama3": LLAMA3,
    "yarn": dict(factor=4.0, original_max_position_embeddings=32768),
    "yarn, not truncated": dict(factor=32.0, original_max_position_embeddings=4096, truncate=False, beta_fast=32.0),
    "yarn, mscale": dict(
        factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0, beta_slow=1
    ),
    "yarn, two mscales": dict(factor=40, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=1.3),
    "yarn, one mscale": dict(factor=40, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.0),
    "yarn, attention factor": dict(factor=8.0, original_max_position_embeddings=4096, attention_factor=1.25),
    "yarn, betas": dict(factor=8.0, original_max_position_embeddings=4096, beta_fast=17.3, beta_slow=0.6),
    "yarn, no original length": dict(factor=4.0),
    "yarn, factor from the lengths": dict(factor=None, original_max_position_embeddings=32768),
    "longrope": dict(
        short_factor=[1.0 + 0.01 * i for i in range(64)],
        long_factor=[1.0 + 0.9 * i for i in range(64)],
        original_max_position_embeddings=4096,
    ),
    "longrope, factors": dict(
        short_factor=[1.0 + 0.01 * i for i in range(64)],
        long_factor=[1.0 + 0.9 * i for i in range(64)],
        original_max_position_embeddings=4096,
        factor=5.0,
    ),
    "longrope, attention factor": dict(
        short_factor=[1.0 + 0.01 * i for i in range(64)],
        long_factor=[1.0 + 0.9 * i for i in range(64)],
        original_max_position_embeddings=4096,
        attention_factor=1.19,
    ),
    "proportional": dict(partial_rotary_factor=0.25),
    "proportional, factor": dict(partial_rotary_factor=0.3, factor=8.0),
    "dynamic": dict(factor=4.0),
}


@pytest.mark.parametrize("theta", [10000.0, 8_000_000.0])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_ropes_have_the_same_bits(name, theta):
    kind = name.partition(",")[0]
    parameters = {"rope_type": kind, "rope_theta": theta, **SCALED[name]}
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=dict(parameters)
    )
    for length in (4096, 4097, 131072, 131073, 400_000) if kind in ("longrope", "dynamic") else (131072,):
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        ours = get_rope_from_config(config, max_position=length)
        positions = torch.cat((torch.arange(ROWS), torch.linspace(0, length - 1, 64).long()))
        theirs = rotary(torch.zeros(1, 1, 8), positions[None])
        for their, our in zip(theirs, our_cos_sin(ours, positions)):
            assert torch.equal(their[0, :, :64], our)


PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_the_same_bits(name):
    """From the fields of a config.json, read by its transformers class there and by us here."""
    published = PUBLISHED[name]
    module, _, kind = published["rotary"].rpartition(".")
    fields = published["config"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, published["config_class"])(**copy.deepcopy(fields))
        rotary = getattr(importlib.import_module(f"transformers.models.{module}"), kind)(config)
    longest = min(fields["max_position_embeddings"], 150_000)
    lengths = (fields["original_max_position_embeddings"], longest) if kind.startswith("Phi3") else (longest,)
    for length in lengths:
        for layer_type in kinds_of(rotary):
            ours = get_rope_from_config(fields, layer_type=layer_type, max_position=length)
            positions = torch.cat((torch.arange(ROWS), torch.linspace(0, length - 1, 64).long()))
            if ours.spec.pair_axes is not None:
                positions = torch.stack([positions.roll(7 * axis) for axis in range(3)])
            theirs = their_output(rotary, positions, layer_type)
            if isinstance(theirs, torch.Tensor):
                assert torch.equal(rotary.inv_freq, ours.spec.frequencies()[0])
                continue
            for their, our in zip(theirs, our_cos_sin(ours, positions)):
                their = their.reshape(positions.shape[-1], -1)
                assert torch.equal(their if their.shape == our.shape else halves(their), our)


# --- models whose rotary modules are swapped --------------------------------------------------------------------------

STAY = {
    "CodeGenRotaryEmbedding": "a config",  # its model has one
    "EsmRotaryEmbedding": "state dict",
    "EvollaSaProtRotaryEmbedding": "state dict",
    "GPTJRotaryEmbedding": "a config",  # its model has one
    "MistralLarge4TextRotaryEmbedding": "learned parameters",
    "Sam3ViTRotaryEmbedding": "not those of its config",
    "Wav2Vec2BertRotaryPositionalEmbedding": "a config",
    "Wav2Vec2ConformerRotaryPositionalEmbedding": "state dict",
}


@each_class
def test_a_swapped_module_gives_the_same_bits_when_its_tables_are_ruined(model, stem, name):
    rotary, config, _ = build(model, stem, name)
    kind = kinds_of(rotary)[-1]
    longest = None if hasattr(config, "max_position_embeddings") else 1024
    positions = probe(get_rope_from_config(config, layer_type=kind, max_position=longest, is_neox_style=True))
    holder = torch.nn.Module()
    holder.rotary_emb = rotary
    report = use_live_rope(holder)
    if name in STAY:
        assert STAY[name] in report.kept["rotary_emb"] and holder.rotary_emb is rotary
        return
    assert report.swapped == ["rotary_emb"], str(report)
    live = holder.rotary_emb
    live.half()
    for table in live.buffers():
        table.data.fill_(3.0)
    theirs, ours = (their_output(each, positions, kind) for each in (rotary, live))
    if isinstance(theirs, torch.Tensor):
        theirs, ours = (theirs,), (ours,)
    for their, our in zip(theirs, ours, strict=True):
        assert torch.equal(their, our) and their.dtype == our.dtype


def test_a_rope_for_each_layer_type_needs_the_type():
    config = transformers.Gemma3TextConfig()
    assert set(layer_types(config)) == {"full_attention", "sliding_attention"}
    with pytest.raises(ValueError, match="layer_type"):
        get_rope_from_config(config)
    bases = {kind: get_rope_from_config(config, layer_type=kind).base for kind in layer_types(config)}
    assert bases == {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
