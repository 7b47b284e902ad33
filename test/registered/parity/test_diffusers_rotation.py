"""Rotating as diffusers' models do, form by form: theirs and ours against float64, ours at least as close."""

import sys

import pytest
import torch
from diffusers.models import embeddings
from diffusers.models.autoencoders import ltx2_diffusion_decoder
from diffusers.models.transformers import (
    transformer_hidream_image,
    transformer_kandinsky6,
    transformer_ltx,
    transformer_ltx2,
    transformer_prx,
    transformer_qwenimage,
)

from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding import apply, pos_embed

register_cpu_ci(est_time=30, suite="parity-test-cpu")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def turn(x, cos, sin, interleaved):
    """The rotation in float64, by a cos and sin for each pair."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def assert_close(got, want, theirs=None):
    """Within one unit in the last place of the value rounded once."""
    assert got.shape == want.shape and (theirs is None or (theirs.shape == got.shape and theirs.dtype == got.dtype))
    rounded = want.to(got.dtype)
    step = torch.finfo(got.dtype).eps * rounded.double().abs().clamp(min=torch.finfo(got.dtype).smallest_normal)
    assert bool(((got.double() - rounded.double()).abs() <= step).all())
    if theirs is not None:
        coarse = torch.finfo(got.dtype).eps * 8
        torch.testing.assert_close(got.double(), theirs.double(), rtol=coarse, atol=coarse)


TABLE = pos_embed.get_3d_rotary_pos_embed(32, ((0, 0), (3, 4)), (3, 4), 2)
HALVED = pos_embed.GlmImageRotaryPosEmbed(32, 1)(torch.empty(1, 1, 4, 6))


@dtypes
@pytest.mark.parametrize("sequence_dim", [1, 2])
@pytest.mark.parametrize("unbind", [-1, -2])
def test_real(dtype, sequence_dim, unbind):
    cos, sin = TABLE if unbind == -1 else HALVED
    x = draw(2, 24, 3, 32, dtype=dtype)
    pairs = [t[:, 0::2] if unbind == -1 else t[:, :16] for t in (cos, sin)]
    want = turn(x, pairs[0][:, None], pairs[1][:, None], unbind == -1)
    if sequence_dim == 2:
        x, want = x.transpose(1, 2), want.transpose(1, 2)
    options = {"use_real_unbind_dim": unbind, "sequence_dim": sequence_dim}
    theirs = embeddings.apply_rotary_emb(x, (cos, sin), **options)
    assert_close(apply.apply_rotary_emb(x, (cos, sin), **options), want, theirs)


@dtypes
def test_complex(dtype):
    x = draw(2, 12, 3, 16, dtype=dtype)
    image = pos_embed.QwenEmbedRope(10000, [4, 6, 6])([(1, 3, 4)], None, 1)[0]
    want = turn(x, image.real[:, None], image.imag[:, None], True)
    theirs = transformer_qwenimage.apply_rotary_emb_qwen(x, image, use_real=False)
    assert_close(apply.apply_rotary_emb_qwen(x, image, use_real=False), want, theirs)
    lumina = pos_embed.Lumina2RotaryPosEmbed(10000, [8, 4, 4])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    both = lumina(torch.empty(2, 1, 6, 6), mask)[3]
    x = draw(2, both.shape[1], 3, 16, dtype=dtype)
    rows = both.unsqueeze(2).to(torch.complex64)
    want = turn(x, rows.real, rows.imag, True)
    assert_close(apply.apply_rotary_emb(x, both, use_real=False), want, embeddings.apply_rotary_emb(x, both, False))


@dtypes
def test_wan(dtype):
    cos, sin = pos_embed.WanRotaryPosEmbed(24, (1, 2, 2), 8)(torch.empty(1, 1, 2, 4, 6))
    x = draw(2, 12, 3, 24, dtype=dtype)
    want = turn(x, cos[..., 0::2], sin[..., 0::2], True)
    assert_close(apply.apply_rotary_emb_wan(x, cos, sin), want)


@dtypes
def test_ltx(dtype):
    tables = pos_embed.LTXVideoRotaryPosEmbed(50)(torch.empty(2, 24, 1), 2, 3, 4)
    x = draw(2, 24, 50, dtype=dtype)
    want = turn(x, tables[0][..., 0::2], tables[1][..., 0::2], True)
    assert_close(apply.apply_interleaved_rotary_emb(x, tables), want, transformer_ltx.apply_rotary_emb(x, tables))


@dtypes
@pytest.mark.parametrize("flat", [True, False])
def test_ltx2_split(dtype, flat):
    coords = torch.rand(2, 3, 7, 2, generator=torch.Generator().manual_seed(0)) * 50
    cos, sin = pos_embed.LTX2AudioVideoRotaryPosEmbed(64, rope_type="split", num_attention_heads=4)(coords)
    x = draw(2, 4, 7, 16, dtype=dtype)
    want = turn(x, cos, sin, False)
    if flat:
        x, want = (t.transpose(1, 2).flatten(2) for t in (x, want))
    theirs = transformer_ltx2.apply_split_rotary_emb(x, (cos, sin))
    assert_close(apply.apply_split_rotary_emb(x, (cos, sin)), want, theirs)


@dtypes
def test_allegro(dtype):
    *tables, grid_t, grid_h, grid_w = pos_embed.get_3d_rotary_pos_embed_allegro(48, ((0, 0), (3, 4)), (3, 4), 2)
    grid = torch.cartesian_prod(*(torch.arange(len(g)) for g in (grid_t, grid_h, grid_w)))
    positions = [axis[None] for axis in grid.T.contiguous()]
    x = draw(2, 3, 24, 48, dtype=dtype)
    want = torch.cat(
        [
            turn(part, cos[at, :8], sin[at, :8], False)
            for part, (cos, sin), at in zip(x.chunk(3, dim=-1), tables, grid.T)
        ],
        dim=-1,
    )
    theirs = embeddings.apply_rotary_emb_allegro(x, tables, positions)
    assert_close(apply.apply_rotary_emb_allegro(x, tables, positions), want, theirs)


@dtypes
def test_matrices(dtype):
    ids = torch.cartesian_prod(torch.arange(2.0), torch.arange(3.0), torch.arange(4.0))[None].double()
    x = draw(1, 24, 3, 16, dtype=dtype)
    hidream = pos_embed.HiDreamImageEmbedND(10000, [4, 6, 6])(ids)
    want = turn(x, hidream[..., 0, 0], hidream[..., 1, 0], True)
    theirs = transformer_hidream_image.apply_rope(x, x, hidream)[0]
    assert_close(apply.apply_rotation_matrices(x, hidream), want, theirs)
    prx = pos_embed.PRXEmbedND(16, 10000, [4, 6, 6])(ids)
    theirs = transformer_prx.apply_rope(x.transpose(1, 2), prx)
    assert_close(apply.apply_rotation_matrices(x.transpose(1, 2), prx, 2), want.transpose(1, 2), theirs)
    grid = pos_embed.Kandinsky6RoPE3D((4, 6, 6))([torch.arange(n) for n in (2, 3, 4)]).flatten(0, 2)
    want = turn(x, grid[..., 0, 0], grid[..., 1, 0], True)
    assert_close(apply.apply_rotation_matrices(x, grid), want, transformer_kandinsky6.apply_rotary(x, grid))


@dtypes
def test_ltx2_decoder_rotates_by_itself(dtype):
    x = draw(2, 3, 4, 5, 2, 24, dtype=dtype)
    theirs = ltx2_diffusion_decoder.LTX2VideoVaeRotaryPosEmbed3D(24)
    ours = pos_embed.LTX2VideoVaeRotaryPosEmbed3D(24)
    assert ours.rope_dim_split == theirs.rope_dim_split
    got, want = ours(x), theirs(x)
    coarse = torch.finfo(dtype).eps * 4
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=coarse, atol=coarse)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
