"""Rope types and layer classes of the LLM subsystem, against float64 arithmetic written here from the papers."""

import math
import sys
from fractions import Fraction

import pytest
import torch

import srt.layers.rotary_embedding as ropes
from common.ci_register import register_cpu_ci
from common.rope_frequencies import ROPE_TYPES, mrope_pair_axes, set_table_limit, table_rows
from multimodal_gen.runtime.layers.rotary_embedding import get_rope as multimodal_gen_get_rope
from srt.layers.rotary_embedding import get_rope
from srt.layers.rotary_embedding.factory import _ROPE_DICT

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

DIM, TOP, BASE = 64, 256, 10000.0
POWERS = BASE ** (torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
PAIR = torch.arange(DIM // 2, dtype=torch.float64)


@pytest.fixture(autouse=True)
def empty_cache():
    _ROPE_DICT.clear()
    yield
    _ROPE_DICT.clear()


def ramp(original, fast=32, slow=1, truncate=True):
    """YaRN's kept share of each pair's frequency."""
    low, high = (DIM * math.log(original / (n * 2 * math.pi)) / (2 * math.log(BASE)) for n in (fast, slow))
    low, high = (math.floor(low), math.ceil(high)) if truncate else (low, high)
    low, high = max(low, 0), min(high, DIM - 1)
    return 1 - ((PAIR - low) / (high - low)).clamp(0, 1)


def magnitude(factor, mscale=1.0, slope=0.1):
    return slope * mscale * math.log(factor) + 1


def yarn(factor, original, **arguments):
    kept = ramp(original, **arguments)
    return (1 - kept) / (factor * POWERS) + kept / POWERS


def llama3(factor, low, high, original):
    turns = original / (2 * math.pi * POWERS)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (kept + (1 - kept) / factor) / POWERS


def scaled_base(stretch):
    return (BASE * stretch) ** (-2 * PAIR / DIM)


SHORT, LONG = [1.0 + i / 32 for i in range(32)], [2.0 + i / 8 for i in range(32)]
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
TYPES = {
    "default": ({}, 1 / POWERS, 1.0),
    "linear": ({"factor": 4.0}, 1 / POWERS / 4, 1.0),
    "ntk": ({"factor": 4.0}, scaled_base(4.0) / 4 ** (2 / DIM), 1.0),
    "ntk mixed": (
        {"rope_type": "ntk", "factor": 4.0, "mixed_b": 0.6},
        1 / POWERS / torch.exp(math.log(4.0) / 32**0.6 * (PAIR + 1) ** 0.6),
        1.0,
    ),
    "dynamic": ({"factor": 4.0}, scaled_base((16 - 3) ** (DIM / (DIM - 2))), 1.0),
    "dynamic alpha": ({"rope_type": "dynamic", "alpha": 1000.0}, scaled_base(1000.0 ** (DIM / (DIM - 2))), 1.0),
    "llama3": (LLAMA3, llama3(8.0, 1.0, 4.0, 64), 1.0),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 64}, yarn(4.0, 64), magnitude(4.0)),
    "yarn gpt-oss": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
        yarn(4.0, 64, truncate=False),
        magnitude(4.0),
    ),
    "yarn given factor": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
        yarn(4.0, 64),
        0.7,
    ),
    "yarn mscale": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
        },
        yarn(4.0, 64),
        magnitude(4.0, 0.7) / magnitude(4.0, 0.3),
    ),
    "deepseek_yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.707, "beta_fast": 16},
        yarn(4.0, 64, fast=16),
        magnitude(4.0, 0.707),
    ),
    "telechat3-yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 64},
        yarn(4.0, 64),
        magnitude(4.0, slope=0.07),
    ),
    "grok1": (
        {"factor": 4.0, "original_max_position_embeddings": 64},
        torch.exp(-torch.log(POWERS) - (1 - ramp(64)) * math.log(4.0)),
        1.0,
    ),
    "longrope": (
        {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64},
        1 / (torch.tensor(LONG, dtype=torch.float64) * POWERS),
        math.sqrt(1 + math.log(TOP / 64) / math.log(64)),
    ),
    "longrope short": (
        {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": TOP},
        1 / (torch.tensor(SHORT, dtype=torch.float64) * POWERS),
        1.0,
    ),
    "proportional": ({"rope_proportion": 0.25}, torch.where(PAIR < 8, 1 / POWERS, 0.0), 1.0),
}


