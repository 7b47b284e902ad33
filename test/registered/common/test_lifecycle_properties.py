"""Random lives of several models that share ropes: whatever happens in whatever order, every rotation is right."""

import copy
import pickle
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.cache_liveness import clear_caches, evict_unused, invalidate_memory, release_memory
from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding import get_rope as get_image_rope
from srt.layers.rotary_embedding import get_rope

register_cpu_ci(est_time=45, suite="base-a-test-cpu")

DIM, TOP = 16, 48
SPECS = [(100.0, True), (10000.0, True), (10000.0, False)]
SPEC = st.sampled_from(range(len(SPECS)))
MODEL = st.integers(0, 3)


def truth(query, positions, base, neox):
    angle = positions.double()[:, None] * base ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    query = query.double()
    if neox:
        a, b = query.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = query[..., ::2], query[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


class Lives(RuleBasedStateMachine):
    """Up to four models, each a list of (spec, subsystem, rope)."""

    def __init__(self):
        super().__init__()
        clear_caches()
        self.models = {}

    @rule(slot=MODEL, specs=st.lists(SPEC, min_size=1, max_size=3), image=st.booleans(), meta=st.booleans())
    def build(self, slot, specs, image, meta):
        get = get_image_rope if image else get_rope
        with torch.device("meta" if meta else "cpu"):
            ropes = [get(DIM, DIM, TOP, *SPECS[spec], dtype=torch.float32) for spec in specs]
        for spec, rope in zip(specs, ropes):
            with torch.device("meta" if meta else "cpu"):
                assert meta or get(DIM, DIM, TOP, *SPECS[spec], dtype=torch.float32) is rope
        self.models[slot] = (torch.nn.ModuleList(ropes), specs, image)

    @rule(slot=MODEL)
    def unload(self, slot):
        self.models.pop(slot, None)

    @rule(
        slot=MODEL,
        change=st.sampled_from(
            [
                lambda m: m.to("meta"),
                lambda m: m.to_empty(device="cpu"),
                lambda m: m.half(),
                lambda m: m.double(),
                lambda m: m.to("cpu") if not any(b.is_meta for b in m.buffers()) else None,
                lambda m: [b.untyped_storage().resize_(0) for b in m.buffers() if not b.is_meta],
                lambda m: [b.zero_() for b in m.buffers() if not b.is_meta and b.untyped_storage().nbytes()],
                lambda m: [b.data.fill_(3.0) for b in m.buffers() if not b.is_meta and b.untyped_storage().nbytes()],
                lambda m: [setattr(b, "data", torch.ones(2, 2)) for b in m.buffers() if not b.is_meta],
                lambda m: [r._buffers.update(cos_sin_cache=torch.randn(TOP, DIM)) for r in m],
                lambda m: [r._buffers.pop("cos_sin_cache", None) for r in m],
                lambda m: m.load_state_dict(m.state_dict()),
            ]
        ),
    )
    def change(self, slot, change):
        if slot in self.models:
            change(self.models[slot][0])

    @rule(slot=MODEL, to=MODEL, carry=st.sampled_from([copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]))
    def carry(self, slot, to, carry):
        if slot in self.models:
            ropes, specs, image = self.models[slot]
            self.models[to] = (carry(ropes), specs, image)

    @rule(act=st.sampled_from([evict_unused, clear_caches, release_memory, invalidate_memory]))
    def manage(self, act):
        act()

    @rule(slot=MODEL, seed=st.integers(0, 1000), far=st.booleans(), inplace=st.booleans())
    def rotate(self, slot, seed, far, inplace):
        if slot in self.models:
            self.check(slot, seed, far, inplace)

    @invariant()
    def every_model_rotates_right(self):
        for slot in self.models:
            self.check(slot, slot, False, False)

    def check(self, slot, seed, far, inplace):
        ropes, specs, image = self.models[slot]
        generator = torch.Generator().manual_seed(seed)
        for rope, spec in zip(ropes, specs):
            positions = torch.randint(0, 3 * TOP if far else TOP, (3,), generator=generator)
            query = torch.randn(3, 2, DIM, generator=generator)
            expected = truth(query, positions, *SPECS[spec])
            given = (query, None, positions) if image else (positions, query)
            ours, _ = rope(*given, inplace=inplace)
            assert (ours.double() - expected).abs().max() < 1e-3


Lives.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestLives = Lives.TestCase


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
