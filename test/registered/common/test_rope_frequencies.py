"""The numbers of a rope and the table from them: validated keys, the same bits however built, lean in memory."""

import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from common.ci_register import register_cpu_ci
from common.rope_frequencies import ROPE_TYPES, cos_sin_table, describe_key, mrope_pair_axes, normalize_rope

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

ROOT = Path(__file__).parents[3]
HEAD = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
LONG = dict(
    short_factor=[1.0] * 32, long_factor=[1.0 + i for i in range(32)], original_max_position_embeddings=2048, factor=2.0
)
SCALINGS = {
    "default": {},
    "linear": dict(factor=4.0),
    "ntk": dict(factor=4.0, mixed_b=0.7),
    "dynamic": dict(factor=4.0),
    "llama3": LLAMA3,
    "yarn": YARN,
    "deepseek_yarn": dict(factor=40.0, original_max_position_embeddings=4096, mscale=0.7, mscale_all_dim=1.0),
    "telechat3-yarn": dict(factor=4.0),
    "grok1": dict(factor=16.0),
    "longrope": LONG,
    "proportional": dict(rope_proportion=0.25),
    "xdrope": dict(alpha=1000.0, xdrope_section=[8, 8, 8, 8]),
    "axial": {},
}
each_type = pytest.mark.parametrize("kind", SCALINGS)


def spec(scaling=None, head=HEAD, rotary=HEAD, length=4096, base=10000.0, **more):
    return normalize_rope(head, rotary, length, base, scaling, **more)


def typed(kind, **changes):
    return spec({"rope_type": kind, **SCALINGS[kind], **changes})


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_type_is_tried_here():
    assert SCALINGS.keys() == ROPE_TYPES.keys()


@each_type
def test_a_row_has_the_same_bits_whichever_rows_are_built_with_it(kind):
    inv_freq, scale = typed(kind).frequencies()
    whole = cos_sin_table(inv_freq, scale, 70_000)
    for start, rows in ((0, 1), (1, 1), (3, 7), (4095, 2), (4096, 4096), (50_000, 20_000), (69_999, 1), (8, 0)):
        assert torch.equal(cos_sin_table(inv_freq, scale, rows, start), whole[start : start + rows])


def test_a_joint_table_is_its_pieces_from_position_0_on_and_a_single_factor_is_no_piece():
    one = typed("linear", factor=[2.0, 1.25])
    assert one.factor_rows == {2.0: 8192, 1.25: 5120} and one.full_rows == 13312 and not one.grows
    plain = spec().frequencies()[0]
    table = one.table(one.full_rows)
    assert torch.equal(table[:8192], cos_sin_table(plain / 2.0, 1.0, 8192))
    assert torch.equal(table[8192:], cos_sin_table(plain / 1.25, 1.0, 5120))
    with pytest.raises(ValueError, match=r"frequencies for each of its factors \[2.0, 1.25\]"):
        one.frequencies()
    assert typed("linear", factor=[2.0]) == typed("linear", factor=2.0)
    assert describe_key((HEAD, one, True, torch.float32)).endswith("factor=(2.0, 1.25)")