def rotated(query, angle, scale=1.0, neox=True):
    cos, sin = (angle.cos() * scale).unsqueeze(1), (angle.sin() * scale).unsqueeze(1)
    query = query.double()
    if neox:
        a, b = query.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = query[..., ::2], query[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def queries(tokens, heads=2, dim=DIM):
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("neox", [True, False])
def test_each_type_rotates_as_its_paper_says(name, neox):
    parameters, inv_freq, scale = TYPES[name]
    scaling = {"rope_type": name, **parameters}
    rope = get_rope(DIM, DIM, TOP, BASE, neox, scaling, torch.float32)
    positions = torch.tensor([0, 1, 17, 100, TOP - 1])
    query = queries(5)
    ours, _ = rope(positions, query)
    expected = rotated(query, positions.double()[:, None] * inv_freq, scale, neox)
    assert (ours.double() - expected).abs().max() < 4 * TOP * 2**-22


def test_every_known_type_is_tested():
    tested = {parameters.get("rope_type", name) for name, (parameters, _, _) in TYPES.items()}
    assert ROPE_TYPES.keys() - tested == {"xdrope", "axial"}  # of several axes: below, and in the parity suite


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}, "original_max_position_embeddings"),
        ({"rope_type": "longrope", "short_factor": SHORT, "long_factor": 3, "original_max_position_embeddings": 64}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": SHORT, "long_factor": [1.0], "original_max_position_embeddings": 64}, "long_factor"),
        ({"rope_type": "dynamic"}, "alpha"),
        ({"rope_type": "yarn", "factor": 0}, "factor"),
        ({"rope_type": "yarn", "factor": float("inf")}, "factor"),
        ({"rope_type": "yarn", "factor": True}, "factor"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": 1}, "truncate"),
        ({"rope_type": "yarn", "factor": 4.0, "speed": 2}, "speed"),
        ({"rope_type": "default", "factor": 4.0}, "factor"),
        ({"rope_type": "grok1", "factor": 4.0, "extra_method": "guess"}, "extra_method"),
        ({"rope_type": "default", "mrope_section": [8, 8, 8]}, "mrope_section"),
        ({"rope_type": "xdrope", "alpha": 10.0}, "xdrope_section"),
        ({"rope_type": "default", "rope_theta": 500.0}, "rope_theta"),
        ({"factor": 4.0}, "rope_type"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_named(scaling, named):
    with pytest.raises((ValueError, TypeError), match=named):
        get_rope(DIM, DIM, TOP, BASE, True, scaling)
    assert len(_ROPE_DICT) == 0


def test_equal_meaning_is_one_entry():
    spellings = [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"original_max_position_embeddings": 64, "factor": 4, "type": "yarn"},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "truncate": True},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": BASE,
            "mscale": None,
        },
    ]
    assert len({id(get_rope(DIM, DIM, TOP, BASE, True, scaling)) for scaling in spellings}) == 1


def test_a_table_grows_with_the_rows_it_had_where_the_type_allows():
    rope = get_rope(DIM, DIM, TOP, BASE)
    before = rope.cos_sin_cache.clone()
    query = queries(2)
    ours, _ = rope(torch.tensor([5, 3 * TOP]), query)
    assert torch.equal(rope.cos_sin_cache[:TOP], before)
    expected = rotated(query, torch.tensor([5.0, 3 * TOP], dtype=torch.float64)[:, None] / POWERS)
    assert (ours.double() - expected).abs().max() < 4 * 3 * TOP * 2**-22


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [({"rope_type": "dynamic", "factor": 4.0}, 4 * TOP), (dict(rope_type="longrope", **TYPES["longrope"][0]), TOP)],
)
def test_a_table_whose_values_depend_on_its_length_does_not_grow(scaling, limit):
    rope = get_rope(DIM, DIM, TOP, BASE, True, scaling)
    rope(torch.tensor([limit - 1]), queries(1))
    with pytest.raises(IndexError, match=f"{limit}.*{limit} positions"):
        rope(torch.tensor([limit]), queries(1))


