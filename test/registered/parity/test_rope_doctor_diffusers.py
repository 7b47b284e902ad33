"""The doctor on every diffusers model that builds small: no false alarm, and each damage found and repaired."""

import importlib.util
import inspect
import json
import logging
import re
import sys
import time
import warnings
from pathlib import Path

import diffusers
import pytest
import torch
from torch import nn

from common.ci_register import register_cpu_ci
from common.rope_doctor import check_model, repair_model
from common.rope_truth import rope_slots

register_cpu_ci(est_time=60, suite="parity-test-cpu")

spec = importlib.util.spec_from_file_location("swap", Path(__file__).with_name("test_use_live_rope_diffusers.py"))
swap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(swap)

SMALL = dict(
    num_layers=1, num_single_layers=1, n_layers=1, num_refiner_layers=1, n_refiner_layers=1, num_attention_heads=2,
    num_key_value_heads=2, n_heads=2, n_kv_heads=2, ffn_dim=32, text_dim=32, text_embed_dim=32, text_embed_2_dim=32,
    joint_attention_dim=32, pooled_projection_dim=32, cross_attention_dim=32, caption_channels=32, cap_feat_dim=32,
    num_text_blocks=1, num_visual_blocks=1, depth=1, audio_num_attention_heads=2, audio_cross_attention_dim=32,
    intermediate_size=32, image_dim=32, mmdit_layers=1,
)  # fmt: skip
# Where those do not fit, or not all.
OWN = {
    "BriaFibo2Transformer2DModel": dict(
        dim=256, injection_layer_ids=(0,), min_num_gist_tokens=4, max_num_gist_tokens=8
    ),
    "ChromaTransformer2DModel": dict(approximator_hidden_dim=64),
    "Cosmos3OmniTransformer": dict(hidden_size=256, num_hidden_layers=1, num_attention_heads=2, vocab_size=64),
    "EasyAnimateTransformer3DModel": dict(in_channels=4, out_channels=4, patch_size=2),
    "ErnieImageTransformer2DModel": dict(hidden_size=256, ffn_hidden_size=32),
    "Kandinsky5Transformer3DModel": dict(model_dim=128, ff_dim=32, in_text_dim=32, in_text_dim2=32),
    "Kandinsky6Transformer3DModel": dict(model_dim=128, ff_dim=32, in_text_dim=32, in_text_dim2=32),
    "Krea2Transformer2DModel": dict(
        text_hidden_dim=64, text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=32
    ),
    "Lumina2Transformer2DModel": dict(hidden_size=192, axes_dim_rope=(32, 32, 32), num_kv_heads=1),
    "MiniMaxH3Transformer3DModel": dict(hidden_size=256, time_embed_hidden_dim=32, time_embed_dim=32),
    "OmniGenTransformer2DModel": dict(hidden_size=64, vocab_size=64, pad_token_id=0),
    "SanaWMTransformer3DModel": dict(hidden_size=224, linear_head_dim=112),
    "StableAudio3DiTModel": dict(embed_dim=128, num_heads=2),
    "WanVACETransformer3DModel": dict(vace_layers=[0]),
    "ZImageTransformer2DModel": dict(dim=256),
}
LARGEST = 60_000_000  # parameters
FIGURES = {"models": 0, "storing": 0, "buffers": 0, "planted": 0, "found": 0, "repaired": 0, "false alarms": 0}


def model_classes():
    """Model classes whose file speaks of rotary embeddings."""
    for name in sorted(dir(diffusers)):
        kind = getattr(diffusers, name)
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and "Model" in name:
            if re.search(r"Ro[Pp][Ee]|[Rr]otary|freqs_c", Path(inspect.getfile(kind)).read_text()):
                yield kind


def build(kind):
    """The model of shrunk default arguments, or a skip that says why it does not build small."""
    names = inspect.signature(kind.__init__).parameters
    arguments = {**{n: v for n, v in SMALL.items() if n in names}, **OWN.get(kind.__name__, {})}
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(**arguments).parameters())
        if size > LARGEST:
            pytest.skip(f"does not build small: {size:,} parameters")
        return kind(**arguments).eval()
    except Exception as error:  # noqa: BLE001 - what cannot be built is no case of this test
        pytest.skip(f"does not build from shrunk default arguments: {type(error).__name__}: {error}")


STORES = {"qwen_image", "wan", "skyreels", "lumina2"}  # the others compute cos and sin anew at each forward


def freed(t):
    other = t.clone()
    other.untyped_storage().resize_(0)
    return other