@each_type
@pytest.mark.parametrize("width", [4, 8, 20, 80, 96, 128, 256])
def test_the_table_equals_the_plain_expression(kind, width):
    if kind in ("longrope", "xdrope"):
        width = HEAD
    inv_freq, scale = spec({"rope_type": kind, **SCALINGS[kind]}, width, width).frequencies()
    angles = torch.arange(9000).float()[:, None] * inv_freq
    both = torch.cat((angles, angles), dim=-1)  # as transformers lays them out before it takes cos and sin
    cos, sin = (both.cos() * scale)[:, : width // 2], (both.sin() * scale)[:, width // 2 :]
    assert torch.equal(cos_sin_table(inv_freq, scale, 9000), torch.cat((cos, sin), dim=-1))


@each_type
def test_surroundings_change_no_bit(kind):
    one = typed(kind)
    inv_freq, scale = one.frequencies()
    table = cos_sin_table(inv_freq, scale, 100)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            again, same_scale = one.frequencies()
            table_again = cos_sin_table(again, same_scale, 100)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scale == same_scale and torch.equal(again, inv_freq) and torch.equal(table_again, table)
    assert inv_freq.dtype == table.dtype == torch.float32 and inv_freq.device.type == table.device.type == "cpu"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read as Linux counts it")
def test_no_more_than_a_fifth_of_the_table_lives_beside_it():
    program = """
        import resource
        from common.rope_frequencies import cos_sin_table, default
        inv_freq, _ = default(128, 10000.0, max_position=131072)
        cos_sin_table(inv_freq, 1.25, 64)
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        before = peak()
        table = cos_sin_table(inv_freq, 1.25, 131072)
        print((peak() - before) / table.nbytes)
    """
    ratio = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert float(ratio) <= 1.2


# --- types whose values depend on a length ----------------------------------------------------------------------------


def test_dynamic_up_to_its_length_is_the_plain_rope():
    plain = spec().frequencies()[0]
    for seq_len in (1, 4000, 4096):
        assert torch.equal(typed("dynamic", seq_len=seq_len).frequencies()[0], plain)
        assert typed("dynamic", seq_len=seq_len) == typed("dynamic", seq_len=4096)
    longer = typed("dynamic", seq_len=8192)
    assert longer.frequencies()[0][-1] < plain[-1]
    assert longer.full_rows == 8192 and not longer.grows


def test_longrope_takes_the_long_factors_for_more_than_the_original_length():
    scaling = {"rope_type": "longrope", **LONG}
    plain = spec().frequencies()[0]
    short, long = spec(scaling, length=2048), spec(scaling, length=2049)
    assert torch.equal(short.frequencies()[0], plain)
    torch.testing.assert_close(long.frequencies()[0], plain / torch.arange(1.0, 33.0))
    assert short.frequencies()[1] == long.frequencies()[1] == math.sqrt(1 + math.log(2) / math.log(2048))


def test_where_values_depend_on_the_length_the_table_does_not_grow():
    assert {kind for kind, rope in ROPE_TYPES.items() if not rope.grows} == {"dynamic", "longrope"}


# --- keys -------------------------------------------------------------------------------------------------------------


def test_order_spelling_and_number_types_do_not_matter():
    one = spec({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048})
    same = [
        spec({"original_max_position_embeddings": 2048, "factor": 4, "type": "yarn"}),
        spec({**YARN, "beta_fast": 32, "beta_slow": 1.0, "truncate": True, "attn_factor": 1}),
        spec({**YARN, "type": "yarn", "rope_theta": 10000, "partial_rotary_factor": 1.0, "mscale": None}),
        spec({**YARN, "original_max_position_embeddings": 2048.0}, base=10000),
        spec(dict(reversed(YARN.items()))),
    ]
    for other in same:
        assert other == one and hash(other) == hash(one)


def test_lists_and_tuples_are_alike():
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in LONG.items()}
    assert typed("longrope") == spec({"rope_type": "longrope", **tuples})
    section = {"rope_type": "default", "mrope_section": [8, 12, 12]}
    assert spec(section) == spec({"type": "mrope", "mrope_section": (8, 12, 12)})


def test_no_scaling_is_the_default_type():
    assert spec() == spec({}) == spec({"rope_type": "default"}) == spec({"type": "default", "rope_theta": 10000.0})


def test_a_default_is_the_number_itself():
    assert spec({"rope_type": "yarn", "factor": 4.0}) == spec(
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    )
    assert spec({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}) == spec(
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    )


@pytest.mark.parametrize(
    "change",
    [
        dict(factor=8.0),
        dict(original_max_position_embeddings=1024),
        dict(beta_fast=16),
        dict(beta_slow=2),
        dict(truncate=False),
        dict(mscale=0.7, mscale_all_dim=1.0),
        dict(attention_factor=1.5),
        dict(attn_factor=2.0),
        dict(extrapolation_factor=0.5),
        dict(apply_yarn_scaling=False),
    ],
)
def test_what_changes_the_values_changes_the_key(change):
    one, other = spec(YARN), spec({**YARN, **change})
    assert one != other
    (a, a_scale), (b, b_scale) = one.frequencies(), other.frequencies()
    assert not torch.equal(a, b) or a_scale != b_scale


def test_hunyuans_unread_parameters_are_not_in_the_key():
    published = dict(
        type="dynamic", alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=1.0
    )
    assert spec(published) == spec(dict(rope_type="dynamic", alpha=1000))