def test_positions_out_of_range_are_errors_and_write_nothing():
    rope = get_rope(DIM, DIM, TOP, BASE)
    query = queries(2)
    kept = query.clone()
    for positions, named in ((torch.tensor([3, -1]), "-1"), (torch.tensor([3, 1 << 24]), str(1 << 24))):
        with pytest.raises(IndexError, match=named):
            rope(positions, query, inplace=True)
        assert torch.equal(query, kept)


@pytest.mark.parametrize("form", ["flat", "heads", "batch", "batch heads", "fused slice"])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_the_forms_of_queries_and_keys(form, partial):
    rope = get_rope(DIM, DIM, TOP, BASE, partial_rotary_factor=partial)
    dim = int(DIM * partial)
    tokens, heads, kv = 6, 3, 1
    positions = torch.tensor([4, 9, 2, 0, 7, 7])
    query, key = queries(tokens, heads), queries(tokens + 1, kv)[1:]
    angle = positions.double()[:, None] * BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    expected = [torch.cat((rotated(x[..., :dim], angle), x[..., dim:].double()), dim=-1) for x in (query, key)]
    shapes = {
        "flat": lambda x: x.flatten(1),
        "heads": lambda x: x,
        "batch": lambda x: x.reshape(2, 3, -1),
        "batch heads": lambda x: x.reshape(2, 3, -1, DIM),
        "fused slice": lambda x: torch.cat((x.flatten(1), torch.full((tokens, 7), 9.0)), dim=1)[:, : x.shape[1] * DIM],
    }
    for at in (positions, positions.view(2, 3), positions.int()):
        q, k = (shapes[form](x) for x in (query, key))
        ours = rope(at, q, k)
        for our, their, given in zip(ours, expected, (q, k)):
            assert our.shape == given.shape
            assert (our.double().reshape(their.shape) - their).abs().max() < 1e-4
        q, k = q.clone(), k.clone()
        again = rope(at, q, k, inplace=True)
        assert again[0] is q and torch.equal(q, ours[0]) and torch.equal(k, ours[1])
    offset = rope(positions - 2, query, None, torch.full_like(positions, 2)) if positions.min() >= 2 else None
    assert offset is None or offset[1] is None


def test_offsets_are_added():
    rope = get_rope(DIM, DIM, TOP, BASE)
    query = queries(3)
    positions, offsets = torch.tensor([1, 2, 3]), torch.tensor([10, 20, 30])
    assert torch.equal(rope(positions, query, None, offsets)[0], rope(positions + offsets, query)[0])


# --- linear scaling by several factors -------------------------------------------------------------------------------

FACTORS = [1.0, 4.0, 1.5]  # in an order of their own


def joint(factors=FACTORS, top=TOP, neox=True, **more):
    return get_rope(DIM, DIM, top, BASE, neox, {"rope_type": "linear", "factor": factors, **more}, torch.float32)


def joint_truth(query, positions, factor, neox=True):
    return rotated(query, positions.double()[:, None] / factor / POWERS, neox=neox)


def assert_joint_right(rope, neox=True):
    """Every factor rotates its tokens as its paper says, also all in one call."""
    offsets = rope.scaling_factor_to_offset
    positions = torch.tensor([0, 1, 17, TOP - 1])
    query, key = queries(4), queries(5, 1)[1:]
    for factor, offset in offsets.items():
        at = torch.cat((positions, torch.tensor([math.ceil(TOP * factor) - 1])))
        ours, _ = rope(at, queries(5), None, torch.full_like(at, offset))
        assert (ours.double() - joint_truth(queries(5), at, factor, neox)).abs().max() < 4 * TOP * 2**-22
    several = torch.tensor([offsets[factor] for factor in (4.0, 1.0, 1.5, 4.0)])
    for our, x in zip(rope(positions, query, key, several), (query, key)):
        for i, factor in enumerate((4.0, 1.0, 1.5, 4.0)):
            expected = joint_truth(x[i : i + 1], positions[i : i + 1], factor, neox)
            assert (our[i : i + 1].double() - expected).abs().max() < 4 * TOP * 2**-22


