"""The position embeddings of diffusion transformers: right against float64, whatever is done to module, tables or mode."""

import copy
import pickle
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding import pos_embed
from multimodal_gen.runtime.layers.rotary_embedding.grid_cache import GRIDS

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

CPU = torch.device("cpu")
IDS = torch.cat([torch.zeros(3, 3), torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(5.0))])
LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MASK = torch.tensor([False] * 2 + [True] * 6 + [False])
FAR = {"total_frames": 3, "full_frame_shape": (4, 6), "compressed_frame_shape": (2, 3), "num_compressed_frames": 1}


def latents(*shape):
    return torch.empty(1, 1, *shape)


# name, constructor's arguments, forward's arguments: one of each form
FORMS = [
    ("FluxPosEmbed", (10000, [4, 6, 6]), (IDS,)),
    ("Flux2PosEmbed", (2000, [4, 6, 6]), (IDS,)),
    ("WanRotaryPosEmbed", (36, (1, 2, 2), 64), (latents(3, 4, 6),)),
    ("ChronoEditRotaryPosEmbed", (36, (1, 2, 2), 64), (latents(2, 4, 6),)),
    ("SanaWMRotaryPosEmbed", (36, (1, 1, 1), 64), ((2, 3, 4), CPU)),
    ("AnyFlowRotaryPosEmbed", (36, (1, 2, 2), 64), (FAR, CPU)),
    ("AnyFlowCausalRotaryPosEmbed", (36, (1, 2, 2), (1, 4, 4), 64), (FAR, CPU)),
    ("HunyuanVideoRotaryPosEmbed", (2, 1, [4, 6, 6]), (latents(3, 4, 6),)),
    ("MotifVideoRotaryPosEmbed", (2, 1, [4, 6, 6]), (latents(3, 4, 6),)),
    ("HunyuanVideoFramepackRotaryPosEmbed", (2, 1, [4, 6, 6]), (torch.tensor([0, 4]), 4, 6, CPU)),
    ("HunyuanImageRotaryPosEmbed", ((2, 2), (8, 8)), (torch.empty(1, 1, 4, 6),)),
    ("CogView4RotaryPosEmbed", (16, 2, (9, 9)), (torch.empty(1, 1, 4, 6),)),
    ("GlmImageRotaryPosEmbed", (16, 2), (torch.empty(1, 1, 4, 6),)),
    ("CosmosRotaryPosEmbed", (36,), (latents(3, 4, 6), 30)),
    ("EasyAnimateRotaryPosEmbed", (2, 32), (latents(3, 4, 6),)),
    ("HeliosRotaryPosEmbed", ((4, 6, 6), 10000.0), (torch.tensor([[0, 2]]), 2, 3, CPU)),
    ("QwenEmbedRope", (10000, [4, 6, 6], True), ([(1, 4, 6)], CPU, 5)),
    ("QwenEmbedLayer3DRope", (10000, [4, 6, 6], True), ([[(1, 4, 6), (1, 2, 2)]], 5, CPU)),
    ("NucleusMoEEmbedRope", (10000, [4, 6, 6]), ([(1, 4, 6)], CPU, 5)),
    ("QwenImage21Rope", (10000, [4, 6, 6]), ([(1, 2, 3)], MASK, CPU)),
    ("LTXVideoRotaryPosEmbed", (32,), (torch.empty(1, 12, 4), 2, 2, 3, (0.5, 32, 32))),
    ("LTX2AudioVideoRotaryPosEmbed", (32,), (torch.rand(1, 3, 7, 2),)),
    ("Lumina2RotaryPosEmbed", (10000, [4, 6, 6]), (torch.ones(1, 2, 4, 6), torch.ones(1, 3, dtype=torch.int64))),
    ("RopeEmbedder", (256.0, (4, 6, 6)), (IDS.long(),)),
    ("PRXEmbedND", (16, 10000, [4, 6, 6]), (IDS[None],)),
    ("HiDreamImageEmbedND", (10000, [4, 6, 6]), (IDS[None],)),
    ("ErnieImageEmbedND3", (16, 256, (4, 6, 6)), (IDS[None],)),
    ("Kandinsky5RoPE1D", (16,), (torch.arange(5),)),
    ("Kandinsky5RoPE3D", ((4, 6, 6),), ((1, 2, 3, 4), [torch.arange(n) for n in (2, 3, 4)])),
    ("Kandinsky6RoPE1D", (16,), (torch.arange(5),)),
    ("Kandinsky6RoPE3D", ((4, 6, 6),), ([torch.arange(n) for n in (2, 3, 4)],)),
    ("Ideogram4MRoPE", (16, 5_000_000, (4, 2, 2)), (IDS.long()[None] + 300,)),
    ("Cosmos3VLTextRotaryEmbedding", (16, 5e6, (4, 2, 2)), (torch.arange(9)[None] + 300, CPU, torch.float32)),
    ("AnimaRotaryEmbedding", (16,), (torch.empty(1), torch.arange(9)[None] + 300)),
    ("MiniMaxH3RotaryPosEmbed", (4,), (IDS,)),
    ("MiniMaxH3VideoRotaryPosEmbed", (24,), (torch.rand(1, 5, 3),)),
    ("OmniGenSuScaledRotaryEmbedding", (16, 8192, 4096, 10000, LONGROPE), (torch.empty(1), torch.arange(9)[None])),
    ("AudioDiTRotaryEmbedding", (16,), (torch.empty(1, 9, 2),)),
    ("MiniMaxMusic3RotaryEmbedding", (16,), (9, CPU)),
    ("SAMERotaryEmbedding", (16,), (9, CPU)),
    ("StableAudio3RotaryEmbedding", (16,), (9, CPU)),
]
form = pytest.mark.parametrize(("name", "init", "call"), FORMS, ids=[f[0] for f in FORMS])


