"""The doctor on whole small diffusers transformers: no false alarm, and each damage found and repaired."""

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch

from common.ci_register import register_cpu_ci
from common.rope_doctor import check_model, repair_model
from common.rope_truth import rope_slots

register_cpu_ci(est_time=30, suite="parity-test-cpu")

spec = importlib.util.spec_from_file_location("swap", Path(__file__).with_name("test_use_live_rope_diffusers.py"))
swap = importlib.util.module_from_spec(spec)
spec.loader.exec_module(swap)

STORES = {"qwen_image", "wan", "skyreels"}  # the others compute cos and sin anew at each forward


def freed(t):
    other = t.clone()
    other.untyped_storage().resize_(0)
    return other


DAMAGES = {
    "zeros": torch.zeros_like,
    "garbage": lambda t: torch.full_like(t, -1e34),
    "not a number": lambda t: torch.full_like(t, float("nan")),
    "uninitialised": lambda t: torch.full_like(t, 3e-39),
    "other parameters": lambda t: t.roll(1, -1),
    "cast": lambda t: t.to(torch.complex64) if t.dtype == torch.complex128 else (t * 0.5 if t.is_complex() else t.half().to(t.dtype)),
    "freed": freed,
    "meta": lambda t: t.to("meta"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