@pytest.mark.parametrize("neox", [True, False])
def test_a_joint_table_rotates_by_the_factor_at_each_offset(neox):
    assert_joint_right(joint(neox=neox), neox)


def test_offsets_are_the_rows_of_the_factors_before():
    rope = joint([1.0, 4.0, 1.5], top=255)
    assert rope.scaling_factor_to_offset == {1.0: 0, 4.0: 255, 1.5: 255 + 1020}
    assert len(rope.cos_sin_cache) == 255 + 1020 + 383  # 382.5 positions begin 383 rows
    assert rope.scaling_factors == [1.0, 4.0, 1.5]
    assert joint(4.0).scaling_factor_to_offset == {4.0: 0} and joint(4.0).scaling_factors == [4.0]


def test_a_joint_tables_pieces_are_the_bits_of_each_factors_own_table():
    rope = joint()
    for factor, offset in rope.scaling_factor_to_offset.items():
        own = joint(factor).cos_sin_cache
        assert torch.equal(rope.cos_sin_cache[offset : offset + len(own)], own)


def test_a_joint_table_is_one_entry_for_equal_factors_in_equal_order():
    assert joint([1, 4]) is joint((1.0, 4.0)) is joint([1.0, 4])
    assert joint([4]) is joint([4.0]) is joint(4.0)
    assert len({id(joint(factors)) for factors in ([1.0, 4.0], [4.0, 1.0], [1.0, 4.5], [1.0, 4.0, 8.0], 4.0)}) == 5
    assert joint([1.0, 4.0], top=TOP + 1) is not joint([1.0, 4.0])


def test_a_joint_table_cannot_grow():
    rope = joint()
    rows, query = len(rope.cos_sin_cache), queries(2)
    kept, table = query.clone(), rope.cos_sin_cache.clone()
    last, offset = math.ceil(TOP * 1.5) - 1, rope.scaling_factor_to_offset[1.5]
    rope(torch.tensor([last]), queries(1), None, torch.tensor([offset]))
    for reach in (
        lambda: rope(torch.tensor([3, last + 1]), query, None, torch.tensor([0, offset]), inplace=True),
        lambda: rope.reserve(rows + 1),
    ):
        with pytest.raises(IndexError, match=rf"position {rows}.*{rows} rows of the joint table.*\[1.0, 4.0, 1.5\]"):
            reach()
    assert torch.equal(query, kept) and torch.equal(rope.cos_sin_cache, table)
    with pytest.raises(IndexError, match="negative"):
        rope(torch.tensor([-1]), queries(1))


def test_a_joint_table_is_whole_whatever_the_table_limit():
    set_table_limit(16)
    try:
        rope = joint([4.0, 1.5, 1.0])  # an order that no other test has a table of, whose rows would serve here
        assert len(rope.cos_sin_cache) == table_rows(rope.spec) == TOP + 4 * TOP + TOP * 3 // 2
        assert_joint_right(rope)
        assert len(joint(7.0).cos_sin_cache) == 16
    finally:
        set_table_limit(None)


RUINS = {
    "overwritten behind PyTorch's back": lambda rope: rope.cos_sin_cache.data.fill_(0.5),
    "by another factor's rows": lambda rope: rope.cos_sin_cache.data[:TOP].copy_(
        rope.cos_sin_cache.data[TOP : 2 * TOP]
    ),
    "storage freed": lambda rope: rope.cos_sin_cache.untyped_storage().resize_(0),
    "to meta": lambda rope: rope.to("meta"),
    "to_empty": lambda rope: rope.to_empty(device="cpu"),
    "cast": lambda rope: rope.half(),
}