@pytest.fixture(autouse=True)
def empty_cache():
    GRIDS.clear()
    yield
    GRIDS.clear()


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []


def same(got, want):
    got = tensors(got)
    return len(got) == len(want) and all(
        a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in zip(got, want)
    )


def make(name, init, call):
    module = getattr(pos_embed, name)(*init)
    return module, [t.clone() for t in tensors(module(*call))]


@form
def test_callers_cannot_harm_each_other(name, init, call):
    module, want = make(name, init, call)
    holder = module(*call)
    for kill in (
        lambda t: t.fill_(7),
        lambda t: t.untyped_storage().resize_(0),
        lambda t: t.resolve_conj().view(-1)[:1].zero_() if t.is_contiguous() else t.zero_(),
    ):
        victims = module(*call)
        for tensor in tensors(victims):
            if tensor.untyped_storage().nbytes():  # query and key may be one tensor
                kill(tensor)
        assert same(holder, want) and same(module(*call), want)


@form
def test_nothing_done_to_a_module_touches_its_tables(name, init, call):
    module, want = make(name, init, call)
    if not isinstance(module, torch.nn.Module):
        pytest.skip("not a module, so it is never moved")
    for change in (
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="cpu"),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
    ):
        module = change(module)
        GRIDS.clear()
        assert same(module(*call), want)
    assert set(module.state_dict()) == ({"inv_freq"} if name == "StableAudio3RotaryEmbedding" else set())


@form
@pytest.mark.parametrize("mode", ["autocast", "inference", "dtype", "default device", "thread"])
def test_born_the_same_whatever_surrounds(name, init, call, mode):
    module, want = make(name, init, call)
    GRIDS.clear()
    got = []
    if mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            got = module(*call)
    elif mode == "inference":
        with torch.inference_mode():
            got = module(*call)
    elif mode == "dtype":
        torch.set_default_dtype(torch.float64)
        try:
            got = module(*call)
        finally:
            torch.set_default_dtype(torch.float32)
    elif mode == "default device":
        with torch.device("meta"):
            got = module(*call)
    else:
        thread = threading.Thread(target=lambda: got.append(module(*call)))
        thread.start()
        thread.join()
    assert same(got, want)
    assert not any(t.is_inference() for t in tensors(module(*call)) if t.is_complex() or t.is_floating_point())


@form
def test_fake_tensors_and_meta_leave_no_trace(name, init, call):
    module, want = make(name, init, call)
    GRIDS.clear()

    def to_meta(value):
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        if isinstance(value, list) and isinstance(value[0], torch.Tensor):
            return [t.to("meta") for t in value]
        return torch.device("meta") if value is CPU else value

    if name not in (
        "QwenImage21Rope",
        "OmniGenSuScaledRotaryEmbedding",
        "Lumina2RotaryPosEmbed",
    ):  # these read a tensor
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = tensors(module(*call))
        assert [t.shape for t in fake] == [t.shape for t in want] and not len(GRIDS)
        meta = tensors(module(*map(to_meta, call)))
        assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in want]
        assert all(t.is_meta for t in meta)
    GRIDS.clear()
    assert same(module(*call), want)


@form
def test_compiles_without_a_break(name, init, call):
    module, want = make(name, init, call)
    if name in ("QwenImage21Rope", "OmniGenSuScaledRotaryEmbedding", "Lumina2RotaryPosEmbed"):
        pytest.skip("its forward reads a tensor, as diffusers' does")
    torch._dynamo.reset()
    got = tensors(torch.compile(module, fullgraph=True, backend="eager")(*call))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    assert same(module(*call), want)


# --- against float64 ------------------------------------------------------------------------------------------------

sizes = st.integers(1, 9)
even = st.integers(1, 12).map(lambda n: 2 * n)
settings.register_profile("grids", max_examples=60, deadline=None)
settings.load_profile("grids")


def exact(positions, dims, theta):
    """Angles in float64, ``[tokens, sum(dims)/2]``."""
    columns = [
        positions[:, axis : axis + 1].double() * float(theta) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        for axis, dim in enumerate(dims)
    ]
    return torch.cat(columns, dim=1)


def grid(*counts):
    return torch.cartesian_prod(*(torch.arange(n) for n in counts)).reshape(-1, len(counts))


