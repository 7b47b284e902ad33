"""Every kind of fault in the diffusion subsystem: for the next lookup, a model that holds the module, a compiled one."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from common.cache_liveness import DeadBufferError
from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding import get_rope
from multimodal_gen.runtime.layers.rotary_embedding.apply import apply_rotary_emb
from multimodal_gen.runtime.layers.rotary_embedding.factory import _ROPE_DICT

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

spec = importlib.util.spec_from_file_location("faults", Path(__file__).parents[2] / "faults.py")
faults = importlib.util.module_from_spec(spec)
spec.loader.exec_module(faults)

DIM, TOP, BASE, TOKENS = 32, 64, 10000.0, 6
INVERSE = BASE ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)


class Interleaved:
    """Image models' style: pairs side by side, positions by default those of the sequence."""

    neox, scaling, inverse = False, None, INVERSE

    def lookup(self):
        return get_rope(DIM, DIM, TOP, BASE, self.neox, self.scaling, torch.float32)

    def inputs(self):
        return torch.arange(TOKENS), torch.randn(TOKENS, 2, DIM, generator=torch.Generator().manual_seed(4))

    def call(self, rope, positions, query):
        return rope(query.unsqueeze(0))[0][0]

    def truth(self, positions, query):
        return faults.turned(query, positions.double()[:, None] * self.inverse, self.neox)


class Halves(Interleaved):
    """Two samples with positions of their own."""

    neox = True

    def inputs(self):
        return torch.tensor([5, 0, 1, 33, 2, TOP - 1]), super().inputs()[1]

    def call(self, rope, positions, query):
        return rope(query.view(2, 3, 2, DIM), positions=positions)[0].view(query.shape)


class Linear(Halves):
    scaling, inverse = {"rope_type": "linear", "factor": 2.0}, INVERSE / 2


CASES = {"interleaved": Interleaved(), "halves": Halves(), "linear": Linear()}


@pytest.fixture(autouse=True)
def empty_cache():
    _ROPE_DICT.clear()
    yield
    _ROPE_DICT.clear()


@pytest.mark.parametrize("fault", faults.FAULTS)
@pytest.mark.parametrize("case", CASES)
def test_next_lookup(case, fault, kernel):
    faults.check_next_lookup(CASES[case], fault)


@pytest.mark.parametrize("fault", faults.FAULTS)
@pytest.mark.parametrize("case", CASES)
def test_model_that_holds_it(case, fault, kernel, caplog):
    faults.check_model_that_holds_it(CASES[case], fault, caplog)


@pytest.mark.parametrize("case", CASES)
def test_compiled_model_that_holds_it(case):
    faults.check_compiled_model_that_holds_it(CASES[case])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("nbytes", [0, 16])
def test_cos_and_sin_without_memory_are_refused(dtype, nbytes):
    rope, query = Interleaved().lookup(), torch.randn(1, TOKENS, 2, DIM)
    table = torch.ones(TOKENS, DIM // 2, dtype=dtype)
    table.untyped_storage().resize_(nbytes)
    given = {"complex_freqs": table} if dtype.is_complex else {"cos": table, "sin": torch.zeros(TOKENS, DIM // 2)}
    with pytest.raises(DeadBufferError, match=r"(complex_freqs|cos) is dead \(storage"):
        rope(query, **given)
    if not dtype.is_complex:
        wide = torch.ones(TOKENS, DIM, dtype=dtype)
        wide.untyped_storage().resize_(nbytes)
        with pytest.raises(RuntimeError, match=r"cos is dead|out of bounds"):  # ours, or PyTorch's where it is sliced
            apply_rotary_emb(query, (wide, torch.zeros(TOKENS, DIM)), sequence_dim=1)
    meta = {name: torch.ones(TOKENS, DIM // 2, dtype=part.dtype, device="meta") for name, part in given.items()}
    assert rope(query.to("meta"), **meta)[0].is_meta


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