def test_a_proportional_rope_is_said_in_three_ways():
    ways = [
        spec({"rope_type": "proportional"}, head=256, rotary=256, partial_rotary_factor=0.25),
        spec({"rope_type": "proportional"}, head=256, rotary=64),
        spec({"rope_type": "proportional", "partial_rotary_factor": 0.25}, head=256, rotary=256),
        spec({"rope_type": "proportional", "rope_proportion": 0.25}, head=256, rotary=256),
    ]
    assert len(set(ways)) == 1 and ways[0].rotary_dim == 256
    inv_freq, _ = ways[0].frequencies()
    assert torch.equal(inv_freq[:32], spec(head=256, rotary=256).frequencies()[0][:32]) and not inv_freq[32:].any()


@pytest.mark.parametrize("head", range(6, 200, 2))
def test_every_share_of_a_proportional_head_turns_its_pairs(head):
    for rotary in range(2, head + 1, 2):
        inv_freq, _ = spec({"rope_type": "proportional"}, head=head, rotary=rotary).frequencies()
        assert int((inv_freq > 0).sum()) == rotary // 2


# --- axes -------------------------------------------------------------------------------------------------------------


def test_the_axes_of_pairs():
    assert mrope_pair_axes((2, 1, 3)) == (0, 0, 1, 2, 2, 2)
    assert mrope_pair_axes((4, 2, 2), "interleaved") == (0, 1, 2, 0, 1, 2, 0, 0)
    assert mrope_pair_axes((2, 3, 3), "glm") == (0, 1, 2, 0, 1, 2, 1, 2)
    assert mrope_pair_axes((2, 2, 3), "ernie") == (1, 2, 1, 2, 0, 0, 0)
    qwen3 = mrope_pair_axes((24, 20, 20), "interleaved")
    assert [qwen3.count(axis) for axis in range(3)] == [24, 20, 20] and qwen3[:60] == (0, 1, 2) * 20


