"""The doctor on every transformers model that builds small: no false alarm, and each of eight damages found and repaired.

And on transformers' real loader, which leaves a custom model's non-persistent buffers uninitialised.
"""

import inspect
import json
import logging
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from common.ci_register import register_cpu_ci
from common.rope_doctor import check_model, repair_model
from common.rope_truth import rope_slots

register_cpu_ci(est_time=300, suite="parity-test-cpu")

ROOT = Path(__file__).parents[3]
SMALL = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=128,
    max_position_embeddings=256, head_dim=16, n_embd=64, n_layer=2, n_head=4, num_layers=2, d_model=64, ffn_dim=64,
    num_local_experts=4, num_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16,
    qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1, vocab_size_per_layer_input=128,
    hidden_size_per_layer_input=8,
)  # fmt: skip
LARGEST = 20_000_000  # parameters
COUNTS = {"models": 0, "buffers": 0, "planted": 0, "found": 0, "repaired": 0, "false alarms": 0, "unverified": 0}
SLOWEST = [0.0, ""]


def model_classes():
    """Model classes whose file speaks of rotary frequencies, with their config classes."""
    found = {}
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        for config_class in mapping.keys():
            try:
                model_class = mapping[config_class]
            except (ValueError, ImportError):  # named in the mapping, not in the library
                continue
            model_class = model_class[0] if isinstance(model_class, tuple) else model_class
            if not issubclass(model_class, nn.Module):  # a stand-in: it needs a library that is not installed
                continue
            source = Path(inspect.getfile(model_class)).read_text()
            if re.search(r"inv_freq|embed_positions = |freqs_c", source) and model_class.__name__ not in found:
                found.setdefault(config_class.__name__, (model_class, config_class))
    return sorted(found.values(), key=lambda pair: pair[0].__name__)


CLASSES = model_classes()


def build(model_class, config_class):
    """The model of a shrunk default config, or a skip that says why it does not build small."""
    try:
        config = config_class().get_text_config()
        small = {name: value for name, value in SMALL.items() if hasattr(config, name)}
        config = type(config)(**small)

        def create():
            return (
                model_class(config) if isinstance(config, config_class) else transformers.AutoModel.from_config(config)
            )

        with torch.device("meta"):
            size = sum(p.numel() for p in create().parameters())
        if size > LARGEST:
            pytest.skip(f"does not build small: {size:,} parameters")
        return create().eval()
    except Exception as error:  # noqa: BLE001 - what cannot be built is no case of this test
        pytest.skip(f"does not build from a shrunk default config: {type(error).__name__}")


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def fill(value):
    return lambda t: torch.full_like(t, value)


def uninitialised(t):
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(0)).to(t.dtype) * 3e5


def freed(t):
    other = t.clone()
    other.untyped_storage().resize_(0)
    return other


DAMAGES = {
    "zeros": fill(0.0),
    "garbage": fill(-1e34),
    "not a number": fill(float("nan")),
    "uninitialised": uninitialised,
    "other parameters": lambda t: t * 0.75 if not t.is_complex() else t * 1j,
    "cast": lambda t: t.to(torch.bfloat16).to(t.dtype) if not t.is_complex() else t * 0.5,
    "freed": freed,
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.parametrize(("model_class", "config_class"), CLASSES, ids=[c.__name__ for c, _ in CLASSES])
def test_healthy_then_damaged_then_repaired(model_class, config_class):
    model = build(model_class, config_class)
    started = time.perf_counter()
    report = check_model(model)
    if not report.findings:
        pytest.skip("holds no rotary buffer")
    if time.perf_counter() - started > SLOWEST[0]:
        SLOWEST[:] = time.perf_counter() - started, model_class.__name__
    alarms = [f for f in report.findings if f.verdict not in ("right", "unverified")]
    COUNTS["models"] += 1
    COUNTS["buffers"] += len(report.findings)
    COUNTS["false alarms"] += len(alarms)
    assert not alarms, str(report)
    verified = {f.path for f in report.findings if f.verdict == "right"}
    COUNTS["unverified"] += len(report.findings) - len(verified)
    seen = set()
    for path, module in model.named_modules():
        for slot in rope_slots(module):
            if f"{path}.{slot.name}".lstrip(".") not in verified or (type(module), slot.name) in seen:
                continue
            seen.add((type(module), slot.name))  # one layer's module stands for all layers'
            right = slot.get().clone()
            for damage, act in DAMAGES.items():
                ruined = act(right)
                if damage == "cast" and torch.equal(ruined, right):
                    continue  # a cast that changes nothing is no damage
                slot.put(ruined)
                COUNTS["planted"] += 1
                found = [f for f in check_model(model).findings if f.verdict not in ("right", "unverified")]
                assert [f.path for f in found] == [f"{path}.{slot.name}".lstrip(".")], (damage, found)
                COUNTS["found"] += 1
                repair_model(model)
                assert torch.equal(slot.get(), right), damage
                COUNTS["repaired"] += 1


def test_figures(capsys):
    with capsys.disabled():
        print(f"\n{COUNTS}; slowest check {SLOWEST[0]:.2f} s ({SLOWEST[1]})")
    assert COUNTS["found"] == COUNTS["planted"] and not COUNTS["false alarms"]


# --- models that have been used -----------------------------------------------------------------------------------------

HALF = 8  # pairs of a head
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.1 * i for i in range(HALF)], "long_factor": [2.0 + i for i in range(HALF)],
}  # fmt: skip
USED = {
    "dynamic": (transformers.LlamaForCausalLM, transformers.LlamaConfig, DYNAMIC),
    "longrope": (transformers.Phi3ForCausalLM, transformers.Phi3Config, LONGROPE),
    "dynamic and longrope by layer type": (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig,
        {"full_attention": DYNAMIC, "sliding_attention": LONGROPE},
    ),
}


