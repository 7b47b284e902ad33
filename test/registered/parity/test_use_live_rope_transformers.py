"""use_live_rope on whole small transformers models: equal logits before and after, and no model harms another."""

import copy
import pickle
import sys

import pytest
import torch
import transformers

from common.ci_register import register_cpu_ci
from srt.integrations.transformers import use_live_rope
from srt.layers.rotary_embedding.factory import _ROPE_DICT

register_cpu_ci(est_time=60, suite="parity-test-cpu")

SMALL = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, original_max_position_embeddings=64, truncate=False)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    factor=4.0,
    short_factor=[1.0] * 8,
    long_factor=[2.0 + i for i in range(8)],
    original_max_position_embeddings=64,
)
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4,
    num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1,
)  # fmt: skip


def qwen2_vl():
    text = {**SMALL, "rope_parameters": dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 3, 3])}
    vision = dict(depth=1, embed_dim=32, num_heads=2, hidden_size=64, patch_size=4)
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, vocab_size=128)
    return transformers.Qwen2VLForConditionalGeneration(config)


MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, head_dim=16)),
    "deepseek_v3": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4, **LATENT})
    ),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, rope_parameters=YARN)
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SMALL, rope_parameters=LONGROPE)),
    "qwen2_vl": qwen2_vl,
    "glm": lambda: transformers.GlmForCausalLM(transformers.GlmConfig(**SMALL, head_dim=16)),
}


@pytest.fixture(autouse=True)
def empty_cache():
    _ROPE_DICT.clear()
    yield
    _ROPE_DICT.clear()


@pytest.fixture(params=MODELS)
def build(request):
    def build():
        torch.manual_seed(0)
        return MODELS[request.param]().eval()

    return build


def ids(tokens=80):
    return torch.randint(3, 128, (2, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, tokens=80):
    return model(input_ids=ids(tokens)).logits


def text_rope(model):
    return next(m for n, m in model.named_modules() if n.endswith("rotary_emb"))


def test_logits_are_the_same_bits_before_after_and_back(build):
    model = build()
    before = logits(model), logits(model, 40)  # longrope: beyond the original length, and within
    report = use_live_rope(model)
    assert report.swapped and not report.kept, str(report)
    assert torch.equal(logits(model), before[0])
    assert torch.equal(logits(model, 40), before[1])
    swapped = text_rope(model)
    report.undo()
    assert text_rope(model) is not swapped
    assert torch.equal(logits(model), before[0])


def kill_inv_freq(module):
    for buffer in module.buffers():
        buffer.untyped_storage().resize_(0)


def overwrite_untraced(model):
    for buffer in text_rope(model).buffers():
        buffer.data.fill_(3.0)


TEARDOWNS = {
    "overwritten behind PyTorch's back": overwrite_untraced,
    "to meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "half": lambda model: model.half(),
    "storages freed": kill_inv_freq,
}


@pytest.mark.parametrize("teardown", TEARDOWNS.values(), ids=TEARDOWNS)
def test_one_models_teardown_does_not_change_what_the_other_generates(build, teardown):
    torn, survivor = build(), build()
    for model in (torn, survivor):
        use_live_rope(model)
    for ours, theirs in zip(text_rope(torn).children(), text_rope(survivor).children(), strict=True):
        assert ours is theirs
    arguments = dict(input_ids=ids(8), max_new_tokens=6, do_sample=False)
    before = survivor.generate(**arguments)
    right = logits(survivor)
    teardown(torn)
    assert torch.equal(survivor.generate(**arguments), before)
    assert torch.equal(logits(survivor), right)


def test_a_model_materialised_from_meta_is_right_after_the_swap():
    config = transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3)
    torch.manual_seed(0)
    whole = transformers.LlamaForCausalLM(config).eval()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    model.to_empty(device="cpu")
    model.load_state_dict(whole.state_dict())
    for buffer in text_rope(model).buffers():
        buffer.fill_(-1e34)  # what the memory happened to hold
    assert not torch.equal(logits(model), logits(whole))
    report = use_live_rope(model)
    assert report.healed == ["model.rotary_emb"] and "healed model.rotary_emb" in str(report)
    assert torch.equal(logits(model), logits(whole))


def test_copies_and_pickles_are_live():
    model = MODELS["llama"]().eval()
    right = logits(model)
    use_live_rope(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        next(text_rope(model).buffers()).zero_()
        assert torch.equal(logits(other), right)
        text_rope(other).to("meta")
        assert torch.equal(logits(other), right)


def deepseek_v2():
    sizes = {**SMALL, "num_key_value_heads": 4, **LATENT, "topk_method": "greedy"}
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**sizes))


def gptj():
    config = transformers.GPTJConfig(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=256, vocab_size=128)
    return transformers.GPTJForCausalLM(config)


def codegen():  # its attention is cut for four model-parallel shards
    config = transformers.CodeGenConfig(
        n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=256, vocab_size=128, bos_token_id=1, eos_token_id=2
    )
    return transformers.CodeGenForCausalLM(config)


def cohere():
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL))


def olmo2():
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SMALL))