@pytest.mark.parametrize(
    "section", [(8, 12, 12), (24, 20, 20), (1, 1, 1), (16, 24, 24), (10, 22), (16, 16), (1, 30, 1)]
)
def test_pangus_axes_use_each_section_up_and_seldom_stay(section):
    axes = mrope_pair_axes(section, "pangu")
    assert [axes.count(axis) for axis in range(len(section))] == list(section)
    if len(section) == 3:
        assert axes[-1] == 0
    seen = [0] * len(section)
    for pair, axis in enumerate(axes):  # an axis comes twice running only when no other is left
        seen[axis] += 1
        if pair and axis == axes[pair - 1]:
            left = [c - s - (a == 0 and len(section) == 3) for a, (c, s) in enumerate(zip(section, seen)) if a != axis]
            assert not any(n > 0 for n in left) or pair == len(axes) - 1


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(head=0), ValueError, "head_size is 0"),
        (dict(head=-64), ValueError, "head_size is -64"),
        (dict(head=True), TypeError, "head_size is True"),
        (dict(head=64.0), TypeError, "head_size is 64.0"),
        (dict(rotary=63), ValueError, "rotary_dim is 63; expected an even number from 2 to head_size 64"),
        (dict(rotary=66), ValueError, "rotary_dim is 66"),
        (dict(rotary="64"), TypeError, "rotary_dim is '64'"),
        (dict(length=0), ValueError, "max_position is 0"),
        (dict(length=[4096]), TypeError, r"max_position=\[4096\]"),
        (dict(base=0), ValueError, "base is 0"),
        (dict(base=-1.0), ValueError, "base is -1.0"),
        (dict(base=math.inf), ValueError, "base is inf"),
        (dict(base=math.nan), ValueError, "base is nan"),
        (dict(base=10**400), ValueError, "base is 1000"),
        (dict(base=True), TypeError, "base is True"),
        (dict(base=None), TypeError, "base is None"),
        (dict(partial_rotary_factor=0.0), ValueError, "partial_rotary_factor is 0.0"),
        (dict(partial_rotary_factor=1.5), ValueError, "partial_rotary_factor is 1.5; expected a number up to 1"),
        (dict(partial_rotary_factor=0.01), ValueError, "rotary_dim is 0"),
        (dict(scaling=[("factor", 2.0)]), TypeError, "rope_scaling is .*expected a dict"),
        (dict(scaling={"rope_type": "yam"}), ValueError, "rope_type of rope_scaling is 'yam'; known are .*yarn"),
        (dict(scaling={"factor": 2.0}), ValueError, "rope_type of rope_scaling is None; known are"),
        (
            dict(scaling={"rope_type": "linear", "type": "yarn", "factor": 2}),
            ValueError,
            "type of rope_scaling is 'yarn'",
        ),
        (dict(scaling={"rope_type": "linear"}), ValueError, "type 'linear' lacks the parameter 'factor'"),
        (dict(scaling={"rope_type": "yarn"}), ValueError, "type 'yarn' lacks the parameter 'factor'"),
        (dict(scaling={"rope_type": "llama3", "factor": 8.0}), ValueError, "lacks the parameter 'low_freq_factor'"),
        (dict(scaling={"rope_type": "dynamic"}), ValueError, "neither 'factor' nor 'alpha'"),
        (dict(scaling={"rope_type": "linear", "factor": "2"}), TypeError, "factor of rope_scaling is '2'"),
        (dict(scaling={"rope_type": "linear", "factor": True}), TypeError, "factor of rope_scaling is True"),
        (dict(scaling={"rope_type": "linear", "factor": math.nan}), ValueError, "factor of rope_scaling is nan"),
        (dict(scaling={"rope_type": "linear", "factor": 0}), ValueError, "factor of rope_scaling is 0"),
        (dict(scaling={**YARN, "truncate": 1}), TypeError, "truncate of rope_scaling is 1; expected a bool"),
        (dict(scaling={**YARN, "wobble": 3}), ValueError, "has the parameter wobble=3; known are factor"),
        (
            dict(scaling={**YARN, "original_max_position_embeddings": 20.5}),
            TypeError,
            "original_max_position_embeddings of rope_scaling is 20.5; expected an int",
        ),
        (dict(scaling={**YARN, "rope_theta": 5e5}), ValueError, "rope_theta of rope_scaling is 500000.0, but base"),
        (dict(scaling={**YARN, "partial_rotary_factor": 0.5}), ValueError, "partial_rotary_factor .* expected 32"),
        (dict(scaling=YARN, base=1), ValueError, "base is 1; YaRN"),
        (
            dict(scaling={"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5}),
            ValueError,
            "high_freq_factor is 0.5",
        ),
        (
            dict(scaling={"rope_type": "longrope", **LONG, "short_factor": [1.0]}),
            ValueError,
            "short_factor has 1 numbers; expected rotary_dim/2 = 32",
        ),
        (dict(scaling={"rope_type": "longrope", **LONG, "long_factor": 2.0}), TypeError, "expected a list of numbers"),
        (dict(scaling={"rope_type": "longrope", **LONG, "long_factor": [0.0] * 32}), ValueError, "long_factor"),
        (
            dict(scaling={"rope_type": "grok1", "factor": 2.0, "extra_method": "log"}),
            ValueError,
            "extra_method is 'log'",
        ),
        (dict(scaling={"rope_type": "mrope"}), ValueError, "lacks the parameter 'mrope_section'"),
        (dict(scaling={"rope_type": "default", "mrope_interleaved": True}), ValueError, "'mrope_section'"),
        (dict(scaling={"rope_type": "default", "mrope_section": [8, 8, 8]}), ValueError, "sum to rotary_dim/2 = 32"),
        (dict(scaling={"rope_type": "default", "mrope_section": [16.0, 16]}), ValueError, "expected whole numbers"),
        (dict(scaling={"rope_type": "default", "mrope_section": [16, 16], "mrope_layout": "x"}), ValueError, "layout"),
        (
            dict(scaling={"rope_type": "default", "mrope_section": [2, 2, 28], "mrope_interleaved": True}),
            ValueError,
            r"\(2, 2, 28\); its axes cannot take turns in 32 pairs",
        ),
        (
            dict(scaling={"full_attention": YARN, "sliding_attention": {}}),
            ValueError,
            "each layer type.*full_attention",
        ),
        (dict(scaling={"rope_type": "axial", "layout": "spiral"}), ValueError, "layout of rope_scaling is 'spiral'"),
        (dict(scaling={"rope_type": "axial"}, rotary=30), ValueError, "multiple of 4"),
        (dict(scaling={"rope_type": "linear", "factor": {1, 2}}), TypeError, "rope_scaling="),
    ],
)
def test_bad_input_is_named_with_its_value_and_what_was_expected(arguments, error, message):
    with pytest.raises(error, match=message):
        spec(**arguments)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
