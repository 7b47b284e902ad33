"""The doctor on bare modules, on modules shaped as vLLM's and sglang's, and on our own; and guarded foreign caches."""

import copy
import json
import math
import pickle
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from common.cache_liveness import release_memory
from common.ci_register import register_cpu_ci
from common.rope_doctor import check_model, guard_cache, repair_model
from srt.layers.rotary_embedding import get_rope

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

DIM, TOP, BASE = 32, 64, 10000.0


def true_frequencies():
    return 1.0 / (BASE ** (torch.arange(0, DIM, 2, dtype=torch.int64).float() / DIM))


def true_table():
    angle = torch.arange(TOP, dtype=torch.float32)[:, None] * true_frequencies()
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


class RemoteRotary(nn.Module):
    """As remote code has it: derived from its arguments, which it keeps."""

    def __init__(self, dim, max_position_embeddings=TOP, base=BASE):
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        self.register_buffer("inv_freq", true_frequencies(), persistent=False)
        table = true_table()
        self.register_buffer("cos_cached", torch.cat((table[:, : DIM // 2],) * 2, dim=-1), persistent=False)
        self.register_buffer("sin_cached", torch.cat((table[:, DIM // 2 :],) * 2, dim=-1), persistent=False)


class EngineRotary(nn.Module):
    """As vLLM and sglang have it: the table by a method, from attributes."""

    def __init__(self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype):
        super().__init__()
        self.head_size, self.rotary_dim, self.base = head_size, rotary_dim, base
        self.max_position, self.is_neox_style, self.dtype = max_position_embeddings, is_neox_style, dtype
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache(), persistent=False)

    def _compute_cos_sin_cache(self):
        return true_table()


class ConfigRotary(nn.Module):
    """Knows nothing; its model has a config."""

    def __init__(self, secret):
        super().__init__()
        self.register_buffer("inv_freq", true_frequencies(), persistent=False)


class ComplexRotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        angle = torch.arange(TOP, dtype=torch.float32)[:, None] * true_frequencies()
        self.freqs_cis = torch.polar(torch.ones_like(angle), angle)  # a plain attribute


CONFIG = dict(model_type="llama", hidden_size=DIM, num_attention_heads=1, max_position_embeddings=TOP, rope_theta=BASE)


def model_of(rotary):
    model = nn.Module()
    model.config = CONFIG
    model.linear = nn.Linear(2, 2)
    model.rotary_emb = rotary
    return model


SHAPES = {
    "remote code": (lambda: RemoteRotary(DIM), "own method"),
    "engine": (lambda: EngineRotary(DIM, DIM, TOP, BASE, True, torch.bfloat16), "own method"),
    "config": (lambda: ConfigRotary(secret=3), "config"),
    "complex": (lambda: ComplexRotary(DIM), "own method"),
    "ours": (lambda: get_rope(DIM, DIM, TOP, BASE, dtype=torch.float32), "derivation"),
    "ours, joint": (
        lambda: get_rope(DIM, DIM, TOP, BASE, True, {"rope_type": "linear", "factor": [1.0, 4.0]}, torch.float32),
        "derivation",
    ),
}


def tensors(rotary):
    return {
        **dict(rotary.named_buffers()),
        **{n: v for n, v in vars(rotary).items() if isinstance(v, torch.Tensor) and not n.startswith("_")},
    }


def assign(rotary, name, tensor):
    if name in rotary._buffers:
        rotary._buffers[name] = tensor
    else:
        setattr(rotary, name, tensor)


DAMAGES = {
    "zero-filled": (lambda t: t.data.zero_(), "wrong", "zero"),
    "garbage": (lambda t: t.data.fill_(-1e34), "wrong", "uninitialised"),
    "not a number": (lambda t: t.data.fill_(float("nan")), "wrong", "not finite"),
    "other parameters": (lambda t: t.data.copy_(t.data.roll(1, -1)), "wrong", "other parameters"),
    "one element": (lambda t: t.data.view(-1)[-9:-8].mul_(0.5), "wrong", "other parameters"),
    "freed": (lambda t: t.untyped_storage().resize_(0), "dead", "freed"),
    "meta": (lambda t: t.to("meta"), "dead", "meta"),
    "cast": (lambda t: t.bfloat16().float() if not t.is_complex() else t * 0.5, "degraded", "cast"),
}


class JointRotary(nn.Module):
    """An engine's joint table of several linear factors; its model has a config."""

    def __init__(self, secret):
        super().__init__()
        tables = []
        for factor in FACTORS:
            angle = torch.arange(int(TOP * factor), dtype=torch.float32)[:, None] * (true_frequencies() / factor)
            tables.append(torch.cat((angle.cos(), angle.sin()), dim=-1))
        self.register_buffer("cos_sin_cache", torch.cat(tables), persistent=False)


FACTORS = [1.0, 4.0]


@pytest.mark.parametrize("damage", [lambda t: None, lambda t: t.data[TOP:].copy_(t.data[TOP:].roll(1, 0))])
def test_a_joint_table_of_several_factors_is_held_against_the_config(damage):
    model = model_of(JointRotary(secret=3))
    model.config = {**CONFIG, "rope_scaling": dict(type="linear", factor=FACTORS)}
    right = model.rotary_emb.cos_sin_cache.clone()
    damage(model.rotary_emb.cos_sin_cache)
    healthy = torch.equal(model.rotary_emb.cos_sin_cache, right)
    (finding,) = check_model(model).findings
    assert (finding.truth, finding.verdict) == ("config", "right" if healthy else "wrong")
    repair_model(model)
    assert torch.equal(model.rotary_emb.cos_sin_cache, right)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_alarm_on_the_healthy(shape):
    build, truth = SHAPES[shape]
    report = check_model(model_of(build()))
    assert report.findings and report.verdict == "right", str(report)
    assert {finding.truth for finding in report.findings} == {truth}
    assert not repair_model(model_of(build())).findings


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_damage_is_found_named_and_repaired(shape, damage):
    build, _ = SHAPES[shape]
    act, verdict, cause = DAMAGES[damage]
    for name in tensors(build()):
        rotary = build()
        right = {n: t.clone() for n, t in tensors(rotary).items()}
        result = act(tensors(rotary)[name])
        if damage in ("meta", "cast"):
            assign(rotary, name, result)
        model = model_of(rotary)
        found = [f for f in check_model(model).findings if f.verdict != "right"]
        assert [f.path for f in found] == [f"rotary_emb.{name}"]
        if not (damage == "cast" and right[name].is_complex()):
            assert found[0].verdict == verdict and cause in found[0].cause, found
        repaired = repair_model(model)
        assert [f.verdict for f in repaired.findings] == ["right"]
        assert all(torch.equal(tensors(rotary)[n], t) for n, t in right.items())
        assert check_model(model).verdict == "right"


def test_without_any_source_certain_wrongs_are_found_and_nothing_is_touched():
    bare = model_of(ConfigRotary(secret=3))
    del bare.config
    assert check_model(bare).verdict == "unverified"
    for damage in ("zero-filled", "garbage", "not a number"):
        DAMAGES[damage][0](bare.rotary_emb.inv_freq)
        kept = bare.rotary_emb.inv_freq.clone()
        (finding,) = check_model(bare).findings
        assert finding.verdict == "wrong" and finding.truth == "mathematics"
        assert not repair_model(bare).findings
        assert torch.equal(kept, bare.rotary_emb.inv_freq) or bool(kept.isnan().any())


# --- what is known of a module, and what not ----------------------------------------------------------------------------


class Traceless(nn.Module):
    """Keeps no trace of its base, nor of a scale that only its table shows."""

    def __init__(self, dim, base=BASE, scale=1.0):
        super().__init__()
        self.dim = dim
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        angle = torch.arange(TOP, dtype=torch.float32)[:, None] * inv_freq
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("cos_cached", angle.cos() * scale, persistent=False)


def verdicts(model):
    return {f.buffer: f.verdict for f in check_model(model).findings}


@pytest.mark.parametrize("arguments", [dict(base=500000.0), dict(scale=0.5), dict(base=500000.0, scale=0.5)])
def test_a_default_that_left_no_trace_is_no_truth(arguments):
    model = nn.Sequential(Traceless(DIM, **arguments))
    before = {n: b.clone() for n, b in model.named_buffers()}
    assert set(verdicts(model).values()) <= {"right", "unverified"}
    assert check_model(model).verdict == "unverified"
    assert not repair_model(model).findings
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    model[0].inv_freq.fill_(-1e34)
    assert verdicts(model)["inv_freq"] == "wrong"
    assert not repair_model(model).findings and bool((model[0].inv_freq == -1e34).all())


def test_a_default_that_another_tensor_bears_out_is_one():
    model = nn.Sequential(Traceless(DIM))
    right = model[0].inv_freq.clone()
    model[0].inv_freq.mul_(0.75)
    assert verdicts(model) == {"inv_freq": "wrong", "cos_cached": "right"}
    repair_model(model)
    assert torch.equal(model[0].inv_freq, right)
    model[0].cos_cached.mul_(0.5)  # it alone shows the scale
    assert verdicts(model) == {"inv_freq": "right", "cos_cached": "unverified"}


class Whole(nn.Module):
    """As model libraries have it: made from a config, of which its rotary module keeps no trace."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.linear = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Traceless(config.dim, config.base, scale=config.scale) for _ in range(2))


@pytest.mark.parametrize("base", [BASE, 500000.0])
def test_what_the_models_constructor_passes_is_known(base):
    model = Whole(SimpleNamespace(dim=DIM, base=base, scale=0.5))
    weights = {n: p.clone() for n, p in model.named_parameters()}
    random = torch.get_rng_state()
    report = check_model(model)
    assert report.verdict == "right" and {f.truth for f in report.findings} == {"construction"}
    for name, buffer in list(model.named_buffers()):
        right = buffer.clone()
        buffer.copy_(dict(nn.Sequential(Traceless(DIM)).named_buffers())[f"0.{name.split('.')[-1]}"] * 0.9)
        assert [f.path for f in check_model(model).findings if f.verdict != "right"] == [name]
        repair_model(model)
        assert torch.equal(buffer, right)
    model.layers[0].to("meta")
    repair_model(model)
    assert check_model(model).verdict == "right"
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters() if n in weights)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_tower_of_another_modality_is_not_held_against_the_text_config():
    model = model_of(ConfigRotary(secret=3))
    for name in ("vision_tower", "audio_encoder", "image_model"):
        tower = nn.Module()
        tower.rotary = ConfigRotary(secret=3)
        tower.rotary.inv_freq.mul_(0.5)
        model.add_module(name, tower)
        kept = tower.rotary.inv_freq.clone()
        assert {f.path: f.verdict for f in check_model(model).findings}[f"{name}.rotary.inv_freq"] == "unverified"
        assert not repair_model(model).findings and torch.equal(tower.rotary.inv_freq, kept)
        tower.config = {**CONFIG, "rope_theta": 50.0}  # its own says something of it
        assert {f.path: f.verdict for f in check_model(model).findings}[f"{name}.rotary.inv_freq"] == "wrong"
        delattr(model, name)


def test_a_module_asleep_is_right():
    rope = get_rope(DIM, DIM, TOP, BASE, dtype=torch.float32)
    release_memory()
    assert check_model(model_of(rope)).verdict == "right"
    assert not repair_model(model_of(rope)).findings


class HoldsSeveral(nn.Module):
    """Keeps its tables in a container, as image models do, one for each axis."""

    def __init__(self, dims, kind=list):
        super().__init__()
        self.dims, self.kind = dims, kind
        angles = [torch.arange(TOP)[:, None] * (1.0 / BASE ** (torch.arange(0, d, 2).double() / d)) for d in dims]
        tables = [torch.polar(torch.ones_like(a), a) for a in angles]
        self.freqs_cis = dict(enumerate(tables)) if kind is dict else kind(tables)


class UnusualRotary(nn.Module):
    """Keeps angles, and weights for them, under names of its own."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.register_buffer("args", torch.arange(TOP).float()[:, None] * true_frequencies(), persistent=False)
        self.angles_0 = true_frequencies() * 0.5
        self.register_buffer("trained", torch.randn(4))  # a checkpoint brings it
        self.steps = torch.arange(4)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_tables_in_a_container(kind):
    rotary = HoldsSeveral((8, 12), kind)
    rotary.__class__.__name__ = "AxesRope"
    model = model_of(rotary)
    assert verdicts(model) == {"freqs_cis[0]": "right", "freqs_cis[1]": "right"}
    right = rotary.freqs_cis[1].clone()
    for act, verdict in (
        (lambda t: t * 1j, "wrong"),
        (lambda t: t.to("meta"), "dead"),
        (lambda t: t.cfloat(), "degraded"),
    ):
        items = list(rotary.freqs_cis.values() if kind is dict else rotary.freqs_cis)
        items[1] = act(right)
        rotary.freqs_cis = dict(enumerate(items)) if kind is dict else kind(items)
        assert verdicts(model) == {"freqs_cis[0]": "right", "freqs_cis[1]": verdict}
        repair_model(model)
        assert torch.equal(rotary.freqs_cis[1], right) and type(rotary.freqs_cis) is kind
    assert not check_model(model).computed


def test_unusual_names_in_a_class_about_rotary_embeddings():
    model = model_of(UnusualRotary(DIM))
    assert verdicts(model) == {"args": "right", "angles_0": "right"}
    model.rotary_emb.args.zero_()
    assert verdicts(model) == {"args": "wrong", "angles_0": "right"}
    repair_model(model)
    assert verdicts(model) == {"args": "right", "angles_0": "right"}


class LongTable(nn.Module):
    def __init__(self, inv_freq, rows):
        super().__init__()
        self.inv_freq, self.rows = inv_freq, rows
        angle = torch.arange(rows, dtype=torch.float32)[:, None] * inv_freq
        self.register_buffer("cos_cached", angle.cos(), persistent=False)
        self.register_buffer("sin_cached", angle.sin(), persistent=False)


def test_frequencies_an_ulp_away_are_another_devices_and_others_are_not():
    config = {**CONFIG, "max_position_embeddings": 131072}
    exact = true_frequencies()
    for inv_freq, expected in (
        (exact.nextafter(torch.ones(())), "right"),
        (exact.nextafter(torch.zeros(())), "right"),
        (1.0 / ((BASE * 1.001) ** (torch.arange(0, DIM, 2).float() / DIM)), "wrong"),
    ):
        model = nn.Module()
        model.config, model.rotary_emb = config, LongTable(inv_freq, 131072)
        found = verdicts(model)
        assert found["cos_cached"] == found["sin_cached"] == expected


class GrowingRotary(nn.Module):
    """As remote code has it: the tables grow with the sequence."""

    def __init__(self, dim, max_position_embeddings=TOP, base=BASE, device=None):
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        self._set_cos_sin_cache(seq_len=max_position_embeddings, device=device, dtype=torch.float32)

    def _set_cos_sin_cache(self, seq_len, device, dtype):
        self.max_seq_len_cached = seq_len
        angle = torch.arange(seq_len, device=device).float()[:, None] * true_frequencies()
        self.register_buffer("cos_cached", angle.cos().to(dtype)[None, None], persistent=False)
        self.register_buffer("sin_cached", angle.sin().to(dtype)[None, None], persistent=False)


def test_tables_that_grew():
    rotary = GrowingRotary(DIM)
    rotary._set_cos_sin_cache(3 * TOP, None, torch.float32)
    model = nn.Sequential(rotary)
    assert verdicts(model) == {"cos_cached": "right", "sin_cached": "right"}
    right = rotary.sin_cached.clone()
    rotary.sin_cached[..., TOP + 5, 3] = 0.25
    assert verdicts(model) == {"cos_cached": "right", "sin_cached": "wrong"}
    repair_model(model)
    assert torch.equal(rotary.sin_cached, right)


class Unknown(nn.Module):
    """Nothing says what its tables should be."""

    def __init__(self, secret, cos, sin=None):
        super().__init__()
        if sin is None:
            self.register_buffer("cos_sin_cache", cos, persistent=False)
        else:
            self.register_buffer("cos_cached", cos, persistent=False)
            self.register_buffer("sin_cached", sin, persistent=False)


def swapped(table):
    order = torch.arange(len(table))
    order[20], order[40] = 40, 20
    return table[order]


TABLE_FAULTS = {
    "rows swapped": swapped,
    "rows shifted": lambda table: table.roll(1, 0),
    "half of another rope": lambda table: torch.cat((table[:30], table[::2][20:])),
    "no unit": lambda table: torch.cat((table[:30], table[30:] * torch.tensor([0.9] * 16 + [1.0] * 16))),
    "zeros": lambda table: torch.cat((table[:30], table[30:] * 0)),
}


@pytest.mark.parametrize("fault", TABLE_FAULTS)
@pytest.mark.parametrize("joined", [True, False])
def test_the_mathematics_of_tables(fault, joined):
    def build(table):
        halves = [h.contiguous() for h in table.chunk(2, dim=1)]
        return nn.Sequential(Unknown(3, table) if joined else Unknown(3, *halves))

    for healthy in (
        true_table(),
        true_table() * 1.3,
        torch.cat((true_table(), true_table()[::2])),  # several factors in one table
        true_table()[torch.randperm(TOP, generator=torch.Generator().manual_seed(0))],  # no table of positions in a row
    ):
        assert set(verdicts(build(healthy)).values()) == {"unverified"}
    assert set(verdicts(build(TABLE_FAULTS[fault](true_table()))).values()) == {"wrong"}


HEALTHY_FREQUENCIES = {
    "pixels": lambda: torch.linspace(1, 128, 32) * math.pi,
    "whole turns": lambda: true_frequencies() * 2 * math.pi,
    "backwards": lambda: -true_frequencies(),
    "axes in turn": lambda: torch.stack((true_frequencies(), true_frequencies() / 2), 1).flatten(),
    "slowest first": lambda: true_frequencies().flip(0),
}


@pytest.mark.parametrize("case", HEALTHY_FREQUENCIES)
def test_the_mathematics_of_unusual_frequencies(case):
    rotary = ConfigRotary(secret=3)
    rotary.inv_freq = HEALTHY_FREQUENCIES[case]()
    assert verdicts(nn.Sequential(rotary)) == {"inv_freq": "unverified"}


def grid(lines, columns):
    row, column = torch.meshgrid(torch.arange(lines).float(), torch.arange(columns).float(), indexing="ij")
    return torch.cat([p.reshape(-1, 1) * true_frequencies()[::2] for p in (row, column)], dim=1)


def angles_of(*positions):
    return torch.cat(positions).float()[:, None] * true_frequencies()


HEALTHY_ANGLES = {
    **{f"image of {lines} lines of {columns}": (lambda a=lines, b=columns: grid(a, b)) for lines, columns in
       ((16, 16), (24, 24), (32, 32), (3, 48), (80, 64))},
    "centred": lambda: angles_of(torch.arange(-32, 32)),
    "from 1": lambda: angles_of(torch.arange(1, 65)),
    "falling": lambda: angles_of(torch.arange(64).flip(0)),
    "negative ones last": lambda: angles_of(torch.arange(64), torch.arange(-64, 0)),
    "few rows": lambda: angles_of(torch.tensor([0, 1, 4, 9, 16])),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", HEALTHY_ANGLES)
def test_the_mathematics_of_unusual_tables(case, dtype):
    angles = HEALTHY_ANGLES[case]()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    nothing = torch.zeros(len(cos), 4, dtype=dtype)
    for tables in (
        (cos, sin),
        (torch.cat((cos, nothing), 1), torch.cat((sin, nothing), 1)),
        (torch.cat((cos, sin), 1),),
        (torch.cat((sin, cos), 1),),
        (torch.cat((cos, cos, sin, sin), 1),),
        (torch.stack((cos, sin), 2).flatten(1),),
    ):
        assert set(verdicts(nn.Sequential(Unknown(3, *tables))).values()) == {"unverified"}


def test_the_mathematics_of_short_tables_in_small_dtypes():
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (2, 5, 16, 20, 64, 500):
            angles = torch.arange(rows, dtype=torch.float32)[:, None] * true_frequencies()
            assert set(
                verdicts(nn.Sequential(Unknown(3, angles.cos().to(dtype), angles.sin().to(dtype)))).values()
            ) == {"unverified"}


def test_memory_that_is_filled_later():
    class RotaryEmbedding(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.freqs = nn.Parameter(true_frequencies())
            self.register_buffer("cached_freqs", torch.zeros(TOP, DIM), persistent=False)

    assert verdicts(nn.Sequential(RotaryEmbedding(DIM))) == {"cached_freqs": "unverified"}


@pytest.mark.parametrize("model_type", ["gptj", "cohere"])
@pytest.mark.parametrize("repeat", [lambda t: t.repeat_interleave(2, dim=1), lambda t: torch.cat((t, t), dim=1)])
def test_tables_of_a_config_whose_code_may_lay_them_out_in_two_ways(model_type, repeat):
    model = nn.Module()
    model.config = {**CONFIG, "model_type": model_type}
    cos, sin = true_table().chunk(2, dim=1)
    model.rotary = Unknown(3, repeat(cos), repeat(sin))
    assert set(verdicts(model).values()) == {"unverified"}


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda f: f, ""),
        (lambda f: torch.cat((f[:8], f[:8])), ""),  # two axes
        (lambda f: torch.cat((f[:8], f[:8] * 0)), ""),  # pairs that stand still
        (lambda f: -f, "negative"),
        (lambda f: f * 3, "above 1"),
        (lambda f: f.flip(0), "rise at 1"),
        (lambda f: torch.cat((f[:8] * 0, f[8:])), "frequency 0 is 0"),
    ],
)
def test_unusual_frequencies_are_remarked_upon(act, said):
    rotary = ConfigRotary(secret=3)
    rotary.inv_freq = act(rotary.inv_freq)
    (finding,) = check_model(nn.Sequential(rotary)).findings
    assert finding.verdict == "unverified" and said in finding.cause and bool(said) == bool(finding.cause)


def test_other_dead_buffers_are_reported():
    model = model_of(RemoteRotary(DIM))
    model.register_buffer("mask", torch.ones(3, device="meta"), persistent=False)
    report = check_model(model)
    assert [(f.path, f.verdict) for f in report.findings if f.verdict != "right"] == [("mask", "dead")]


def test_the_report_reads_well_and_travels():
    model = model_of(RemoteRotary(DIM))
    model.rotary_emb.inv_freq.zero_()
    report = check_model(model)
    text = str(report)
    assert "rotary_emb.inv_freq" in text and "WRONG" in text and "zero-filled" in text and "repair_model" in text
    assert max(map(len, text.splitlines())) <= 100
    model.rotary_emb.inv_freq.fill_(math.inf)
    text = json.dumps(check_model(model).to_dict(), allow_nan=False)
    assert json.loads(text)["verdict"] == "wrong"


# --- foreign code, and what surrounds a check ---------------------------------------------------------------------------


class Foreign(nn.Module):
    """Its constructor runs what it is given: nothing at first, and something when it is run again."""

    def __init__(self, dim, act=lambda: None, base=BASE):
        super().__init__()
        self.dim, self.act, self.base = dim, act, base
        self.register_buffer("inv_freq", true_frequencies(), persistent=False)
        act()


def recurse():
    recurse()


def ruin_default_dtype():
    torch.set_default_dtype(torch.float16)
    raise ValueError


ACTS = [lambda: sys.exit(3), recurse, lambda: torch.rand(3), lambda: random.random(), ruin_default_dtype]


@pytest.mark.parametrize("act", ACTS, ids=["exits", "recurses", "torch.rand", "random", "default dtype"])
def test_foreign_code_disturbs_nothing(act):
    model = nn.Sequential(Foreign(DIM))
    model[0].act = act
    before = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    assert verdicts(model)["inv_freq"] in ("right", "unverified")
    repair_model(model)
    after = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_a_config_that_raises_is_none():
    class Raises(ConfigRotary):
        config = property(lambda self: 1 / 0)

    assert verdicts(nn.Sequential(Raises(3))) == {"inv_freq": "unverified"}


class Changing(nn.Module):
    """Changes what it is given, and keeps under an argument's name what became of it."""

    def __init__(self, dim, scaling, base=BASE):
        super().__init__()
        scaling["seen"] = scaling.get("seen", 0) + 1
        self.dim, self.scaling, self.base = dim, scaling, base * 4.0
        exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        self.register_buffer("inv_freq", 1.0 / self.base**exponent, persistent=False)


def test_an_attribute_that_is_no_longer_the_argument_is_none():
    model = nn.Sequential(Changing(DIM, {}))
    right = model[0].inv_freq.clone()
    assert verdicts(model) == {"inv_freq": "unverified"} and not repair_model(model).findings
    assert torch.equal(model[0].inv_freq, right) and model[0].scaling == {"seen": 1}


class RandomRotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.phase = torch.rand(dim)
        self.register_buffer("inv_freq", true_frequencies(), persistent=False)


def test_random_tensors_are_not_held_against_other_random_ones():
    model = nn.Sequential(RandomRotary(DIM))
    assert verdicts(model) == {"inv_freq": "right", "phase": "unverified"}


class AssigningEngine(EngineRotary):
    """Its methods leave traces in the module; the second takes something else than a base."""

    def _compute_cos_sin_cache(self):
        self.count = getattr(self, "count", 0) + 1
        self.register_buffer("inv_freq", self._compute_inv_freq(1.0), persistent=False)
        return true_table()

    def _compute_inv_freq(self, scaling_factor):
        return true_frequencies() / scaling_factor


def test_a_method_that_is_run_again_does_not_reach_the_module():
    rotary = AssigningEngine(DIM, DIM, TOP, BASE, True, torch.float32)
    before = rotary.count, rotary.inv_freq
    model = nn.Sequential(rotary)
    assert verdicts(model) == {"cos_sin_cache": "right", "inv_freq": "unverified"}
    assert rotary.count == before[0] and rotary.inv_freq is before[1]


def test_a_method_that_gives_two_tables_says_nothing():
    class Two(Unknown):
        def _compute_cos_sin_cache(self):
            return true_table(), true_table()

    assert verdicts(nn.Sequential(Two(3, true_table()))) == {"cos_sin_cache": "unverified"}


@pytest.mark.parametrize("surroundings", ["meta", "inference", "autocast", "fake", "float16"])
def test_whatever_surrounds_it(surroundings):
    model = nn.Sequential(RemoteRotary(DIM))
    model[0].cos_cached[9, 3] = 0.25
    around = {
        "meta": lambda: torch.device("meta"),
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "fake": FakeTensorMode,
        "float16": lambda: torch.inference_mode(False),
    }[surroundings]
    try:
        torch.set_default_dtype(torch.float16 if surroundings == "float16" else torch.float32)
        with around():
            assert verdicts(model) == {"inv_freq": "right", "cos_cached": "wrong", "sin_cached": "right"}
            assert [f.verdict for f in repair_model(model).findings] == ["right"]
        assert torch.get_default_dtype() == (torch.float16 if surroundings == "float16" else torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(
        torch.equal(b, getattr(RemoteRotary(DIM), n)) and not b.is_inference() for n, b in model[0].named_buffers()
    )


# --- tensors of all kinds -----------------------------------------------------------------------------------------------

NAMES = ["inv_freq", "cos_cached", "cos_sin_cache", "freqs_cis"]
ODD = {
    "empty": lambda: torch.ones(0),
    "no columns": lambda: torch.ones(8, 0),
    "no rows": lambda: torch.ones(0, 8),
    "number": lambda: torch.zeros(()),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "integers": lambda: torch.zeros(4, 4, dtype=torch.int64),
    "flags": lambda: torch.zeros(4, 4, dtype=torch.bool),
    "float8": lambda: torch.ones(4, 4).to(torch.float8_e4m3fn),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "subclass": lambda: torch.zeros(4, 4).as_subclass(type("Special", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_array_of_numbers_is_not_judged(name, kind):
    model = nn.Module()
    setattr(model, name, ODD[kind]())
    assert check_model(model).verdict == "unverified" and not repair_model(model).findings


class Expanded(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.register_buffer("cos_cached", true_table().cos()[None].expand(3, -1, -1), persistent=False)
        self.original_inv_freq = true_frequencies()
        self.register_buffer("inv_freq", self.original_inv_freq, persistent=False)


def test_expanded_tensors_and_one_tensor_under_two_names():
    model = nn.Sequential(Expanded(DIM))
    right = model[0].cos_cached.clone()
    model[0].cos_cached.data[0, 9, 3] = 7.0
    model[0].inv_freq.untyped_storage().resize_(0)
    assert set(verdicts(model).values()) == {"wrong", "dead"}
    repair_model(model)
    assert check_model(model).verdict == "right" and torch.equal(model[0].cos_cached, right)
    assert model[0].inv_freq is model[0].original_inv_freq


class SmallTable(nn.Module):
    """As engines have it: the table is kept in the model's dtype."""

    def __init__(self, dtype, init_cache=True):
        super().__init__()
        self.dtype = dtype
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache().to(dtype), persistent=False)

    def _compute_cos_sin_cache(self):
        return torch.cat((long_angles().cos(), long_angles().sin()), dim=-1)


class SmallTableOnly(SmallTable):
    """The same, known by its constructor alone."""

    def __init__(self, dtype):
        super().__init__(dtype)


class SmallBeside(nn.Module):
    """As remote code has it: tables in the default dtype that the loader set, beside its frequencies in float32."""

    def __init__(self, dim, small=torch.float32):
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", true_frequencies(), persistent=False)
        self.register_buffer("cos_cached", long_angles().cos().to(small), persistent=False)


def long_angles(rows=4096):
    return torch.arange(rows, dtype=torch.float32)[:, None] * true_frequencies()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [SmallTable, SmallTableOnly, lambda dtype: SmallBeside(DIM, dtype)])
def test_tables_made_in_a_small_dtype(dtype, build):
    rotary = build(dtype)
    name = "cos_cached" if "cos_cached" in rotary._buffers else "cos_sin_cache"
    model, table, right = nn.Sequential(rotary), rotary._buffers[name], rotary._buffers[name].clone()
    assert verdicts(model)[name] == "right"
    for damage in (
        lambda: table[100:].copy_(right[100:].roll(1, 0)),
        lambda: table[2000, 1].mul_(-1),
        lambda: table[3000].zero_(),
    ):
        damage()
        assert verdicts(model)[name] in ("wrong", "unverified")
        table.copy_(right)
    if name == "cos_cached":
        model.to(dtype)  # now all was cast
        assert verdicts(model)["inv_freq"] == "degraded"


def test_one_element_far_out_is_found():
    model = nn.Module()
    model.config = {**CONFIG, "max_position_embeddings": 131072}
    model.rotary_emb = LongTable(true_frequencies(), 131072)
    for row in (10, 10000, 131071):
        for column in (0, 8):
            kept = model.rotary_emb.cos_cached[row, column].clone()
            model.rotary_emb.cos_cached[row, column] += 1e-3
            assert verdicts(model) == {"cos_cached": "wrong", "sin_cached": "right", "inv_freq": "right"}
            model.rotary_emb.cos_cached[row, column] = kept


# --- guarded caches -----------------------------------------------------------------------------------------------------


class Engine:
    """A foreign engine with its cache."""

    def __init__(self):
        self._ROPE_DICT = {}

    def get_rope(self, key):
        if key in self._ROPE_DICT:
            return self._ROPE_DICT[key]
        self._ROPE_DICT[key] = EngineRotary(DIM, DIM, TOP, BASE, True, torch.float32)
        return self._ROPE_DICT[key]


KILLS = {
    "meta": lambda m: m.to("meta"),
    "freed": lambda m: m.cos_sin_cache.untyped_storage().resize_(0),
    "zeroed": lambda m: m.cos_sin_cache.zero_(),
    "cast": lambda m: m.half(),
    "replaced": lambda m: setattr(m, "cos_sin_cache", torch.zeros(TOP, DIM)),
}


@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS)
def test_a_guarded_engine_never_hands_out_a_dead_entry(kill):
    engine = Engine()
    first = engine.get_rope("key")
    undo = guard_cache(engine, "_ROPE_DICT")
    assert engine.get_rope("key") is first
    kill(first)
    fresh = engine.get_rope("key")
    assert fresh is not first and torch.equal(fresh.cos_sin_cache, true_table())
    assert engine.get_rope("key") is fresh and len(engine._ROPE_DICT) == 1
    undo()
    assert type(engine._ROPE_DICT) is dict and engine._ROPE_DICT == {"key": fresh}


def test_a_guarded_cache_hands_meta_entries_to_a_meta_pass_only():
    engine = Engine()
    guard_cache(engine, "_ROPE_DICT")
    with torch.device("meta"):
        meta = engine.get_rope("key").to("meta")
        assert engine.get_rope("key") is meta
    assert engine.get_rope("key") is not meta


@pytest.mark.parametrize(
    "ask",
    [
        lambda cache: list(cache.values()),
        lambda cache: [module for _, module in cache.items()],
        lambda cache: [cache[key] for key in cache],
        lambda cache: [cache.get("dead")] if cache.get("dead") else [],
        lambda cache: [cache.pop("dead", None)] if "dead" in cache else [],
        lambda cache: list(dict(cache).values()),
        lambda cache: list({**cache}.values()),
        lambda cache: list(cache.copy().values()),
        lambda cache: list(copy.copy(cache).values()),
        lambda cache: list((cache | {}).values()),
        lambda cache: list(({} | cache).values()),
        lambda cache: list(pickle.loads(pickle.dumps(cache)).values()),
        lambda cache: [None] * len(cache),
    ],
    ids="values items iterate get pop dict unpack copy copied or ror pickle len".split(),
)
def test_no_way_of_asking_reaches_a_dead_entry(ask):
    cache = guard_cache({"dead": RemoteRotary(DIM), "alive": RemoteRotary(DIM)})
    assert len(ask(cache)) in (1, 2)
    cache = guard_cache({"dead": RemoteRotary(DIM), "alive": RemoteRotary(DIM)})
    cache["dead"].cos_cached.zero_()
    found = ask(cache)
    assert len(found) <= 1 and all(module is None or bool(module.cos_cached.any()) for module in found)


def test_every_way_of_putting_in_is_marked():
    cache = guard_cache({})
    cache.update(a=RemoteRotary(DIM))
    cache |= {"b": RemoteRotary(DIM)}
    c = cache.setdefault("c", RemoteRotary(DIM))
    assert list(cache) == ["a", "b", "c"] and cache.setdefault("c", RemoteRotary(DIM)) is c
    for key in "abc":
        cache[key].inv_freq.zero_()
        assert key not in cache
    fresh = RemoteRotary(DIM)
    assert cache.setdefault("c", fresh) is fresh and len(cache) == 1
    with pytest.raises(KeyError):
        cache.pop("a")
    assert cache.popitem() == ("c", fresh) and not cache


def test_a_dead_entry_is_not_put_back():
    engine = Engine()
    undo = guard_cache(engine, "_ROPE_DICT")
    engine.get_rope("dead"), engine.get_rope("alive")
    engine._ROPE_DICT["dead"].cos_sin_cache.zero_()
    undo()
    assert list(engine._ROPE_DICT) == ["alive"]


def test_guarding_what_is_no_mapping_is_an_error():
    with pytest.raises(TypeError, match="mapping"):
        guard_cache([1])
    with pytest.raises(TypeError, match="_ROPE_DICT"):
        guard_cache(type("E", (), {"_ROPE_DICT": 3})(), "_ROPE_DICT")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
