"""Rotating part of a sequence: text stays, strided and in-place queries, batches, gradients, bad input."""

import sys

import pytest
import torch

from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding.apply import apply_rotary_emb, rotate_tokens
from multimodal_gen.runtime.layers.rotary_embedding.nd import NDRotaryEmbedding

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

COS, SIN = NDRotaryEmbedding([4, 6, 6], 10000.0).forward_from_grid((2, 3, 2))


def turn(x, cos=COS, sin=SIN):
    """Interleaved pairs of ``[B, S, H, D]`` in float64."""
    x, cos, sin = x.double(), cos.double().unsqueeze(-2), sin.double().unsqueeze(-2)
    width = 2 * cos.shape[-1]
    a, b = x[..., 0:width:2], x[..., 1:width:2]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, x[..., width:]], dim=-1)


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("start", [0, 3, 5])
@pytest.mark.parametrize("sequence_dim", [1, 2])
@pytest.mark.parametrize("inplace", [False, True])
def test_text_before_and_after_stays(start, sequence_dim, inplace):
    query, key = torch.randn(2, 17, 3, 16), torch.randn(2, 17, 1, 16)
    want = [torch.cat([x[:, :start].double(), turn(x[:, start : start + 12]), x[:, start + 12 :].double()], dim=1) for x in (query, key)]  # fmt: skip
    if sequence_dim == 2:
        query, key = query.transpose(1, 2).contiguous(), key.transpose(1, 2).contiguous()
        want = [x.transpose(1, 2) for x in want]
    kept = query.clone()
    q, k = rotate_tokens(query, key, COS, SIN, sequence_dim=sequence_dim, start=start, inplace=inplace)
    close(q, want[0])
    close(k, want[1])
    assert (q is query and k is key) if inplace else torch.equal(query, kept)


def test_slices_of_a_fused_projection():
    fused = torch.randn(2, 12, 3, 2, 16)
    query, key = fused[:, :, 0], fused[:, :, 1]
    want = [turn(x) for x in (query, key)]
    for got, exact in zip(rotate_tokens(query, key, COS, SIN, inplace=True), want):
        close(got, exact)
    close(fused[:, :, 0], want[0])


def test_heads_wider_than_the_table():
    x = torch.randn(1, 12, 2, 20)
    close(rotate_tokens(x, None, COS, SIN)[0], turn(x))


def test_a_table_for_each_sample():
    cos, sin = torch.stack([COS, COS.flip(0)]), torch.stack([SIN, SIN.flip(0)])
    x = torch.randn(2, 12, 3, 16)
    close(rotate_tokens(x, None, cos, sin)[0], turn(x, cos, sin))
    close(rotate_tokens(x, None, cos[:1], sin[:1])[0], turn(x))


def test_tables_that_are_parts_of_one_memory():
    joint = torch.cat([COS, SIN])
    x = torch.randn(1, 5, 2, 16)
    for memory in (joint, joint._lazy_clone()):
        cos, sin = memory[3:8], memory[15:20]
        close(rotate_tokens(x, None, cos, sin)[0], turn(x, COS[3:8], SIN[3:8]))


def test_gradients_reach_queries_and_keys():
    query = torch.randn(1, 14, 2, 16, requires_grad=True)
    q, _ = rotate_tokens(query, None, COS, SIN, start=2)
    weight = torch.randn_like(q)
    (q * weight).sum().backward()
    want = torch.cat([weight[:, :2].double(), turn(weight[:, 2:], COS, -SIN)], dim=1)
    close(query.grad, want)


def test_rotating_leaves_the_shared_tables_alone():
    module = NDRotaryEmbedding([4, 6, 6], 10000.0)
    tables, others = module.forward_from_grid((2, 3, 2)), module.forward_from_grid((2, 3, 2))
    rotate_tokens(torch.randn(1, 12, 2, 16), None, *tables)
    assert all(torch.equal(a, b) for a, b in zip(tables, (COS, SIN)))
    address = torch._C._data_address  # still one memory: rotating copies no table
    assert all(address(a) == address(b) for a, b in zip(tables, others))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: rotate_tokens(x, None, COS, SIN, start=3), "rows"),
        (lambda x: rotate_tokens(x, None, COS, SIN, start=-1), "rows"),
        (lambda x: rotate_tokens(x, None, COS, SIN, sequence_dim=3), "sequence_dim"),
        (lambda x: rotate_tokens(x[0], None, COS, SIN), "dimensions"),
        (lambda x: rotate_tokens(x, None, COS.expand(3, -1, -1), SIN.expand(3, -1, -1)), "batch"),
        (lambda x: apply_rotary_emb(x, (COS, SIN), use_real_unbind_dim=0), "use_real_unbind_dim"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.randn(2, 14, 3, 16))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
