"""Every kind of fault, for the next lookup, for a model that holds the module, and for a compiled one: never wrong."""

import importlib.util
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import srt.layers.rotary_embedding as ropes
from common.cache_liveness import DeadBufferError
from common.ci_register import register_cpu_ci
from srt.layers.rotary_embedding import get_rope
from srt.layers.rotary_embedding.factory import _ROPE_DICT

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

spec = importlib.util.spec_from_file_location("faults", Path(__file__).parents[2] / "faults.py")
faults = importlib.util.module_from_spec(spec)
spec.loader.exec_module(faults)

DIM, TOP, BASE, TOKENS = 32, 64, 10000.0, 5
POSITIONS = torch.tensor([5, 0, 1, 33, TOP - 1])
INVERSE = BASE ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)


class Plain:
    """The rope of most models: how to look it up, call it, and what is true."""

    scaling, inverse, neox = None, INVERSE, True

    def lookup(self):
        return get_rope(DIM, DIM, TOP, BASE, self.neox, self.scaling, torch.float32)

    def inputs(self):
        return POSITIONS, torch.randn(TOKENS, 2, DIM, generator=torch.Generator().manual_seed(3))

    def call(self, rope, positions, query):
        return rope(positions, query)[0]

    def truth(self, positions, query):
        return faults.turned(query, positions.double()[:, None] * self.inverse, self.neox)


class Gptj(Plain):
    neox = False


class Scaled(Plain):
    scaling, inverse = {"rope_type": "linear", "factor": 2.0}, INVERSE / 2


class Axes(Plain):
    scaling: ClassVar = {"rope_type": "default", "mrope_section": [4, 6, 6]}

    def inputs(self):
        return torch.stack((POSITIONS, POSITIONS.flip(0), POSITIONS)), super().inputs()[1]

    def truth(self, positions, query):
        axis = torch.tensor([0] * 4 + [1] * 6 + [2] * 6)
        return faults.turned(query, positions.double()[axis].T * INVERSE)


class DualChunk(Plain):
    def lookup(self):
        chunks = {"chunk_size": 32, "local_size": 8}
        return get_rope(DIM, DIM, TOP, BASE, dtype=torch.float32, dual_chunk_attention_config=chunks)

    def call(self, rope, positions, query):
        return rope(positions, query, query)[1].view(query.shape)

    def truth(self, positions, query):
        return faults.turned(query, (positions % 24).double()[:, None] * INVERSE)


class Vision(Plain):
    def lookup(self):
        return ropes.Llama4VisionRotaryEmbedding(DIM, DIM // 2, 4, BASE)

    def call(self, rope, positions, query):
        return rope(query.unsqueeze(0))[0][0]

    def truth(self, positions, query):
        half = BASE ** (-torch.arange(0, DIM // 2, 2, dtype=torch.float64) / (DIM // 2))
        patch = torch.arange(4, dtype=torch.float64)[:, None]
        angle = torch.cat(((patch % 2 + 1) * half, (patch // 2 + 1) * half), dim=1)
        return faults.turned(query, torch.cat((angle, torch.zeros_like(angle[:1]))), neox=False)


class Fourier(Plain):
    def lookup(self):
        scaling = {"rope_type": "default", "use_fope": True, "num_kv_heads": 2, "num_inv_freq": DIM // 2}
        return get_rope(DIM, DIM, TOP, BASE, True, scaling, torch.float32)  # its coefficients begin as the identity

    def call(self, rope, positions, query):
        flat = query.flatten(1)
        return rope(positions, flat, flat)[0].view(query.shape)


SHARED = {"plain": Plain(), "gptj": Gptj(), "scaled": Scaled(), "axes": Axes(), "dual chunk": DualChunk()}
OWN = {"vision": Vision(), "fourier": Fourier()}


@pytest.fixture(autouse=True)
def empty_cache():
    _ROPE_DICT.clear()
    yield
    _ROPE_DICT.clear()


@pytest.mark.parametrize("fault", faults.FAULTS)
@pytest.mark.parametrize("case", SHARED)
def test_next_lookup(case, fault, kernel):
    faults.check_next_lookup(SHARED[case], fault)


@pytest.mark.parametrize("fault", faults.FAULTS)
@pytest.mark.parametrize("case", [*SHARED, *OWN])
def test_model_that_holds_it(case, fault, kernel, caplog):
    if case == "fourier" and fault in faults.TAKES_PARAMETERS:
        pytest.skip("the parameters that its table follows are gone too")
    if case == "fourier" and fault in ("unseen halves swapped", "unseen sines negated", "copy zeroed"):
        pytest.skip("its rows are laid out by heads, and its memory is its own: these change nothing")
    faults.check_model_that_holds_it({**SHARED, **OWN}[case], fault, caplog)


@pytest.mark.parametrize("case", [*SHARED, *OWN])
def test_compiled_model_that_holds_it(case):
    # what takes the parameters that a table follows leaves nothing to rebuild it from
    but = faults.TAKES_PARAMETERS if case == "fourier" else ()
    faults.check_compiled_model_that_holds_it({**SHARED, **OWN}[case], but)


def test_a_table_whose_parameters_are_gone_is_refused():
    case = OWN["fourier"]
    held = case.lookup()
    for gone in ("moved to meta", "freed"):
        held.to_empty(device="cpu") if gone == "freed" else held.to("meta")
        if gone == "freed":
            held.cos_coef.untyped_storage().resize_(0)
        with pytest.raises(DeadBufferError, match="cos_coef is dead"):
            case.call(held, *case.inputs())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