@pytest.mark.parametrize("lengths", [(8,), (96,), (96, 8), (8, 96), (96, 64)], ids=str)
@pytest.mark.parametrize("case", USED)
def test_a_model_that_followed_its_sequences_length(case, lengths):
    """Its frequencies are those of the longest sequence, or of the last: right as they are, and anything else wrong."""
    model_class, config_class, rope = USED[case]
    small = {name: value for name, value in SMALL.items() if hasattr(config_class(), name)}
    small |= dict(max_position_embeddings=48 if case == "dynamic" else 64, rope_parameters=rope)
    model = model_class(config_class(**small)).eval()
    for length in lengths:
        model(torch.ones(1, length, dtype=torch.int64))
    report = check_model(model)
    assert report.findings and report.verdict == "right", str(report)
    assert not repair_model(model).findings
    for path, module in model.named_modules():
        for slot in rope_slots(module):
            slot.put(slot.get() * 0.75)  # not in place: a reset leaves one tensor under two names
            assert [f.path for f in check_model(model).findings if f.verdict != "right"] == [f"{path}.{slot.name}"]
            repair_model(model)
            assert check_model(model).verdict == "right"


# --- transformers' own loader -------------------------------------------------------------------------------------------


class CustomRotary(nn.Module):
    def __init__(self, dim, max_position_embeddings=64, base=10000.0):
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        angle = torch.arange(max_position_embeddings).float()[:, None] * inv_freq
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("cos_cached", angle.cos(), persistent=False)
        self.register_buffer("sin_cached", angle.sin(), persistent=False)


class CustomConfig(transformers.PretrainedConfig):
    model_type = "live_rope_custom"


class CustomModel(transformers.PreTrainedModel):
    config_class = CustomConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(4, 4)
        self.rotary_emb = CustomRotary(32)
        self.post_init()

    def _init_weights(self, module):
        pass


def test_a_custom_model_through_the_real_loader(tmp_path):
    right = {n: b.clone() for n, b in CustomRotary(32).named_buffers()}
    CustomModel(CustomConfig()).save_pretrained(tmp_path)
    model = CustomModel.from_pretrained(tmp_path)
    if all(torch.equal(b, right[n]) for n, b in model.rotary_emb.named_buffers()):
        for buffer in model.rotary_emb.buffers():  # this loader happened to leave them right: do what others do
            buffer.data = torch.full_like(buffer, 3e-39)
    report = check_model(model)
    assert {f.buffer for f in report.findings if f.verdict == "wrong"} == set(right), str(report)
    assert [f.verdict for f in repair_model(model).findings] == ["right"] * 3
    assert all(torch.equal(b, right[n]) for n, b in model.rotary_emb.named_buffers())


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--repair-check",)])
def test_the_command_on_a_checkpoint(tmp_path, arguments):
    config = transformers.LlamaConfig(**{k: v for k, v in SMALL.items() if hasattr(transformers.LlamaConfig(), k)})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    command = [sys.executable, str(ROOT / "scripts" / "rope_doctor.py")]
    done = subprocess.run([*command, str(tmp_path), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if arguments == ("--json",):
        assert json.loads(done.stdout)["found"]["LlamaForCausalLM"]["verdict"] == "right"
    else:
        assert "RIGHT" in done.stdout


REMOTE_CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class CustomConfig(PretrainedConfig):
    model_type = "live_rope_remote"

class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim)), persistent=False)

class CustomModel(PreTrainedModel):
    config_class = CustomConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(4, 4)
        self.rotary_emb = Rotary(32)
        self.post_init()

    def _init_weights(self, module):
        pass

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        model = super().from_pretrained(*args, **kwargs)
        model.rotary_emb.inv_freq.data.fill_(3e-39)  # what a loader's memory may hold
        return model
"""


def test_the_command_on_remote_code_that_the_loader_leaves_uninitialised(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "modeling_custom.py").write_text(REMOTE_CODE)
    classes = {"AutoConfig": "modeling_custom.CustomConfig", "AutoModel": "modeling_custom.CustomModel"}
    config = {"model_type": "live_rope_remote", "architectures": ["CustomModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"linear.weight": torch.zeros(4, 4), "linear.bias": torch.zeros(4)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    command = [sys.executable, str(ROOT / "scripts" / "rope_doctor.py"), str(folder)]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def run(*arguments):
        return subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
        )

    assert run().returncode == 2  # its code is not trusted
    found = run("--trust-remote-code", "--json")
    verdict = json.loads(found.stdout)["found"]["AutoModel"]["verdict"]
    assert (found.returncode, verdict) == (1, "wrong")
    assert run("--trust-remote-code", "--repair-check").returncode == 0


def test_the_command_says_what_it_could_not_check(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "rope_doctor.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "config.json" in done.stdout


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
