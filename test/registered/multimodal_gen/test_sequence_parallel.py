"""Shards of all ranks put together are the whole, with real processes: any axis, uneven sizes, text before and after."""

import itertools
import multiprocessing
import runpy
import socket
import sys
import traceback

import pytest
import torch
import torch.distributed as dist

from common.ci_register import register_cpu_ci
from multimodal_gen.runtime.layers.rotary_embedding.nd import NDRotaryEmbedding
from multimodal_gen.runtime.layers.rotary_embedding.pos_embed import FluxPosEmbed, QwenEmbedRope, WanRotaryPosEmbed
from multimodal_gen.runtime.layers.rotary_embedding.sharding import (
    LAYOUTS,
    rank_and_size,
    set_sequence_parallel_group,
    shard,
    shard_bounds,
    shard_tokens,
)

register_cpu_ci(est_time=60, suite="distributed-test-cpu")


def run(rank, size, port, name, failures):
    try:
        store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        torch.set_num_threads(1)
        globals()[name](rank, size)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # reported by the parent, with the rank
        failures.put((rank, traceback.format_exc()))
        raise


def on_ranks(size, work):
    """Run ``work(rank, size)`` in ``size`` processes joined by gloo."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    failures = context.Queue()
    tasks = [{"TASK": (rank, size, port, work.__name__, failures)} for rank in range(size)]
    # By path: the test runner's name for this module means nothing to another process.
    processes = [context.Process(target=runpy.run_path, args=(__file__, task, "rank")) for task in tasks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    reports = []
    while not failures.empty():
        reports.append("rank {}: {}".format(*failures.get()))
    codes = [process.exitcode for process in processes]
    assert not reports and not stuck and not any(codes), "\n".join([f"exit codes {codes}", *reports])


def together(tensor):
    """The tensors of all ranks, in the order of the ranks."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor)
    return parts


def grids(rank, size):
    """A grid that shards itself equals the whole cut along that axis, uneven or smaller than the group."""
    for sizes in ((4, 6, 8), (5, 7, 3), (1, 2, 5)):
        module = NDRotaryEmbedding([8, 12, 12], 10000.0)
        set_sequence_parallel_group(None)
        whole = module.forward_from_grid(sizes, start_frame=3)
        for group in (dist.group.WORLD, dist.device_mesh.init_device_mesh("cpu", (size,))):
            set_sequence_parallel_group(group)
            for axis in range(3):
                part = module.forward_from_grid(sizes, shard_dim=axis, start_frame=3)
                for got, want in zip(part, whole):
                    shards = [
                        p.view(*sizes[:axis], -1, *sizes[axis + 1 :], want.shape[-1])
                        for p in together(got)
                        if p.numel()
                    ]
                    assert torch.equal(torch.cat(shards, dim=axis).flatten(0, 2), want)
    set_sequence_parallel_group(None)


def tables(rank, size):
    """The parts of a joint table cover it, and each rank's rows are those of its own tokens."""
    ids = torch.cat([torch.zeros(5, 3), torch.cartesian_prod(*[torch.arange(n) for n in (2, 5, 3)]).float()])
    whole = FluxPosEmbed(10000, [4, 6, 6])(torch.cat([ids, torch.zeros(2, 3)]))
    for axis, replicate, layout in itertools.product((None, 0, 1, 2), (False, True), LAYOUTS):
        options = {"grid": (2, 5, 3), "axis": axis, "text": (5, 2), "replicate_text": replicate, "layout": layout}
        part = shard(whole, dist.group.WORLD, **options)
        held = shard(torch.arange(37), dist.group.WORLD, **options)
        assert all(torch.equal(p, w[held]) for p, w in zip(part, whole))
        seen = torch.cat(together(held))
        image = seen[(seen >= 5) & (seen < 35)]
        assert sorted(image.tolist()) == list(range(5, 35))
        text = sorted(seen[(seen < 5) | (seen >= 35)].tolist())
        assert text == sorted([*range(5), 35, 36] * (size if replicate else 1))


def layouts_of_models(rank, size):
    """Tables of any layout: tokens along any dimension, complex, in dicts."""
    wan = WanRotaryPosEmbed(32, (1, 2, 2), 64)(torch.empty(1, 1, 3, 10, 6))
    part = shard(wan, dist.group.WORLD, dim=1, grid=(3, 5, 3), axis=1)
    start, stop = shard_bounds(5, rank, size)
    for got, want in zip(part, wan):
        assert torch.equal(got, want.unflatten(1, (3, 5, 3))[:, :, start:stop].flatten(1, 3))
    image, text = QwenEmbedRope(10000, [4, 6, 6])([(1, 4, 5)], None, 7)
    part = shard({"image": image, "text": text}, dist.group.WORLD)
    for name, whole in (("image", image), ("text", text)):
        assert torch.equal(torch.cat(together(part[name])), whole)
    part["text"].zero_()
    assert torch.equal(QwenEmbedRope(10000, [4, 6, 6])([(1, 4, 5)], None, 7)[1], text)


def rotated_sequence(rank, size):
    """Ulysses: rotating each rank's tokens, then gathering, equals rotating the whole sequence."""
    cos, sin = NDRotaryEmbedding([4, 6, 6], 10000.0).forward_from_grid((2, 3, 5))
    query = torch.randn(30, 2, 16, generator=torch.Generator().manual_seed(0))

    def rotate(x, c, s):
        even, odd = x[..., 0::2], x[..., 1::2]
        c, s = c.unsqueeze(1), s.unsqueeze(1)
        return torch.stack([even * c - odd * s, odd * c + even * s], dim=-1).flatten(-2)

    local = rotate(*(shard(t, dist.group.WORLD) for t in (query, cos, sin)))
    assert torch.equal(torch.cat(together(local)), rotate(query, cos, sin))


def mesh_of_two_dimensions(rank, size):
    """Ring x Ulysses: the places of a mesh in row-major order."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    assert rank_and_size(mesh) == (rank, 4)
    assert rank_and_size(mesh["ulysses"]) == (rank % 2, 2)
    whole = torch.arange(10)
    assert torch.equal(torch.cat(together(shard(whole, mesh))), whole)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("work", [grids, tables, layouts_of_models, rotated_sequence], ids=lambda work: work.__name__)
def test_ranks(size, work):
    on_ranks(size, work)


def test_a_mesh_of_two_dimensions():
    on_ranks(4, mesh_of_two_dimensions)


def test_bounds_are_those_of_tensor_split():
    for size, world in itertools.product(range(12), range(1, 6)):
        pieces = torch.arange(size).tensor_split(world)
        assert [shard_bounds(size, r, world) for r in range(world)] == [
            (sum(map(len, pieces[:r])), sum(map(len, pieces[: r + 1]))) for r in range(world)
        ]


def test_zigzag_pairs_front_and_back():
    assert shard_tokens(8, 0, 2, layout="zigzag").tolist() == [0, 1, 6, 7]
    assert shard_tokens(8, 1, 2, layout="zigzag").tolist() == [2, 3, 4, 5]


def test_bad_input():
    with pytest.raises(ValueError, match="layout"):
        shard_tokens(8, 0, 2, layout="rings")
    with pytest.raises(ValueError, match="tokens"):
        shard(torch.arange(8), grid=(2, 3))
    with pytest.raises(ValueError, match="axis"):
        shard(torch.arange(8), axis=0)
    with pytest.raises(ValueError, match="rank"):
        shard_bounds(8, 2, 2)


if __name__ == "rank":
    run(*TASK)  # noqa: F821  # given by on_ranks

if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
