"""Every position embedding of diffusers and ours by the same name: equal tensors, to the bit, layout included."""

import ast
import importlib
import pathlib
import re
import sys

import diffusers
import pytest
import torch

from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding import pos_embed
from multimodal_gen.runtime.layers.rotary_embedding.grid_cache import GRIDS

register_cpu_ci(est_time=60, suite="parity-test-cpu")

T = "transformers.transformer_"


def latents(*shape, dtype=torch.float32):
    return torch.empty(1, 1, *shape, dtype=dtype)


def image_ids(axes, height, width, text=0, frame=0, dtype=torch.float32):
    """Positions of text tokens at the origin and of an image after them, ``[tokens, axes]``."""
    ids = torch.zeros(height, width, axes, dtype=dtype)
    ids[..., -3 if axes > 3 else 0] = frame
    ids[..., -2] += torch.arange(height, dtype=dtype)[:, None]
    ids[..., -1] += torch.arange(width, dtype=dtype)
    return torch.cat([torch.zeros(text, axes, dtype=dtype), ids.reshape(-1, axes)])


VIDEOS = [latents(1, 2, 2), latents(1, 10, 6), latents(5, 6, 14), latents(21, 16, 10), latents(40, 4, 4)]
IMAGES = [torch.empty(2, 4, h, w) for h, w in ((2, 2), (16, 16), (6, 30), (34, 10))]
IDS = [image_ids(3, 4, 4, 7), image_ids(3, 5, 3, dtype=torch.int64), image_ids(3, 6, 9, 2, frame=3) * 1.5 - 2]
IDS4 = [image_ids(4, 4, 4, 7), image_ids(4, 3, 8, 5, frame=10), image_ids(4, 2, 2, dtype=torch.int64)]
BATCHED = [torch.stack([ids, ids + 1]) for ids in IDS]
MATRIX_IDS = [ids.double() for ids in BATCHED]
WHOLE = [image_ids(3, 4, 4, 7, dtype=torch.int64), image_ids(3, 7, 5, 1, frame=9, dtype=torch.int64)]
MROPE = [torch.randint(0, 3000, (b, s, 3), generator=torch.Generator().manual_seed(s)) for b, s in ((1, 1), (2, 37))]
POSITIONS = [torch.arange(9)[None], torch.randint(0, 5000, (2, 33), generator=torch.Generator().manual_seed(1))]

WAN = [((128, (1, 2, 2), 64), VIDEOS), ((24, (1, 2, 2), 64, 500.0), VIDEOS[:2])]
FLUX = [((10000, [16, 56, 56]), IDS), ((2000, [4, 6, 6]), IDS)]
FLUX2 = [((2000, [32, 32, 32, 32]), IDS4), ((10000, [8, 4, 2, 2]), IDS4)]
HUNYUAN = [((2, 1, [16, 56, 56]), VIDEOS), ((1, 2, [4, 6, 6], 10000.0), VIDEOS[2:])]
KANDINSKY_3D = [
    (torch.arange(2), torch.arange(3), torch.arange(5)),
    (torch.tensor([4]), torch.arange(6), torch.arange(1, 5)),
]
QWEN_GRIDS = [([(1, 4, 6)], 7), ([[(1, 5, 3), (1, 8, 2)]], 12), ([[(1, 1, 1)], [(1, 1, 1)]], torch.tensor(3))]
LAYERS = [[[(1, 4, 6), (1, 4, 6), (1, 5, 3)]], [[(1, 2, 2)] * 7]]
LTX2_COORDS = [
    torch.rand(2, 3, 11, 2, generator=torch.Generator().manual_seed(0)) * 100,
    torch.rand(1, 3, 5, generator=torch.Generator().manual_seed(1)),
]
AUDIO_COORDS = [torch.rand(2, 1, 11, 2, generator=torch.Generator().manual_seed(0)) * 9]
FAR = [
    {"total_frames": 5, "full_frame_shape": (6, 8), "compressed_frame_shape": (3, 4), "num_compressed_frames": n}
    for n in (0, 2, 5)
]
LONGROPE = {"short_factor": [1.0 + j / 8 for j in range(16)], "long_factor": [1.0 + j for j in range(16)]}


