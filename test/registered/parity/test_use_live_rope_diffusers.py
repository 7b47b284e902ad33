"""Whole small diffusers transformers, real classes and random weights: equal outputs after the swap, and for good."""

import inspect
import sys

import diffusers
import pytest
import torch

from common.ci_register import register_cpu_ci
from multimodal_gen.integrations.diffusers import use_live_rope
from multimodal_gen.runtime.layers.rotary_embedding import pos_embed
from multimodal_gen.runtime.layers.rotary_embedding.grid_cache import GRIDS

register_cpu_ci(est_time=120, suite="parity-test-cpu")


def ids(height, width, axes=3, text=0):
    grid = torch.zeros(height, width, axes)
    grid[..., 1] += torch.arange(height)[:, None]
    grid[..., 2] += torch.arange(width)
    return torch.cat([torch.zeros(text, axes), grid.view(-1, axes)])


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 20, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": ids(4, 5),
        "txt_ids": torch.zeros(6, 3),
    }


def flux2():
    model = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, timestep_guidance_channels=256, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 20, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "timestep": torch.tensor([1.0]),
        "guidance": torch.tensor([1.0]),
        "img_ids": ids(4, 5, 4)[None],
        "txt_ids": torch.zeros(1, 6, 4),
    }


def qwen_image():
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 24, 16),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long),
        "timestep": torch.tensor([1.0]),
        "img_shapes": [(1, 4, 6)],
    }


def wan():
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 16, 12),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "timestep": torch.tensor([3]),
    }


def hunyuan_video():
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 6, 4),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "pooled_projections": torch.randn(1, 8),
        "encoder_attention_mask": torch.ones(1, 7),
        "timestep": torch.tensor([3]),
        "guidance": torch.tensor([1]),
    }


def ltx():
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32, num_layers=1,
        qk_norm="rms_norm_across_heads", caption_channels=16,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 24, 8),
        "encoder_hidden_states": torch.randn(1, 6, 16),
        "timestep": torch.tensor([3]),
        "encoder_attention_mask": torch.ones(1, 6).bool(),
        "num_frames": 2,
        "height": 3,
        "width": 4,
        "rope_interpolation_scale": (0.32, 32, 32),
    }


def lumina2():
    model = diffusers.Lumina2Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=2, ffn_dim_multiplier=None, norm_eps=1e-5,
        scaling_factor=1.0, axes_dim_rope=(4, 2, 2), axes_lens=(128, 128, 128), cap_feat_dim=16,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 12),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "timestep": torch.rand(2),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1] * 5]).bool(),
    }


def cogview4():
    model = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, out_channels=4,
        text_embed_dim=8, time_embed_dim=8, condition_dim=4, rope_axes_dim=(16, 16),
    )  # fmt: skip
    pair = torch.tensor([[8, 8]])
    return model, {
        "hidden_states": torch.randn(1, 4, 8, 12),
        "encoder_hidden_states": torch.randn(1, 8, 8),
        "timestep": torch.tensor([3]),
        "original_size": pair,
        "target_size": pair,
        "crop_coords": torch.tensor([[0, 0]]),
    }


def mochi():
    model = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16, in_channels=4,
        qk_norm="rms_norm", text_embed_dim=16, time_embed_dim=4, activation_fn="swiglu", max_sequence_length=16,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(1, 16, 16),
        "encoder_attention_mask": torch.ones(1, 16).bool(),
        "timestep": torch.tensor([3]),
    }


def skyreels():
    model = diffusers.SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=256, ffn_dim=32, num_layers=1, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    return model, wan()[1]


def cosmos():
    model = diffusers.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, mlp_ratio=2,
        text_embed_dim=32, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2), rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=False, extra_pos_embed_type="learnable",
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 12, 32),
        "timestep": torch.tensor([3]),
        "attention_mask": torch.ones(1, 12).bool(),
        "fps": 30,
    }


MODELS = [flux, flux2, qwen_image, wan, hunyuan_video, ltx, lumina2, cogview4, mochi, skyreels, cosmos]
each = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


def build(make):
    torch.manual_seed(0)
    model, inputs = make()
    model.eval()
    return model, inputs


@torch.no_grad()
def outputs(model, inputs):
    return model(**inputs, return_dict=False)[0]


@pytest.fixture(autouse=True)
def empty_cache():
    GRIDS.clear()
    yield
    GRIDS.clear()


@each
def test_outputs_are_equal_and_the_swap_is_reversible(make):
    model, inputs = build(make)
    state = model.state_dict().keys()
    want = outputs(model, inputs)
    swap = use_live_rope(model)
    assert swap.swapped and not swap.kept
    assert torch.equal(outputs(model, inputs), want)
    assert len(GRIDS) or make is mochi
    assert model.state_dict().keys() == state
    swap.undo()
    assert torch.equal(outputs(model, inputs), want)
    assert not any(type(m).__module__.startswith("multimodal_gen") for m in model.modules())


