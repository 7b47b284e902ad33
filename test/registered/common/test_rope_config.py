"""Published and older configs, as dicts: what their models' code would read, or an error that names the field."""

import sys

import pytest

from common.ci_register import register_cpu_ci
from common.rope_config import layer_types, read_rope_config
from srt.layers.rotary_embedding import get_rope_from_config

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

# config.json of published models, the fields that speak of the rope and of sizes: what is read of them.
# (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)
PUBLISHED = {
    "huggyllama/llama-7b": (
        dict(model_type="llama", hidden_size=4096, num_attention_heads=32, max_position_embeddings=2048),
        (128, 128, 2048, 10000.0, True, None),
    ),
    "meta-llama/Llama-3.1-8B": (
        dict(
            model_type="llama", hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072,
            rope_theta=500000.0,
            rope_scaling=dict(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
                rope_type="llama3",
            ),
        ),
        (
            128, 128, 131072, 500000.0, True,
            dict(
                rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
    ),
    "EleutherAI/pythia-6.9b": (
        dict(
            model_type="gpt_neox", hidden_size=4096, num_attention_heads=32, max_position_embeddings=2048,
            rotary_emb_base=10000, rotary_pct=0.25,
        ),
        (128, 32, 2048, 10000.0, True, None),
    ),
    "EleutherAI/gpt-j-6b": (
        dict(model_type="gptj", n_embd=4096, n_head=16, n_positions=2048, rotary_dim=64, rotary=True),
        (256, 64, 2048, 10000.0, False, None),
    ),
    "nomic-ai/nomic-embed-text-v1.5": (
        dict(
            model_type="nomic_bert", n_embd=768, n_head=12, n_positions=8192, rotary_emb_base=1000,
            rotary_emb_fraction=1.0, rotary_emb_interleaved=False, rotary_emb_scale_base=None, rotary_scaling_factor=None,
        ),
        (64, 64, 8192, 1000.0, True, None),
    ),
    "tiiuae/falcon-7b": (
        dict(model_type="falcon", hidden_size=4544, num_attention_heads=71, alibi=False, max_position_embeddings=2048),
        (64, 64, 2048, 10000.0, True, None),
    ),
    "THUDM/chatglm3-6b-32k": (
        dict(
            model_type="chatglm", hidden_size=4096, num_attention_heads=32, kv_channels=128, seq_length=32768,
            rope_ratio=50,
        ),
        (128, 64, 32768, 500000.0, False, None),
    ),
    "microsoft/phi-2": (
        dict(
            model_type="phi", hidden_size=2560, num_attention_heads=32, max_position_embeddings=2048, rope_theta=10000.0,
            partial_rotary_factor=0.4, rope_scaling=None,
        ),
        (80, 32, 2048, 10000.0, True, None),
    ),
    "stabilityai/stablelm-2-12b": (
        dict(
            model_type="stablelm", hidden_size=5120, num_attention_heads=32, max_position_embeddings=4096, rope_theta=10000,
            partial_rotary_factor=0.25,
        ),
        (160, 40, 4096, 10000.0, True, None),
    ),
    "deepseek-ai/DeepSeek-V3": (
        dict(
            model_type="deepseek_v3", hidden_size=7168, num_attention_heads=128, qk_rope_head_dim=64, qk_nope_head_dim=128,
            v_head_dim=128, max_position_embeddings=163840, rope_theta=10000,
            rope_scaling=dict(
                beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                original_max_position_embeddings=4096, type="yarn",
            ),
        ),
        (
            64, 64, 163840, 10000.0, False,
            dict(
                rope_type="yarn", beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                original_max_position_embeddings=4096,
            ),
        ),
    ),
    "Qwen/Qwen2-VL-7B-Instruct": (
        dict(
            model_type="qwen2_vl", hidden_size=3584, num_attention_heads=28, max_position_embeddings=32768,
            rope_theta=1000000.0, rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
            vision_config=dict(embed_dim=1280, num_heads=16),
        ),
        (
            128, 128, 32768, 1e6, True,
            dict(rope_type="mrope", mrope_section=[16, 24, 24], mrope_layout="chunked"),
        ),
    ),
    "Qwen/Qwen3-VL-8B-Instruct": (
        dict(
            model_type="qwen3_vl",
            text_config=dict(
                model_type="qwen3_vl_text", head_dim=128, hidden_size=4096, num_attention_heads=32,
                max_position_embeddings=262144, rope_theta=5000000,
                rope_scaling=dict(mrope_interleaved=True, mrope_section=[24, 20, 20], rope_type="default"),
            ),
        ),
        (
            128, 128, 262144, 5e6, True,
            dict(rope_type="default", mrope_section=[24, 20, 20], mrope_layout="interleaved"),
        ),
    ),
    "tencent/Hunyuan-A13B-Instruct": (
        dict(
            model_type="hunyuan_v1_moe", hidden_size=4096, num_attention_heads=32, head_dim=128,
            max_position_embeddings=32768, rope_theta=10000.0,
            rope_scaling=dict(
                alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0, type="dynamic"
            ),
        ),
        (
            128, 128, 32768, 10000.0, True,
            dict(
                rope_type="dynamic", alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0
            ),
        ),
    ),
    "databricks/dbrx-instruct": (
        dict(
            model_type="dbrx", d_model=6144, n_heads=48, max_seq_len=32768,
            attn_config=dict(clip_qkv=8, kv_n_heads=8, rope_theta=500000),
        ),
        (128, 128, 32768, 500000.0, True, None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    config, expected = PUBLISHED[name]
    read = read_rope_config(config)
    found = (read.head_size, read.rotary_dim, read.max_position, read.base, read.is_neox_style, read.rope_scaling)
    assert found == expected


GEMMA3 = dict(
    model_type="gemma3_text", hidden_size=3840, num_attention_heads=16, head_dim=256, max_position_embeddings=131072,
    rope_theta=1000000.0, rope_local_base_freq=10000.0, rope_scaling=dict(factor=8.0, rope_type="linear"),
)  # fmt: skip


def both(config):
    return [read_rope_config(config, layer_type=kind) for kind in ("full_attention", "sliding_attention")]


def test_gemma3_scales_its_global_layers_only():
    full, local = both(GEMMA3)
    assert (full.base, full.rope_scaling) == (1e6, dict(rope_type="linear", factor=8.0))
    assert (local.base, local.rope_scaling) == (10000.0, None)
    assert layer_types(GEMMA3) == ("full_attention", "sliding_attention")
    with pytest.raises(ValueError, match=r"layer_type is None.*expected full_attention or sliding_attention"):
        read_rope_config(GEMMA3)
    with pytest.raises(ValueError, match="layer_type is 'global'"):
        read_rope_config(GEMMA3, layer_type="global")


def test_gemma3_leaves_its_bases_out():
    bare = {key: value for key, value in GEMMA3.items() if not key.startswith("rope")}
    assert [read.base for read in both(bare)] == [1e6, 10000.0]


def test_olmo3_scales_its_global_layers_only_from_one_base():
    scaling = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8192, attention_factor=1.2)
    config = dict(GEMMA3, model_type="olmo3", rope_theta=500000, rope_scaling=scaling)
    del config["rope_local_base_freq"]
    full, local = both(config)
    assert (full.base, full.rope_scaling) == (500000.0, scaling)
    assert (local.base, local.rope_scaling) == (500000.0, None)


def test_modernbert_names_its_bases_apart():
    config = dict(
        model_type="modernbert", hidden_size=768, num_attention_heads=12, max_position_embeddings=8192,
        global_rope_theta=160000.0, local_rope_theta=10000.0,
    )  # fmt: skip
    assert [read.base for read in both(config)] == [160000.0, 10000.0]


def test_nested_parameters_of_each_layer_type():
    nested = dict(
        full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
        sliding_attention=dict(rope_type="default", rope_theta=10000.0),
    )
    config = dict(
        model_type="gemma4_text",
        head_dim=256,
        global_head_dim=512,
        max_position_embeddings=131072,
        rope_parameters=nested,
    )
    full, local = both(config)
    assert (full.head_size, full.rotary_dim, full.base) == (512, 512, 1e6)
    assert full.rope_scaling == dict(rope_type="proportional", rope_proportion=0.25)
    assert (local.head_size, local.rotary_dim, local.base, local.rope_scaling) == (256, 256, 10000.0, None)
    with pytest.raises(ValueError, match="give layer_type, one of full_attention, sliding_attention"):
        read_rope_config(config)
    alike = dict(config, rope_parameters=dict.fromkeys(nested, nested["sliding_attention"]))
    assert read_rope_config(alike).base == 10000.0


LLAMA = dict(
    model_type="llama", hidden_size=512, num_attention_heads=4, max_position_embeddings=4096, rope_theta=500000.0
)


def read(**changes):
    return read_rope_config({**LLAMA, **changes})


def test_phi3_keeps_the_original_length_beside_and_means_the_ratio():
    factors = dict(short_factor=[1.0] * 48, long_factor=[2.0] * 48)
    for kind in ("su", "longrope", "yarn"):
        config = dict(
            LLAMA, model_type="phi3", max_position_embeddings=131072, original_max_position_embeddings=4096,
            rope_scaling=dict(type=kind, **factors),
        )  # fmt: skip
        for length in (None, 4096):
            found = read_rope_config(config, max_position=length)
            assert found.max_position == (length or 131072)
            assert found.rope_scaling["factor"] == 32.0
            assert found.rope_scaling["original_max_position_embeddings"] == 4096


def test_another_length_than_the_configs_changes_no_value():
    yarn = dict(rope_type="yarn", factor=4.0)
    config = dict(LLAMA, rope_scaling=yarn)
    assert read_rope_config(config, max_position=100).rope_scaling["original_max_position_embeddings"] == 4096
    assert read_rope_config(config, max_position=100).max_position == 100


def test_several_linear_factors_are_read_as_they_are():
    scaling = dict(type="linear", factor=[1.0, 4.0])
    assert read(rope_scaling=scaling).rope_scaling == dict(rope_type="linear", factor=[1.0, 4.0])
    rope = get_rope_from_config({**LLAMA, "rope_scaling": scaling})
    assert rope.scaling_factor_to_offset == {1.0: 0, 4.0: 4096}
    shorter = get_rope_from_config({**LLAMA, "rope_scaling": scaling}, max_position=100)
    assert shorter.scaling_factor_to_offset == {1.0: 0, 4.0: 100}


PANGU = dict(
    model_type="openpangu_vl",
    text_config=dict(
        model_type="openpangu_vl_text", hidden_size=4096, num_attention_heads=32, max_position_embeddings=32768
    ),
    vision_config=dict(model_type="openpangu_vl", hidden_size=1536, num_heads=16),
)  # fmt: skip


def pangu(**scaling):
    return read_rope_config({**PANGU, "text_config": {**PANGU["text_config"], "rope_scaling": scaling}})


def test_openpangus_axes_take_turns_if_its_config_says_so():
    for kind in (dict(type="mrope"), dict(rope_type="default"), dict(rope_type="openpangu")):
        found = pangu(**kind, mrope_section=[24, 20, 20], mrope_interleaved=True)
        assert (found.base, found.is_neox_style, found.rope_scaling["mrope_layout"]) == (64e6, True, "pangu")
        assert "mrope_interleaved" not in found.rope_scaling
    assert pangu(type="mrope", mrope_section=[24, 20, 20]).rope_scaling["mrope_layout"] == "chunked"
    flat = {**PANGU["text_config"], "model_type": "openpangu_vl"}
    scaling = dict(mrope_section=[24, 20, 20], mrope_interleaved=True)
    axes = get_rope_from_config({**flat, "rope_scaling": scaling}).spec.pair_axes
    assert axes[:25] == (0, 1, 2) * 7 + (0, 1, 0, 2) and axes[-2:] == (0, 0)
    with pytest.raises(ValueError, match="no rope_parameters, which model_type 'openpangu_vl' needs"):
        read_rope_config(PANGU["vision_config"])


def test_dynamic_follows_the_length():
    config = dict(LLAMA, rope_scaling=dict(type="dynamic", factor=2.0))
    for length, seq_len in ((None, 4096), (8000, 8000)):
        found = read_rope_config(config, max_position=length)
        assert found.max_position == 4096 and found.rope_scaling["seq_len"] == seq_len


def test_the_style_is_that_of_the_model_or_given():
    assert read().is_neox_style and not read(model_type="glm").is_neox_style
    assert read(rope_interleave=False, model_type="deepseek_v3").is_neox_style
    assert not read_rope_config({**LLAMA, "model_type": "new"}, is_neox_style=False).is_neox_style
    with pytest.raises(ValueError, match="style of model_type 'new' is not known; give is_neox_style"):
        read(model_type="new")
    with pytest.raises(ValueError, match="'nanochat' turns its pairs backwards"):
        read(model_type="nanochat")


def test_the_text_config_rules():
    inner = dict(LLAMA, rope_theta=1234.0)
    assert read_rope_config(dict(LLAMA, text_config=inner)).base == 1234.0
    assert read_rope_config(dict(model_type="x", llm_config=dict(text_config=inner))).base == 1234.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rope_theta=None, model_type="new"), "no rope_theta, and the base of model_type 'new' is not known"),
        (dict(rope_theta="10000"), "rope_theta of the config is '10000'; expected a number"),
        (dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)), "rope_theta=500000.0 .* contradicts 10000.0"),
        (dict(max_position_embeddings=None), "no max_position_embeddings; give max_position"),
        (dict(hidden_size=None), "neither head_dim nor hidden_size"),
        (dict(rope_parameters=["default"]), r"rope_parameters of the config is \['default'\]"),
        (dict(use_dynamic_ntk=True), "use_dynamic_ntk=True"),
        (dict(rope_scale_base=512), "rope_scale_base=512"),
        (dict(use_xpos=True), "use_xpos=True"),
        (dict(alibi=True), "alibi=True"),
        (dict(layer_rope_theta=[1e4, 0, 5e5]), "layer_rope_theta of the config has the bases"),
        (dict(rotary_dim=64, partial_rotary_factor=0.25), "rotary_dim=64 .* contradicts partial_rotary_factor=0.25"),
        (
            dict(partial_rotary_factor=0.5, rope_scaling=dict(type="default", partial_rotary_factor=0.25)),
            "contradicts 0.25",
        ),
        (dict(rope_scaling=dict(type="yarn", rope_type="linear", factor=2.0)), "type='yarn' .* contradicts .*'linear'"),
        (
            dict(rope_parameters=dict(rope_type="default"), rope_scaling=dict(type="linear", factor=2.0)),
            "rope_scaling=.*'linear'.* contradicts its rope_parameters",
        ),
        (dict(model_type="gpt_oss"), "no rope_parameters, which model_type 'gpt_oss' needs"),
        (dict(model_type="qwen2_vl_vision"), "no rope_parameters, which model_type 'qwen2_vl_vision' needs"),
        (dict(model_type="qwen2_vl"), None),
        (dict(model_type="qwen2_vl", head_dim=64), r"model's \[16, 24, 24\] does not fit 32 pairs"),
        (
            dict(
                model_type="qwen2_vl",
                rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24], mrope_interleaved=True),
            ),
            "mrope_interleaved of the config contradicts its model_type 'qwen2_vl'",
        ),
        (
            dict(
                original_max_position_embeddings=1024,
                rope_scaling=dict(type="yarn", factor=2.0, original_max_position_embeddings=2048),
            ),
            "original_max_position_embeddings=1024 .* contradicts 2048",
        ),
    ],
)
def test_what_is_missing_or_would_be_dropped_is_named(changes, message):
    if message is None:
        assert read(**changes).rope_scaling["mrope_section"] == [16, 24, 24]
        return
    with pytest.raises(ValueError, match=message):
        read(**changes)


@pytest.mark.parametrize("changes", [dict(use_xpos=False), dict(use_dynamic_ntk=False), dict(no_rope_layers=[1, 0])])
def test_what_says_nothing_of_the_values_is_no_error(changes):
    assert read(**changes) == read()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