DAMAGES = {
    "zeros": torch.zeros_like,
    "garbage": lambda t: torch.full_like(t, -1e34),
    "not a number": lambda t: torch.full_like(t, float("nan")),
    "uninitialised": lambda t: torch.full_like(t, 3e-39),
    "other parameters": lambda t: t.roll(1, 0),
    "cast": lambda t: t.to(torch.complex64) if t.dtype == torch.complex128 else (t * 0.5 if t.is_complex() else t.half()),
    "freed": freed,
    "meta": lambda t: t.to("meta"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("make", swap.MODELS, ids=lambda make: make.__name__)
def test_no_false_alarm(make):
    report = check_model(swap.build(make)[0])
    assert report.verdict == "right", str(report)
    assert bool(report.findings) == (make.__name__ in STORES)
    assert report.findings or report.computed


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("make", [m for m in swap.MODELS if m.__name__ in STORES], ids=lambda make: make.__name__)
def test_each_damage_is_found_and_repaired(make, damage):
    model, inputs = swap.build(make)
    before = swap.outputs(model, inputs)
    for path, module in model.named_modules():
        for slot in rope_slots(module):
            right = slot.get().clone()
            slot.put(DAMAGES[damage](right))
            found = [f.path for f in check_model(model).findings if f.verdict != "right"]
            assert found == [f"{path}.{slot.name}"]
            repair_model(model)
            assert torch.equal(slot.get(), right) and slot.get().dtype == right.dtype
    assert check_model(model).verdict == "right"
    assert torch.equal(swap.outputs(model, inputs), before)


@pytest.mark.parametrize("kind", list(model_classes()), ids=lambda kind: kind.__name__)
def test_healthy_then_damaged_then_repaired(kind):
    model = build(kind)
    started = time.perf_counter()
    report = check_model(model)
    SLOWEST.append((time.perf_counter() - started, kind.__name__))
    if not report.findings and not report.computed:
        pytest.skip("has no module of rotary embeddings: its forward is given cos and sin, or has none")
    FIGURES["models"] += 1
    FIGURES["storing"] += bool(report.findings)
    FIGURES["buffers"] += len(report.findings)
    FIGURES["false alarms"] += report.verdict != "right"
    assert report.verdict == "right", str(report)
    for path, module in model.named_modules():
        for slot in rope_slots(module):
            right = slot.get().clone()
            for damage, act in DAMAGES.items():
                ruined = act(right)
                if damage == "cast" and torch.equal(ruined.to(right.dtype), right):
                    continue  # a cast that changes nothing is no damage
                slot.put(ruined)
                FIGURES["planted"] += 1
                found = [f.path for f in check_model(model).findings if f.verdict != "right"]
                assert found == [f"{path}.{slot.name}"], damage
                FIGURES["found"] += 1
                repair_model(model)
                assert torch.equal(slot.get(), right) and slot.get().dtype == right.dtype, damage
                FIGURES["repaired"] += 1


# --- the command --------------------------------------------------------------------------------------------------------

spec = importlib.util.spec_from_file_location("command", Path(__file__).parents[3] / "scripts" / "rope_doctor.py")
command = importlib.util.module_from_spec(spec)
spec.loader.exec_module(command)


def saved(kind, folder):
    """A folder of a small Wan model, or of a pipeline that has nothing else; the name of the model in the report."""
    model = swap.wan()[0]
    if kind == "model":
        model.save_pretrained(folder)
        return "WanTransformer3DModel"
    others = dict.fromkeys(("tokenizer", "text_encoder", "vae"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    diffusers.WanPipeline(**others, scheduler=scheduler, transformer=model).save_pretrained(folder)
    return "transformer"


def leaves_garbage(monkeypatch):
    """The loader leaves memory that nobody wrote, as transformers' does with custom models; and its code prints."""
    load = diffusers.WanTransformer3DModel.from_pretrained.__func__

    def from_pretrained(kind, *arguments, **keywords):
        print("loading")
        model = load(kind, *arguments, **keywords)
        model.rope.freqs_cos.data.fill_(3e-39)
        return model

    monkeypatch.setattr(diffusers.WanTransformer3DModel, "from_pretrained", classmethod(from_pretrained))


@pytest.mark.parametrize("kind", ["model", "pipeline"])
def test_the_command_on_a_folder(kind, tmp_path, capsys, monkeypatch):
    name = saved(kind, tmp_path)
    assert command.main([str(tmp_path)]) == 0
    assert f"{name}\n" in capsys.readouterr().out
    leaves_garbage(monkeypatch)
    assert command.main([str(tmp_path)]) == 1
    assert "rope.freqs_cos" in capsys.readouterr().out
    assert command.main([str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["found"]
    assert {f["buffer"]: f["verdict"] for f in found[name]["findings"]} == {"freqs_cos": "wrong", "freqs_sin": "right"}
    assert command.main([str(tmp_path), "--repair-check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [f["buffer"] for f in report["repaired"][name]["findings"]] == ["freqs_cos"]
    assert report["after"][name]["verdict"] == "right"


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


UNREADABLE = {
    "weights cut short": lambda folder: cut(next(folder.rglob("*.safetensors"))),
    "config cut short": lambda folder: cut(next(folder.rglob("config.json"))),
    "no weights": lambda folder: next(folder.rglob("*.safetensors")).unlink(),
    "config of no dict": lambda folder: next(folder.rglob("config.json")).write_text("3"),
    "unknown class": lambda folder: next(folder.rglob("config.json")).write_text('{"_class_name": "Nothing"}'),
}


@pytest.mark.parametrize("damage", UNREADABLE)
@pytest.mark.parametrize("kind", ["model", "pipeline"])
def test_the_command_on_a_folder_that_cannot_be_read(kind, damage, tmp_path, capsys):
    saved(kind, tmp_path)
    UNREADABLE[damage](tmp_path)
    status = command.main([str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["verdict"] == "unchecked" and status == 2


def test_the_command_when_a_check_fails(tmp_path, capsys, monkeypatch):
    saved("model", tmp_path)
    monkeypatch.setattr(command, "check_model", lambda model: sys.exit(1))
    assert command.main([str(tmp_path)]) == 2


SLOWEST = []


def test_figures(capsys):
    with capsys.disabled():
        print(f"\n{FIGURES}; slowest check {max(SLOWEST)[0]:.2f} s ({max(SLOWEST)[1]})")
    assert FIGURES["found"] == FIGURES["planted"] and not FIGURES["false alarms"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
