"""The doctor on bare modules, on modules shaped as vLLM's and sglang's, and on our own; and guarded foreign caches."""

import copy
import json
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

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
    assert json.loads(json.dumps(report.to_dict()))["verdict"] == "wrong"


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


def test_guarding_what_is_no_mapping_is_an_error():
    with pytest.raises(TypeError, match="mapping"):
        guard_cache([1])
    with pytest.raises(TypeError, match="_ROPE_DICT"):
        guard_cache(type("E", (), {"_ROPE_DICT": 3})(), "_ROPE_DICT")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