@pytest.mark.parametrize("ruin", RUINS.values(), ids=RUINS)
def test_a_ruined_joint_table_is_rebuilt(ruin):
    rope = joint()
    right = rope.cos_sin_cache.clone()
    ruin(rope)
    assert_joint_right(rope)
    assert torch.equal(rope.cos_sin_cache, right)
    rope.cos_sin_cache = right.to("meta")
    assert torch.equal(joint().cos_sin_cache, right)


def test_both_subsystems_share_a_joint_table():
    theirs = multimodal_gen_get_rope(
        DIM, DIM, TOP, BASE, True, {"rope_type": "linear", "factor": FACTORS}, torch.float32
    )
    assert theirs.cos_sin_cache.data_ptr() == joint().cos_sin_cache.data_ptr()


@pytest.mark.parametrize(
    ("scaling", "error", "message"),
    [
        ({"rope_type": "linear", "factor": []}, ValueError, r"factor of rope_scaling is \[\]; expected one or more"),
        ({"rope_type": "linear", "factor": [1.0, 4, 4.0]}, ValueError, r"factor .* \[1.0, 4, 4.0\]; .* each once"),
        ({"rope_type": "linear", "factor": [1.0, -4.0]}, ValueError, "factor of rope_scaling is -4.0"),
        ({"rope_type": "linear", "factor": [1.0, "4"]}, TypeError, "factor of rope_scaling is '4'"),
        ({"rope_type": "linear", "factor": [1.0, [4.0]]}, TypeError, r"factor of rope_scaling is \(4.0,\)"),
        ({"rope_type": "ntk", "factor": [1.0, 4.0]}, TypeError, r"factor of rope_scaling is \(1.0, 4.0\); .* a number"),
    ],
)
def test_wrong_factors_are_named(scaling, error, message):
    with pytest.raises(error, match=message):
        get_rope(DIM, DIM, TOP, BASE, True, scaling)
    assert len(_ROPE_DICT) == 0


# --- positions of several axes ---------------------------------------------------------------------------------------


def test_pair_axes_of_each_layout():
    assert mrope_pair_axes((2, 3, 3)) == (0, 0, 1, 1, 1, 2, 2, 2)
    assert mrope_pair_axes((4, 2, 2), "interleaved") == (0, 1, 2, 0, 1, 2, 0, 0)
    assert mrope_pair_axes((2, 3, 3), "glm") == (0, 1, 2, 0, 1, 2, 1, 2)
    assert mrope_pair_axes((2, 2, 3), "ernie") == (1, 2, 1, 2, 0, 0, 0)


@pytest.mark.parametrize(
    ("scaling", "axes"),
    [
        ({"rope_type": "default", "mrope_section": [8, 12, 12]}, (8, 12, 12)),
        ({"type": "mrope", "mrope_section": [8, 12, 12]}, (8, 12, 12)),
        ({"rope_type": "xdrope", "alpha": 1.0, "xdrope_section": [8, 8, 8, 8]}, (8, 8, 8, 8)),
    ],
)
def test_each_pair_takes_its_axis(scaling, axes):
    rope = get_rope(DIM, DIM, TOP, BASE, True, scaling, torch.float32)
    assert isinstance(rope, ropes.MRotaryEmbedding)
    positions = torch.randint(0, TOP, (len(axes), 5), generator=torch.Generator().manual_seed(2))
    query = queries(5)
    chosen = torch.tensor([axis for axis, count in enumerate(axes) for _ in range(count)])
    expected = rotated(query, positions.double()[chosen].T / POWERS)
    assert (rope(positions, query)[0].double() - expected).abs().max() < 1e-3
    text = torch.arange(5)
    assert torch.equal(rope(text, query)[0], rope(text.expand(len(axes), 5), query)[0])