def teardown_to_meta(model):
    model.to("meta")


def teardown_to_empty(model):
    model.to_empty(device="cpu")


def teardown_by_cast(model):
    model.half()


def teardown_by_freeing(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.untyped_storage().resize_(0)


def teardown_by_offload(model):
    model.to("meta").to_empty(device="cpu").to(torch.bfloat16)


@each
@pytest.mark.parametrize(
    "teardown",
    [teardown_to_meta, teardown_to_empty, teardown_by_cast, teardown_by_freeing, teardown_by_offload],
    ids=lambda t: t.__name__,
)
def test_one_torn_down_the_other_unchanged(make, teardown):
    survivor, inputs = build(make)
    other, _ = build(make)
    use_live_rope(survivor)
    use_live_rope(other)
    want = outputs(survivor, inputs)
    held = []

    def ruin(module, args, result):
        held.extend(t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor))

    for module in other.modules():
        if type(module).__module__.startswith("multimodal_gen"):
            module.register_forward_hook(ruin)
    assert torch.equal(outputs(other, inputs), want)
    for tensor in held:
        tensor.detach().zero_()
    teardown(other)
    assert torch.equal(outputs(survivor, inputs), want)
    third, _ = build(make)
    use_live_rope(third)
    assert torch.equal(outputs(third, inputs), want)


def test_a_cast_model_keeps_exact_tables():
    model, inputs = build(wan)
    exact = model.rope(inputs["hidden_states"])
    use_live_rope(model)
    model.to(torch.bfloat16)
    got = model.rope(inputs["hidden_states"].bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(got, exact))


def test_built_on_meta_then_materialised():
    model, inputs = build(wan)
    want = outputs(model, inputs)
    with torch.device("meta"):
        late, _ = wan()
    late.eval()
    assert use_live_rope(late).swapped == ["rope"]
    late.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(outputs(late, inputs), want)


def test_cogvideox_takes_the_functions_tables():
    torch.manual_seed(0)
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=2, text_embed_dim=8,
        num_layers=2, sample_width=8, sample_height=8, sample_frames=8, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=8, use_rotary_positional_embeddings=True,
    ).eval()  # fmt: skip
    assert not use_live_rope(model).swapped
    results = []
    for functions in (diffusers.models.embeddings, pos_embed):
        tables = functions.get_3d_rotary_pos_embed(16, ((0, 0), (4, 4)), (4, 4), 2, device=torch.device("cpu"))
        torch.manual_seed(1)
        inputs = {
            "hidden_states": torch.randn(1, 2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(1, 8, 8),
            "timestep": torch.tensor([3]),
            "image_rotary_emb": tables,
        }
        results.append(outputs(model, inputs))
    assert torch.equal(*results)


def test_what_cannot_be_told_stays_and_is_reported():
    model, inputs = build(wan)
    model.rope.freqs_cos.mul_(2)
    want = outputs(model, inputs)
    swap = use_live_rope(model)
    assert not swap.swapped and "theta" in swap.kept["rope"] and "kept rope" in str(swap)
    assert torch.equal(outputs(model, inputs), want)


def test_a_base_that_the_module_does_not_keep_is_found():
    module = torch.nn.Module()
    module.rope = diffusers.models.transformers.transformer_wan.WanRotaryPosEmbed(24, (1, 2, 2), 32, theta=500.0)
    module.config = {"some_base": 500}
    latents = torch.empty(1, 1, 2, 4, 4)
    want = module.rope(latents)
    assert use_live_rope(module).swapped
    assert all(torch.equal(a, b) for a, b in zip(module.rope(latents), want))


def test_every_counterpart_takes_the_same_arguments():
    for name in pos_embed.__all__:
        ours = getattr(pos_embed, name)
        theirs = [
            getattr(module, name)
            for path, module in list(sys.modules.items())
            if path.startswith("diffusers.models.") and name in vars(module) and vars(module)[name].__module__ == path
        ]
        for other in theirs:
            if name == "FluxPosEmbed" and other.__module__ == "diffusers.models.embeddings":
                continue  # a deprecated alias of the one below
            for method in ("__init__", "forward") if inspect.isclass(ours) else ("__call__",):
                got, want = (
                    list(inspect.signature(getattr(c, method, c.__call__) if inspect.isclass(c) else c).parameters)
                    for c in (ours, other)
                )
                assert got == want, (name, method, got, want)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
