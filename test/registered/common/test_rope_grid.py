"""Tables put together by the C kernel and by plain torch are the same, and are what the per-axis tables say."""

import sys

import pytest
import torch

from common import rope_grid
from common.ci_register import register_cpu_ci
from common.rope_grid import Columns, fill_tables

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.fixture(params=["kernel", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(rope_grid, "_fill", None)
    elif rope_grid._fill is None:
        pytest.skip("the C kernel is not built here")
    return request.param


def draw(seed, dtype):
    generator = torch.Generator().manual_seed(seed)

    def number(high):
        return int(torch.randint(1, high, (1,), generator=generator))

    shape = [number(9) for _ in range(number(5))]
    axes = [number(len(shape) + 1) - 1 for _ in range(number(6))]
    widths = [number(40) for _ in axes]
    tables = [
        [Columns(a, torch.randn(shape[a], w, dtype=dtype, generator=generator)) for a, w in zip(axes, widths)]
        for _ in range(number(4))
    ]
    return shape, tables, generator


@pytest.mark.parametrize("seed", range(30))
def test_grid(way, seed):
    shape, tables, _ = draw(seed, DTYPES[seed % 4])
    width = sum(part.values.shape[1] for part in tables[0])
    outs = [torch.empty(*shape, width, dtype=DTYPES[seed % 4]) for _ in tables]
    fill_tables(outs, tables, shape)
    for out, columns in zip(outs, tables):
        for place in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist():
            row = torch.cat([part.values[place[part.axis]] for part in columns])
            assert torch.equal(out[tuple(place)], row)


@pytest.mark.parametrize("seed", range(20))
def test_positions(way, seed):
    shape, tables, generator = draw(seed, DTYPES[seed % 4])
    index = [torch.randint(0, size, (50,), generator=generator) for size in shape]
    width = sum(part.values.shape[1] for part in tables[0])
    outs = [torch.empty(50, width, dtype=DTYPES[seed % 4]) for _ in tables]
    fill_tables(outs, tables, shape, index)
    for out, columns in zip(outs, tables):
        assert torch.equal(out, torch.cat([part.values[index[part.axis]] for part in columns], dim=1))


def test_large_in_several_threads(way):
    shape = (9, 40, 50)
    columns = [Columns(a, torch.randn(n, 44 - a)) for a, n in enumerate(shape)]
    out = torch.empty(*shape, 129)
    fill_tables([out], [columns], shape)
    views = ((9, 1, 1, -1), (1, 40, 1, -1), (1, 1, 50, -1))
    want = torch.cat([part.values.view(v).expand(*shape, -1) for part, v in zip(columns, views)], dim=-1)
    assert torch.equal(out, want)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_no_tokens(way, shape):
    columns = [Columns(a, torch.randn(n, 4)) for a, n in enumerate(shape)]
    fill_tables([torch.empty(*shape, 4 * len(shape))], [columns], shape)
    fill_tables([torch.empty(0, 4 * len(shape))], [columns], shape, [torch.empty(0, dtype=torch.int64)] * len(shape))


def test_strided_results_and_a_row_for_a_whole_axis(way):
    whole = torch.zeros(3, 4, 20)
    columns = [Columns(0, torch.randn(1, 3)), Columns(1, torch.randn(4, 5)), Columns(0, torch.randn(3, 2))]
    fill_tables([whole[..., 6:16]], [columns], (3, 4))
    assert torch.equal(whole[2, 3, 6:16], torch.cat([columns[0].values[0], columns[1].values[3], columns[2].values[2]]))
    assert not whole[..., :6].any() and not whole[..., 16:].any()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