def evenly(section):
    """openPangu's order in exact fractions: the axis with the smallest share placed so far, the first of equal ones,
    and not the one before while another is left; with time, its last pair closes."""
    counts = dict(enumerate(section))
    counts[0] -= len(section) == 3
    order = []
    while len(order) < sum(counts.values()):
        shares = sorted((Fraction(order.count(a), n), a) for a, n in counts.items() if order.count(a) < n)
        order.append(next((a for _, a in shares if order[-1:] != [a]), shares[0][1]))
    return tuple(order) + (0,) * (len(section) == 3)


def test_openpangus_order_is_the_published_one():
    assert mrope_pair_axes((2, 3, 3), "pangu") == (0, 1, 2, 1, 2, 1, 2, 0)  # as vLLM's own tests have it
    assert mrope_pair_axes((2, 2), "pangu") == (0, 1, 0, 1)
    for section in ((24, 20, 20), (16, 24, 24), (8, 12, 12), (1, 30, 1), (10, 22)):
        assert mrope_pair_axes(section, "pangu") == evenly(section)
    assert mrope_pair_axes((24, 20, 20), "pangu") != mrope_pair_axes((24, 20, 20), "interleaved")  # Qwen3-VL's


@pytest.mark.parametrize("section", [[8, 12, 12], [12, 10, 10], [14, 18]])
@pytest.mark.parametrize("neox", [True, False])
def test_openpangu_rotates_each_pair_by_its_axis(section, neox):
    scaling = {"rope_type": "openpangu", "mrope_section": section, "mrope_interleaved": True}
    rope = get_rope(DIM, DIM, TOP, BASE, neox, scaling, torch.float32)
    assert isinstance(rope, ropes.MRotaryEmbedding)
    positions = torch.randint(0, TOP, (len(section), 5), generator=torch.Generator().manual_seed(2))
    query = queries(5)
    expected = rotated(query, positions.double()[list(evenly(section))].T / POWERS, neox=neox)
    named = ropes.MRotaryEmbeddingInterleaved(DIM, DIM, TOP, BASE, neox, torch.float32, section)
    for layer in (rope, named):
        assert (layer(positions, query)[0].double() - expected).abs().max() < 1e-3
    with pytest.raises(ValueError, match="mrope_interleaved"):
        ropes.MRotaryEmbeddingInterleaved(DIM, DIM, TOP, BASE, neox, torch.float32, section, False)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"mrope_section": [8, 12, 12]}, "mrope_interleaved of rope_scaling is None; .* expects True"),
        ({"mrope_section": [8, 12, 12], "mrope_interleaved": False}, "mrope_interleaved of rope_scaling is False"),
        ({"mrope_section": [8, 8, 8, 8], "mrope_interleaved": True}, r"\(8, 8, 8, 8\); openPangu's layout expects"),
        ({"mrope_section": [0, 16, 16], "mrope_interleaved": True}, "at least one pair for time"),
        ({"mrope_interleaved": True}, "'mrope_section'"),
    ],
)
def test_what_openpangu_lacks_is_named(scaling, message):
    with pytest.raises(ValueError, match=message):
        get_rope(DIM, DIM, TOP, BASE, True, {"rope_type": "openpangu", **scaling})


# --- classes with another forward -----------------------------------------------------------------------------------


def test_dual_chunk_rotates_a_query_for_each_distance():
    rope = get_rope(
        DIM, DIM, 1000, BASE, True, None, torch.float32, dual_chunk_attention_config=dict(chunk_size=32, local_size=8)
    )
    positions = torch.tensor([0, 23, 24, 500])
    query, key = queries(4), queries(5, 1)[1:]
    five, ours = rope(positions, query, key)
    within = positions % 24
    places = (within, (within + 24).clamp(max=32), torch.full_like(within, 32), within + 24, within + 32)
    for our, place in zip(five.view(4, 5, 2, DIM).unbind(1), places):
        assert (our.double() - rotated(query, place.double()[:, None] / POWERS)).abs().max() < 1e-3
    assert (ours.view(4, 1, DIM).double() - rotated(key, within.double()[:, None] / POWERS)).abs().max() < 1e-3
    with pytest.raises(ValueError, match="local_size"):
        get_rope(DIM, DIM, 1000, BASE, dual_chunk_attention_config=dict(chunk_size=32))