def gemma4():
    sizes = {**SMALL, "num_hidden_layers": 6, "head_dim": 16, "hidden_size_per_layer_input": 8}
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes, vocab_size_per_layer_input=128))


@pytest.mark.parametrize("make", [gptj, codegen])
def test_a_joined_table_of_sines_and_cosines_stays_right_when_another_model_is_torn_down(make):
    torch.manual_seed(0)
    torn = make().eval()
    survivor = copy.deepcopy(torn)
    right = logits(survivor)
    for model in (torn, survivor):
        assert isinstance(text_rope(model).embed_positions, torch.Tensor)
        report = use_live_rope(model)
        assert report.swapped == ["transformer.rotary_emb"] and not report.kept, str(report)
        assert not hasattr(text_rope(model), "embed_positions")
        assert torch.equal(logits(model), right)
    for ruin in (overwrite_untraced, kill_inv_freq, lambda model: model.to("meta")):
        ruin(text_rope(torn) if ruin is kill_inv_freq else torn)
        assert torch.equal(logits(survivor), right)
    report.undo()
    assert torch.equal(logits(survivor), right)


@pytest.mark.parametrize("make", [deepseek_v2, gptj, codegen, cohere, olmo2, gemma4], ids=lambda make: make.__name__)
def test_other_layouts_of_cos_and_sin(make):
    """Complex numbers, sin before cos, each value twice in turn, float32 whatever the model's dtype, two kinds of layer."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = make().eval()
        model.to(dtype)
        whole = next(m for m in model.modules() if hasattr(m, "rotary_emb"))
        whole.rotary_emb = type(whole.rotary_emb)(
            model.config
        )  # its float32 frequencies, as from_pretrained keeps them
        right = logits(model)
        report = use_live_rope(model)
        assert report.swapped and not report.kept, str(report)
        assert torch.equal(logits(model), right)


def test_a_compiled_model_is_right_whatever_becomes_of_its_tables():
    model = MODELS["llama"]().eval()
    right = logits(model)
    use_live_rope(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    table = next(text_rope(model).buffers())

    @torch.no_grad()
    def compare():
        torch.testing.assert_close(compiled(input_ids=ids(), use_cache=False).logits, right, rtol=0, atol=1e-6)

    compare()
    for ruin in (table.zero_, lambda: table.data.fill_(3.0), lambda: text_rope(model).to("meta")):
        ruin()
        compare()


def test_a_table_begins_small_and_grows():
    config = transformers.LlamaConfig(**{**SMALL, "max_position_embeddings": 131072})
    model = transformers.LlamaForCausalLM(config).eval()
    right = logits(model)
    use_live_rope(model, max_position=16)
    table = next(text_rope(model).buffers())
    assert len(table) == 16
    assert torch.equal(logits(model), right)
    assert len(next(text_rope(model).buffers())) >= 80
    with pytest.raises(IndexError, match="negative"):
        text_rope(model)(torch.zeros(1, 1, 8), torch.tensor([[-1]]))


def test_positions_between_whole_numbers():
    rope = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**SMALL))
    holder = torch.nn.Module()
    holder.rotary_emb = rope
    x, positions = torch.zeros(1, 1, 8), torch.tensor([[0.0, 0.5, 17.25]])
    right = rope(x, positions)
    assert use_live_rope(holder).swapped == ["rotary_emb"]
    assert all(torch.equal(a, b) for a, b in zip(holder.rotary_emb(x, positions), right))


def test_dynamic_follows_the_longest_sequence_until_a_short_one():
    dynamic = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    config = transformers.LlamaConfig(**{**SMALL, "max_position_embeddings": 64}, rope_parameters=dynamic)
    lengths = (40, 64, 65, 200, 100, 64, 63, 80, 300, 12, 64)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    right = [logits(model, n) for n in lengths]
    report = use_live_rope(model)
    assert report.swapped and not report.kept, str(report)
    for _ in range(2):
        assert all(torch.equal(logits(model, n), expected) for n, expected in zip(lengths, right))
        for table in text_rope(model).buffers():
            table.data.fill_(3.0)


class SeveralFactorsRotaryEmbedding(torch.nn.Module):
    """As remote code may have it: it makes of its config's factors what it will."""

    def __init__(self, config):
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(8), persistent=False)


def test_several_linear_factors_are_kept_with_the_reason():
    holder = torch.nn.Module()
    scaling = dict(rope_type="linear", factor=[1.0, 4.0])
    sizes = dict(hidden_size=64, num_attention_heads=4, max_position_embeddings=256)
    holder.config = dict(model_type="llama", rope_theta=1e4, rope_scaling=scaling, **sizes)
    holder.rotary_emb = SeveralFactorsRotaryEmbedding(holder.config)
    report = use_live_rope(holder)
    assert not report.swapped and "several linear factors" in report.kept["rotary_emb"]


def test_what_cannot_be_swapped_is_reported():
    config = transformers.EsmConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        position_embedding_type="rotary",
    )
    model = transformers.EsmModel(config)
    report = use_live_rope(model)
    assert not report.swapped and "part of the state dict" in report.kept["rotary_embeddings"]
    assert "rotary_embeddings" in str(report)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