def mask(text, image, more, image2, tail):
    return torch.tensor([False] * text + [True] * image + [False] * more + [True] * image2 + [False] * tail)


def each(calls):
    return [call if isinstance(call, tuple) else (call,) for call in calls]


# name, module, [(constructor's arguments, [forward's arguments])]
CASES = [
    ("FluxPosEmbed", T + "flux", FLUX),
    ("BriaPosEmbed", T + "bria", FLUX),
    ("BriaEmbedND", T + "bria", FLUX),
    ("BriaFiboEmbedND", T + "bria_fibo", FLUX),
    ("Krea2RotaryPosEmbed", T + "krea2", FLUX),
    ("LongCatImagePosEmbed", T + "longcat_image", FLUX),
    ("OvisImagePosEmbed", T + "ovis_image", FLUX),
    ("Flux2PosEmbed", T + "flux2", FLUX2),
    ("Flux3PosEmbed", T + "flux3", FLUX2),
    ("WanRotaryPosEmbed", T + "wan", WAN),
    ("WanRotaryPosEmbed", T + "wan_animate", WAN),
    ("WanRotaryPosEmbed", T + "sana_video", WAN),
    ("SkyReelsV2RotaryPosEmbed", T + "skyreels_v2", WAN),
    (
        "ChronoEditRotaryPosEmbed",
        T + "chronoedit",
        [((128, (1, 2, 2), 64), [*VIDEOS, latents(2, 8, 6)]), ((40, (1, 2, 2), 64, 500.0, 5), [latents(2, 8, 6), VIDEOS[2]])],
    ),
    ("SanaWMRotaryPosEmbed", T + "sana_wm", [((112, (1, 1, 1), 64), [((3, 4, 5),), ((1, 1, 7),)])]),
    ("SanaWMRotaryPosEmbed", T + "sana_wm", [((48, (1, 1, 1), 64, 1e4, (24, 12, 12)), [((3, 4, 5), torch.device("cpu"))])]),
    ("AnyFlowRotaryPosEmbed", T + "anyflow", [((128, (1, 2, 2), 64), [(far, torch.device("cpu")) for far in FAR])]),
    (
        "AnyFlowCausalRotaryPosEmbed",
        T + "anyflow_far",
        [
            (
                (48, (1, 2, 2), (1, 4, 4), 64),
                [(far, torch.device("cpu"), clean) for far in FAR for clean in (None, torch.empty(1))],
            )
        ],
    ),
    ("HunyuanVideoRotaryPosEmbed", T + "hunyuan_video", HUNYUAN),
    ("HunyuanVideo15RotaryPosEmbed", T + "hunyuan_video15", HUNYUAN),
    ("MotifVideoRotaryPosEmbed", T + "motif_video", HUNYUAN),
    (
        "HunyuanVideoFramepackRotaryPosEmbed",
        T + "hunyuan_video_framepack",
        [
            (
                (2, 1, [16, 56, 56]),
                [(torch.arange(3), 8, 6, torch.device("cpu")), (torch.tensor([0, 5, 17]), 4, 4, torch.device("cpu"))],
            )
        ],
    ),
    (
        "HunyuanImageRotaryPosEmbed",
        T + "hunyuanimage",
        [(((1, 1), (64, 64)), IMAGES), (((1, 2, 2), [16, 56, 56]), VIDEOS)],
    ),
    ("CogView4RotaryPosEmbed", T + "cogview4", [((64, 2, (256, 256)), IMAGES), ((32, 2, (20, 9), 500.0), IMAGES)]),
    ("GlmImageRotaryPosEmbed", T + "glm_image", [((64, 2), IMAGES)]),
    ("CosmosRotaryPosEmbed", T + "cosmos", [((128,), [*VIDEOS, (VIDEOS[3], 30)]), ((60, (64, 64, 64), (1, 1, 1)), VIDEOS)]),
    ("EasyAnimateRotaryPosEmbed", T + "easyanimate", [((2, 64), VIDEOS)]),
    (
        "HeliosRotaryPosEmbed",
        T + "helios",
        [(((8, 4, 4), 1e4), [(torch.tensor([[0, 3, 4], [1, 2, 9]]), 4, 6, torch.device("cpu"))])],
    ),
    (
        "MochiRoPE",
        T + "mochi",
        [((), [(torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)), 3, 5, 7, None, torch.float32)]), ((64, 32), [(torch.ones(3, 1, 4), 1, 2, 8, None, torch.float32)])],
    ),
    ("QwenEmbedRope", T + "qwenimage", [((10000, [16, 56, 56], True), [(g, None, n) for g, n in QWEN_GRIDS])]),
    ("QwenEmbedRope", T + "qwenimage", [((10000, [4, 6, 6]), [(g, torch.device("cpu"), n) for g, n in QWEN_GRIDS])]),
    ("QwenEmbedRope", T + "qwenimage", [((10000, [4, 6, 6]), [((2, 3, 4), None, 5)])]),
    ("QwenEmbedLayer3DRope", T + "qwenimage", [((10000, [16, 56, 56], s), [(g, 4) for g in LAYERS]) for s in (True, False)]),
    ("NucleusMoEEmbedRope", T + "nucleusmoe_image", [((1e4, [4, 6, 6], s), [(g, None, n) for g, n in QWEN_GRIDS]) for s in (True, False)]),
    (
        "QwenImage21Rope",
        T + "qwenimage21",
        [
            (
                (10000, [16, 56, 56]),
                [
                    ([(1, 3, 5)], mask(4, 15, 3, 0, 0), torch.device("cpu")),
                    ([(1, 2, 2), (1, 4, 1)], mask(0, 4, 2, 4, 0), torch.device("cpu")),
                    ([], mask(5, 0, 0, 0, 0), torch.device("cpu")),
                ],
            )
        ],
    ),
    (
        "LTXVideoRotaryPosEmbed",
        T + "ltx",
        [
            (
                (50,),
                [
                    (torch.empty(2, 24, 4), 2, 3, 4),
                    (torch.empty(1, 5, 4), 1, 1, 5, (torch.tensor(0.32), 32, 32.0)),
                    (torch.empty(1, 9, 4), None, None, None, None, torch.rand(1, 3, 9) * 40),
                ],
            ),
            ((48, 10, 512, 256, 2, 2, 500.0), [(torch.empty(1, 24, 4), 2, 3, 4, (0.5, 8, 8))]),
        ],
    ),
    *[
        (
            name,
            module,
            [
                ((64,), LTX2_COORDS),
                ((50, 1, 1, 10, 64, 32), LTX2_COORDS),
                *(((dim, *[1, 1, 20, 2048, 2048, 16000, 160, (8, 32, 32), 1e4, 1, m, d, "split", 4]), c) for dim, m, d, c in ((64, "video", False, LTX2_COORDS), (40, "audio", True, AUDIO_COORDS))),
            ],
        )
        for name, module in (
            ("LTX2AudioVideoRotaryPosEmbed", T + "ltx2"),
            ("SanaWMLTX2AudioVideoRotaryPosEmbed", T + "sana_wm_refiner"),
        )
    ],
    (
        "Lumina2RotaryPosEmbed",
        T + "lumina2",
        [
            (
                (10000, [8, 4, 4]),
                [
                    (torch.randn(2, 3, 8, 12), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])),
                    (torch.randn(1, 3, 2, 2), torch.ones(1, 4, dtype=torch.int64)),
                ],
            )
        ],
    ),
    ("RopeEmbedder", T + "z_image", [((256.0, (16, 56, 56), (64, 128, 128)), WHOLE)]),
    ("RopeEmbedder", "controlnets.controlnet_z_image", [((), WHOLE)]),
    ("RopeEmbedder", T + "bria_fibo2", [((), WHOLE)]),
    ("PRXEmbedND", T + "prx", [((64, 10000, [32, 32]), [i[..., 1:] for i in MATRIX_IDS]), ((64, 100, [4, 6, 6]), BATCHED)]),
    ("HiDreamImageEmbedND", T + "hidream_image", [((10000, [64, 32, 32]), MATRIX_IDS), ((100, [4, 6, 6]), MATRIX_IDS)]),
    ("ErnieImageEmbedND3", T + "ernie_image", [((16, 256, (4, 6, 6)), [i.float() for i in BATCHED])]),
    ("Kandinsky5RoPE1D", T + "kandinsky", [((64,), [torch.arange(7), torch.tensor([[3, 1], [0, 900]])])]),
    (
        "Kandinsky5RoPE3D",
        T + "kandinsky",
        [(((16, 24, 24),), [((b, *map(len, p)), p, s) for p in KANDINSKY_3D for b, s in ((1, (1.0, 2.0, 2.0)), (2, (1.0, 1.0, 1.0)))])],
    ),
    ("Kandinsky6RoPE1D", T + "kandinsky6", [((64, 2048, 1e4, 0.7), [torch.arange(7), torch.tensor([[3, 1], [0, 900]])])]),
    ("Kandinsky6RoPE3D", T + "kandinsky6", [(((16, 24, 24),), [(p, (1.0, 3.0, 2.0)) for p in KANDINSKY_3D])]),
    ("Kandinsky6SRRoPE3D", T + "kandinsky6_sr", [(((4, 6, 6),), [(p,) for p in KANDINSKY_3D])]),
    ("Ideogram4MRoPE", T + "ideogram4", [((128, 5_000_000, (24, 20, 20)), MROPE), ((16, 100, (4, 2, 2)), MROPE)]),
    (
        "Cosmos3VLTextRotaryEmbedding",
        T + "cosmos3",
        [
            (
                (128, 5e6, (24, 20, 20)),
                [(p, torch.device("cpu"), d) for p in (POSITIONS[1], MROPE[1].permute(2, 0, 1)) for d in (torch.float32, torch.bfloat16)],
            )
        ],
    ),
    ("AnimaRotaryEmbedding", "condition_embedders.condition_embedder_anima", [((64,), [(torch.empty(1, dtype=d), p) for p in POSITIONS for d in (torch.float32, torch.float16)])]),
    ("MiniMaxH3RotaryPosEmbed", T + "minimax_h3", [((), [m[0] for m in MROPE]), ((4, 100.0), [MROPE[1][0].float()])]),
    ("MiniMaxH3VideoRotaryPosEmbed", "autoencoders.autoencoder_kl_minimax_h3", [((48,), [torch.rand(2, 9, 3) * 2 - 1])]),
    ("OmniGenSuScaledRotaryEmbedding", T + "omnigen", [((32, 131072, 4096, 10000, LONGROPE), [(torch.empty(1), p) for p in (POSITIONS[0], POSITIONS[1], POSITIONS[1] // 2)])]),
    ("OmniGenSuScaledRotaryEmbedding", T + "omnigen", [((32, 4096, 4096, 500, LONGROPE), [(torch.empty(1), POSITIONS[0])])]),
    ("AudioDiTRotaryEmbedding", T + "longcat_audio_dit", [((64,), [torch.empty(1, 9, 2), (torch.empty(1, 9, dtype=torch.bfloat16), 100)])]),
    ("MiniMaxMusic3RotaryEmbedding", T + "minimax_music3", [((32,), [(13, torch.device("cpu"))])]),
    ("StableAudio3RotaryEmbedding", T + "stable_audio3", [((32,), [(13, torch.device("cpu"))])]),
    ("SAMERotaryEmbedding", "autoencoders.autoencoder_same", [((32, 500), [(13, torch.device("cpu"))])]),
]  # fmt: skip

THEIR_NAME = {"SAMERotaryEmbedding": "RotaryEmbedding"}
APART = {"LTX2VideoVaeRotaryPosEmbed3D"}  # rotates the queries itself; see test_diffusers_rotation.py
RENAMED = {"RotaryEmbedding"}


def theirs(name, module):
    return getattr(importlib.import_module("diffusers.models." + module), THEIR_NAME.get(name, name))


def assert_same(got, want):
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape and got.device == want.device
        if want.numel():
            strides = [[stride for stride, size in zip(t.stride(), t.shape) if size > 1] for t in (got, want)]
            assert strides[0] == strides[1]
        assert torch.equal(got, want), f"differ by {(got - want).abs().max()}"
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for a, b in zip(got, want):
            assert_same(a, b)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_same(got[key], want[key])
    else:
        assert got == want


@pytest.mark.parametrize(("name", "module", "cases"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_equal(name, module, cases):
    for init, calls in cases:
        reference, ours = theirs(name, module)(*init), getattr(pos_embed, name)(*init)
        for call in each(calls):
            want = reference(*call)
            assert_same(ours(*call), want)
            assert_same(ours(*call), want)  # from the cache
    GRIDS.clear()


def test_every_class_of_diffusers_is_here():
    root = pathlib.Path(diffusers.__file__).parent / "models"
    tested = {THEIR_NAME.get(case[0], case[0]) for case in CASES} | APART
    missing = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            is_rope = isinstance(node, ast.ClassDef) and re.search(r"Rotary|Rope|RoPE|PosEmbed$|EmbedND", node.name)
            if is_rope and not (node.name in tested and (hasattr(pos_embed, node.name) or node.name in RENAMED)):
                missing.append(f"{path.stem}.{node.name}")
    assert not missing


CROP = ((3, 0), (27, 45))


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        (
            "get_1d_rotary_pos_embed",
            [
                ((32, 9), {}),
                ((32, torch.arange(5) * 0.5), {"use_real": True}),
                ((32, torch.arange(9).numpy()), {"use_real": True, "repeat_interleave_real": False, "theta": 256}),
                ((8, 9), {"linear_factor": 2.0, "ntk_factor": 1.5, "freqs_dtype": torch.float64}),
            ],
        ),
        ("get_2d_rotary_pos_embed", [((88, CROP, (5, 9)), {}), ((88, CROP, (6, 4)), {"use_real": False}), ((8, CROP, (1, 1)), {})]),
        ("get_2d_rotary_pos_embed_from_grid", [((16, torch.rand(2, 1, 3, 5) * 20), {"use_real": u}) for u in (True, False)]),
        ("get_2d_rotary_pos_embed_lumina", [((16, 3, 5), {}), ((64, 4, 4, 2.0, 1.5), {})]),
        (
            "get_3d_rotary_pos_embed",
            [
                ((64, CROP, (5, 9), 4), {}),
                ((64, CROP, (4, 4), 1), {"theta": 500}),
                ((64, None, (4, 6), 3), {"grid_type": "slice", "max_size": (8, 8)}),
            ],
        ),
        ("get_3d_rotary_pos_embed_allegro", [((96, CROP, (5, 9), 4), {"interpolation_scale": (2.0, 1.0, 3.0)})]),
    ],
)  # fmt: skip
def test_functions_equal(name, calls):
    reference = importlib.import_module("diffusers.models.embeddings")
    for args, options in calls:
        assert_same(getattr(pos_embed, name)(*args, **options), getattr(reference, name)(*args, **options))


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_ltx2_coordinates_equal(modality):
    for options in ({}, {"patch_size": 2, "patch_size_t": 2, "scale_factors": (4, 8, 16), "causal_offset": 0}):
        pair = [
            cls(64, modality=modality, **options)
            for cls in (theirs("LTX2AudioVideoRotaryPosEmbed", T + "ltx2"), pos_embed.LTX2AudioVideoRotaryPosEmbed)
        ]
        args = (2, 5, 4, 6, torch.device("cpu"), 30.0) if modality == "video" else (2, 7, torch.device("cpu"), 1)
        want, got = (m.prepare_coords(*args) for m in pair)
        assert_same(got, want)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