def test_llama4_vision_turns_by_column_and_row_and_leaves_the_class_token():
    rope = ropes.Llama4VisionRotaryEmbedding(DIM, DIM // 2, 9, BASE)
    query = queries(10).unsqueeze(0)
    half = BASE ** (-torch.arange(0, DIM // 2, 2, dtype=torch.float64) / (DIM // 2))
    patch = torch.arange(9, dtype=torch.float64)[:, None]
    angle = torch.cat(((patch % 3 + 1) * half, (patch // 3 + 1) * half), dim=1)
    angle = torch.cat((angle, torch.zeros(1, DIM // 2, dtype=torch.float64)))
    expected = rotated(query[0], angle, neox=False)
    for _ in range(2):
        assert (rope(query)[0][0].double() - expected).abs().max() < 1e-5
        rope.cos_sin_cache.data.fill_(0.5)


def fope(**changes):
    scaling = {"rope_type": "default", "use_fope": True, "num_kv_heads": 2, **changes}
    return get_rope(DIM, DIM, TOP, BASE, True, scaling, torch.float32)


def fope_truth(rope, query, positions):
    used = 1 / POWERS[1 / POWERS > 2 * math.pi / TOP]
    angle = positions.double()[:, None] * used
    halves = []
    for values, mixing in ((angle.cos(), rope.cos_coef), (angle.sin(), rope.sin_coef)):
        mixed = torch.einsum("td,hde->the", values, mixing.double())
        halves.append(torch.nn.functional.pad(mixed, (0, DIM // 2 - len(used)), value=1.0).repeat(1, 1, 2))
    cos, sin = (half.repeat_interleave(query.shape[1] // 2, dim=1) for half in halves)
    a, b = query.double().chunk(2, dim=-1)
    return query.double() * cos + torch.cat((-b, a), dim=-1) * sin


def test_fope_follows_its_parameters_and_is_never_shared():
    rope = fope()
    assert fope() is not rope and not any(entry is rope for entry in _ROPE_DICT.values())
    positions, query, key = torch.tensor([0, 9, TOP - 1]), queries(3, 4), queries(4, 2)[1:]

    def assert_right():
        q, k = rope(positions, query.flatten(1), key.flatten(1))
        assert (q.view(query.shape).double() - fope_truth(rope, query, positions)).abs().max() < 1e-3
        assert (k.view(key.shape).double() - fope_truth(rope, key, positions)).abs().max() < 1e-3

    assert_right()
    with torch.no_grad():
        rope.cos_coef.add_(torch.randn_like(rope.cos_coef))
    assert_right()
    rope.load_state_dict({name: torch.randn_like(p) for name, p in rope.state_dict().items()})
    assert_right()
    rope.sin_coef.data = torch.randn_like(rope.sin_coef)
    assert_right()
    rope.cos_sin_cache.data.zero_()
    assert_right()
    rope.cos_sin_cache.untyped_storage().resize_(0)
    assert_right()
    with pytest.raises(IndexError, match=str(TOP)):
        rope(torch.tensor([TOP]), query[:1].flatten(1), key[:1].flatten(1))


def test_fope_from_meta_waits_for_its_parameters():
    with torch.device("meta"):
        rope = fope()
    weights = {name: torch.randn(p.shape) for name, p in rope.state_dict().items()}
    rope.to_empty(device="cpu")
    rope.load_state_dict(weights)
    positions, query = torch.tensor([0, 9, 200]), queries(3, 4)
    ours, _ = rope(positions, query.flatten(1), query[:, :2].flatten(1))
    assert (ours.view(query.shape).double() - fope_truth(rope, query, positions)).abs().max() < 1e-3


# --- upstream's names ------------------------------------------------------------------------------------------------

NUMBERS = (DIM, DIM, 64, BASE, True)
CLASSES = {
    "LinearScalingRotaryEmbedding": ((4.0, torch.float32), {}, {"rope_type": "linear", "factor": 4.0}),
    "LinearScalingRotaryEmbedding by several": (([1.0, 4.0], torch.float32), {}, {"rope_type": "linear", "factor": [1.0, 4.0]}),
    "NTKScalingRotaryEmbedding": ((4.0, torch.float32), {"mixed_b": 0.5}, {"rope_type": "ntk", "factor": 4.0, "mixed_b": 0.5}),
    "DynamicNTKScalingRotaryEmbedding": ((4.0, torch.float32), {}, {"rope_type": "dynamic", "factor": 4.0}),
    "DynamicNTKAlphaRotaryEmbedding": ((50.0, torch.float32), {}, {"rope_type": "dynamic", "alpha": 50.0}),
    "Llama3RotaryEmbedding": ((torch.float32, 8.0, 1.0, 4.0, 64), {}, {"rope_type": "llama3", **LLAMA3}),
    "YaRNScalingRotaryEmbedding": ((4.0, torch.float32), {"beta_fast": 16}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16}),
    "DeepseekScalingRotaryEmbedding": ((4.0, torch.float32), {"mscale": 0.7, "device": "cpu"}, {"rope_type": "deepseek_llama_scaling", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7}),
    "TeleChat3RoPEScaledRotaryEmbedding": ((4.0, torch.float32), {}, {"rope_type": "telechat3-yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "Grok1ScalingRotaryEmbedding": ((4.0, torch.float32), {"extra_method": "theta_scale"}, {"rope_type": "grok1", "factor": 4.0, "original_max_position_embeddings": 64, "extra_method": "theta_scale"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_upstreams_classes_are_the_factorys(name):
    arguments, keywords, scaling = CLASSES[name]
    ours = getattr(ropes, name.split()[0])(*NUMBERS, *arguments, **keywords)
    shared = get_rope(*NUMBERS, scaling, torch.float32)
    assert type(shared) is type(ours)
    assert torch.equal(shared.cos_sin_cache, ours.cos_sin_cache)
    assert shared.cos_sin_cache.data_ptr() == ours.cos_sin_cache.data_ptr()  # one memory


def test_phi3_and_gemma4_and_the_axes_classes():
    phi = ropes.Phi3LongRoPEScaledRotaryEmbedding(DIM, DIM, TOP, 64, BASE, True, None, SHORT, LONG)
    assert torch.equal(
        phi.cos_sin_cache,
        get_rope(DIM, DIM, TOP, BASE, True, dict(rope_type="longrope", **TYPES["longrope"][0])).cos_sin_cache,
    )
    gemma = ropes.Gemma4RotaryEmbedding(DIM, 16, TOP, BASE, True)
    assert torch.equal(
        gemma.cos_sin_cache,
        get_rope(DIM, DIM, TOP, BASE, True, dict(rope_type="proportional", rope_proportion=0.25)).cos_sin_cache,
    )
    assert ropes.Ernie4_5_VLRotaryEmbedding(128, 128, 64, BASE, False).spec.pair_axes == (1, 2) * 22 + (0,) * 20
    yarn = ropes.YaRNScalingMRotaryEmbedding(*NUMBERS, 4.0, torch.float32, mrope_section=[8, 12, 12])
    assert yarn.spec.rope_type == "yarn" and yarn.spec.pair_axes.count(1) == 12
    assert ropes.XDRotaryEmbedding(*NUMBERS, 10.0, None, [8, 8, 8, 8]).spec.pair_axes.count(3) == 8


def test_get_rope_cpu_and_the_wrapper_share_with_get_rope():
    assert ropes.get_rope_cpu(*NUMBERS) is get_rope(*NUMBERS)
    assert ropes.get_rope_wrapper(*NUMBERS, device="cpu") is get_rope(*NUMBERS)
    assert ropes.get_rope_wrapper(*NUMBERS) is get_rope(*NUMBERS)
    with torch.device("meta"):
        assert not ropes.get_rope_cpu(DIM, DIM, 32, BASE).cos_sin_cache.is_meta


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
