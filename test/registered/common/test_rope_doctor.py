"""The doctor on bare modules, on modules shaped as vLLM's and sglang's, and on our own; and guarded foreign caches."""

import json
import sys

import pytest
import torch
from torch import nn

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


def test_guarding_what_is_no_mapping_is_an_error():
    with pytest.raises(TypeError, match="mapping"):
        guard_cache([1])
    with pytest.raises(TypeError, match="_ROPE_DICT"):
        guard_cache(type("E", (), {"_ROPE_DICT": 3})(), "_ROPE_DICT")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