def close(got, want, tolerance):
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


@given(frames=sizes, height=sizes, width=sizes, head=st.integers(1, 11).map(lambda n: 6 * n))
def test_wan_on_random_grids(frames, height, width, head):
    cos, sin = pos_embed.WanRotaryPosEmbed(head, (1, 2, 2), 8)(latents(frames, 2 * height, 2 * width + 1))
    side = 2 * (head // 6)
    angles = exact(grid(frames, height, width), (head - 2 * side, side, side), 10000).repeat_interleave(2, dim=1)
    assert cos.shape == (1, frames * height * width, 1, head)
    close(cos[0, :, 0], angles.cos(), 6e-8)
    close(sin[0, :, 0], angles.sin(), 6e-8)


@given(
    frames=sizes, height=sizes, width=sizes, dims=st.tuples(even, even, even), theta=st.sampled_from([256, 1e4, 7e5])
)
def test_hunyuan_video_on_random_grids(frames, height, width, dims, theta):
    cos, sin = pos_embed.MotifVideoRotaryPosEmbed(1, 1, list(dims), theta)(latents(frames, height, width))
    angles = exact(grid(frames, height, width), dims, theta).repeat_interleave(2, dim=1)
    close(cos, angles.cos(), 6e-8)
    close(sin, angles.sin(), 6e-8)


@given(
    ids=st.lists(
        st.tuples(*[st.one_of(st.integers(-50, 5000), st.floats(-9, 9, width=32))] * 3), min_size=1, max_size=40
    ),
    dims=st.tuples(even, even, even),
)
def test_flux_at_random_positions(ids, dims):
    ids = torch.tensor(ids, dtype=torch.float32)
    cos, sin = pos_embed.FluxPosEmbed(10000, list(dims))(ids)
    angles = exact(ids, dims, 10000).repeat_interleave(2, dim=1)
    close(cos, angles.cos(), 6e-8)
    close(sin, angles.sin(), 6e-8)


@given(images=st.lists(st.tuples(st.just(1), sizes, sizes), min_size=1, max_size=3), text=sizes, centred=st.booleans())
def test_qwen_with_random_images(images, text, centred):
    image, words = pos_embed.QwenEmbedRope(10000, [4, 6, 6], centred)([images], CPU, text)
    positions = []
    for i, (_, height, width) in enumerate(images):
        shift = torch.tensor([i, -(height - height // 2), -(width - width // 2)] if centred else [i, 0, 0])
        positions.append(grid(1, height, width) + shift)
    side = max(max(h, w) // 2 if centred else max(h, w) for _, h, w in images)
    positions.append((torch.arange(text) + side)[:, None].expand(-1, 3))
    angles = exact(torch.cat(positions), (4, 6, 6), 10000)
    got = torch.cat([image, words])
    close(got.real, angles.cos(), 2e-6)  # the angles are float32, as diffusers'
    close(got.imag, angles.sin(), 2e-6)


# --- single promises ------------------------------------------------------------------------------------------------


def test_ideogram_does_not_collapse_under_autocast():
    positions = torch.arange(2000)[None, :, None].expand(1, -1, 3)
    module = pos_embed.Ideogram4MRoPE(128, 5_000_000, (24, 20, 20))
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = module(positions)
    angles = positions[0, :, :1].double() * 5_000_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    close(cos[0, :, :64], angles.cos(), 3e-4)
    close(sin[0, :, :64], angles.sin(), 3e-4)


def test_mochi_is_differentiable_and_float32_under_autocast():
    frequencies = torch.randn(3, 2, 4, requires_grad=True)
    module = pos_embed.MochiRoPE()
    want = module(frequencies, 2, 3, 4, CPU, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = module(frequencies, 2, 3, 4, CPU, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    got[0].sum().backward()
    assert frequencies.grad is not None


def test_stable_audio_reads_and_writes_the_checkpoints_frequencies():
    module = pos_embed.StableAudio3RotaryEmbedding(16, 500)
    state = module.state_dict()
    assert torch.equal(state["inv_freq"], 1.0 / 500 ** (torch.arange(0, 16, 2).float() / 16))
    module.to_empty(device="cpu").load_state_dict(state)
    with pytest.raises(ValueError, match="inv_freq"):
        module.load_state_dict({"inv_freq": state["inv_freq"] * 2})


def test_tables_do_not_end_where_theirs_do():
    cos, _ = pos_embed.WanRotaryPosEmbed(24, (1, 1, 1), 4)(latents(6, 1, 1))
    angles = exact(grid(6, 1, 1), (8, 8, 8), 10000).repeat_interleave(2, dim=1)
    close(cos[0, :, 0], angles.cos(), 6e-8)


def test_attributes_may_change():
    module = pos_embed.FluxPosEmbed(10000, [4, 6, 6])
    before = module(IDS)
    module.theta = 500
    assert not torch.equal(module(IDS)[0], before[0])
    assert torch.equal(module(IDS)[0], pos_embed.FluxPosEmbed(500, [4, 6, 6])(IDS)[0])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
