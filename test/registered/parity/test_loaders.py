"""Models that hold ropes go through the loaders of transformers, accelerate and FSDP: every table is right afterwards."""

import sys

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PretrainedConfig, PreTrainedModel

from common.cache_liveness import clear_caches
from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding import get_rope as get_image_rope
from srt.layers.rotary_embedding import RotaryEmbedding, get_rope

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

DIM, TOP, BASE = 32, 64, 10000.0
POSITIONS = torch.tensor([0, 5, 33, TOP - 1])
QUERY = torch.randn(4, 2, DIM, generator=torch.Generator().manual_seed(2))
FOPE = {"rope_type": "default", "use_fope": True, "num_kv_heads": 2, "num_inv_freq": DIM // 2}


class Config(PretrainedConfig):
    model_type = "holds_ropes"


class Model(PreTrainedModel):
    """A custom model with ropes of both subsystems, one with learned coefficients (which begin as the identity)."""

    config_class = Config

    def __init__(self, config, learned=True):
        super().__init__(config)
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)])
        self.rope = get_rope(DIM, DIM, TOP, BASE, dtype=torch.float32)
        self.image_rope = get_image_rope(DIM, DIM, TOP, BASE, True, dtype=torch.float32)
        self.learned_rope = get_rope(DIM, DIM, TOP, BASE, True, FOPE, torch.float32) if learned else None
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, positions, query):
        self.layers[1](self.layers[0](query.to(self.layers[0].weight.dtype)))
        rotated = [self.rope(positions, query)[0], self.image_rope(query, positions=positions)[0]]
        if self.learned_rope is not None:
            flat = query.flatten(1)
            rotated.append(self.learned_rope(positions, flat, flat)[0].view(query.shape))
        return rotated


def truth():
    angle = POSITIONS.double()[:, None] * BASE ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    a, b = QUERY.double().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def assert_right(model):
    for _ in range(2):  # hooks put things back after the first
        for rotated in model(POSITIONS, QUERY):
            assert rotated.dtype == QUERY.dtype and (rotated.double() - truth()).abs().max() < 1e-4


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    Model(Config()).save_pretrained(folder)
    return folder


@pytest.fixture(params=["cold", "live"])
def other(request):
    """Nothing cached, or another model that holds the same shared modules, and must stay right too."""
    clear_caches()
    model = Model(Config()) if request.param == "live" else None
    yield model
    if model is not None:
        assert_right(model)


@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}], ids=str
)
def test_from_pretrained(saved, other, options):
    model = Model.from_pretrained(saved, **options)
    assert_right(model)
    assert model.rope.cos_sin_cache.dtype == torch.float32


def test_a_checkpoint_holds_the_coefficients_and_no_table(saved):
    model = Model(Config())
    assert [name for name in model.state_dict() if "rope" in name] == ["learned_rope.cos_coef", "learned_rope.sin_coef"]
    model.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, strict=True, assign=True)
    assert_right(model)


@pytest.mark.parametrize("include_buffers", [False, True])
def test_accelerate_loads_into_an_empty_model(saved, other, include_buffers):
    with accelerate.init_empty_weights(include_buffers=include_buffers):
        model = Model(Config())
    assert_right(accelerate.load_checkpoint_and_dispatch(model, saved, device_map={"": "cpu"}))


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("where", ["cpu", "disk", "mixed"])
def test_accelerate_offloads(saved, other, where, offload_buffers, tmp_path):
    model, cpu = Model.from_pretrained(saved), torch.device("cpu")
    if where == "cpu":
        accelerate.cpu_offload(model, cpu, offload_buffers=offload_buffers)
    elif where == "disk":
        accelerate.disk_offload(model, tmp_path, cpu, offload_buffers=offload_buffers)
    else:
        places = {"layers": "cpu", "rope": "disk", "image_rope": "cpu", "learned_rope": "disk"}
        model = accelerate.dispatch_model(
            model, places, cpu, offload_dir=tmp_path, offload_buffers=offload_buffers, force_hooks=True
        )
    assert_right(model)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fully_shard_after_a_meta_build(mesh, other, dtype):
    with torch.device("meta"):
        model = Model(Config(), learned=False)
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    assert_right(model)


def test_a_rope_that_is_sharded_itself(mesh):
    with torch.device("meta"):
        rope = RotaryEmbedding(DIM, DIM, TOP, BASE)
    fully_shard(rope, mesh=mesh)
    rope.to_empty(device="cpu")
    for _ in range(2):
        assert (rope(POSITIONS, QUERY)[0].double() - truth()).abs().max() < 1e-4
        rope.cos_sin_cache.data.zero_()


def test_data_parallel_broadcasts_buffers(mesh):
    model = DistributedDataParallel(Model(Config()))
    assert_right(model)
    model.module.rope.cos_sin_cache.data.zero_()
    assert_right(model)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
