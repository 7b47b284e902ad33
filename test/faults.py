"""The matrix of faults: every way in which an owner, a loader or the memory can ruin a module's derived buffer, and what
must hold afterwards for the next lookup, for a model that holds the module, and for a compiled one.

A case says how to look its rope up, how to call it, and what is true, in float64 arithmetic of its own.
"""

import copy
import ctypes

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def _buffer(module, name):
    return module._buffers[name]


def _behind(module, name, change):
    """Change the memory without a trace: through .data, as numpy or another process would."""
    with torch.no_grad():
        change(_buffer(module, name).data)


def _memset(module, name, byte):
    buffer = _buffer(module, name)
    ctypes.memset(buffer.data_ptr(), byte, buffer.nbytes)


def _assign(module, name, tensor):
    module._buffers[name] = tensor


def _swap_rows(table):
    table[: len(table) // 2] = table[len(table) // 2 : 2 * (len(table) // 2)].clone()


def _negate_sin(table):
    table[:, table.shape[1] // 2 :].neg_()


def _swap_halves(table):
    table.copy_(table.roll(table.shape[1] // 2, dims=1))


def _flip_bit(table):
    table.view(torch.int32)[1:, 3].bitwise_xor_(1)


def _other_table(table):
    half = table.shape[1] // 2
    angle = torch.arange(len(table))[:, None] * 500.0 ** (-torch.arange(half) / half)
    table.copy_(torch.cat((angle.cos(), angle.sin()), dim=1))


def _data_twice(module, name):
    """Another memory under the tensor, then a third that may lie where the first did."""
    buffer = _buffer(module, name)
    buffer.data = torch.zeros_like(buffer)
    buffer.data = torch.ones_like(buffer)


def _fake(module, name):
    with FakeTensorMode():
        _assign(module, name, torch.empty(_buffer(module, name).shape))


def _delete(module, name):
    delattr(module, name)


def _parameter(module, name):
    shape = _buffer(module, name).shape
    delattr(module, name)
    setattr(module, name, nn.Parameter(torch.zeros(shape)))


def _plain_attribute(module, name):
    delattr(module, name)
    module.__dict__[name] = torch.zeros(3)


def _inference(module, name):
    with torch.inference_mode():
        _assign(module, name, torch.zeros_like(_buffer(module, name)))


def _batched(module, name):
    torch.func.vmap(lambda table: _assign(module, name, table) or table)(torch.zeros(2, *_buffer(module, name).shape))


def _differentiated(module, name):
    torch.func.grad(lambda table: (_assign(module, name, table), table.sum())[1])(_buffer(module, name).clone())


def _nested(module, name):
    _assign(module, name, torch.nested.nested_tensor(list(_buffer(module, name)[:3]), layout=torch.jagged))


def _view_data(module, name, view):
    """Another shape or type over the same memory: version, address and size are unchanged."""
    _buffer(module, name).data = view(_buffer(module, name).data)


def _meta_then_to_empty(module, name):
    module.to("meta")
    module.to_empty(device="cpu")


def _cast_and_back(module, name):
    _assign(module, name, _buffer(module, name).half().float())


FAULTS = {
    # moved, freed, resized
    "moved to meta": lambda m, n: m.to("meta"),
    "meta assigned": lambda m, n: _assign(m, n, _buffer(m, n).to("meta")),
    "meta then to_empty": _meta_then_to_empty,
    "to_empty": lambda m, n: m.to_empty(device="cpu"),
    "storage freed": lambda m, n: _buffer(m, n).untyped_storage().resize_(0),
    "storage cut": lambda m, n: _buffer(m, n).untyped_storage().resize_(_buffer(m, n).nbytes // 2),
    "resized": lambda m, n: _buffer(m, n).resize_(3, _buffer(m, n).shape[1]),
    "transposed": lambda m, n: _buffer(m, n).t_(),
    "strides zero": lambda m, n: _buffer(m, n).as_strided_(_buffer(m, n).shape, (0, 1)),
    # materialised empty, filled, overwritten, with a trace
    "zeros": lambda m, n: _buffer(m, n).zero_(),
    "ones": lambda m, n: _buffer(m, n).fill_(1.0),
    "not a number": lambda m, n: _buffer(m, n).fill_(float("nan")),
    "garbage": lambda m, n: _buffer(m, n).fill_(-1e34),
    "random": lambda m, n: _buffer(m, n).normal_(),
    "scaled": lambda m, n: _buffer(m, n).mul_(0.5),
    "one row": lambda m, n: _buffer(m, n)[1].copy_(_buffer(m, n)[2]),
    "another table": lambda m, n: _other_table(_buffer(m, n)),
    # the same without a trace: address and version unchanged
    "unseen zeros": lambda m, n: _behind(m, n, torch.Tensor.zero_),
    "unseen ones": lambda m, n: _behind(m, n, lambda t: t.fill_(1.0)),
    "unseen not a number": lambda m, n: _behind(m, n, lambda t: t.fill_(float("nan"))),
    "unseen scaled": lambda m, n: _behind(m, n, lambda t: t.mul_(1.0001)),
    "unseen rows swapped": lambda m, n: _behind(m, n, _swap_rows),
    "unseen sines negated": lambda m, n: _behind(m, n, _negate_sin),
    "unseen halves swapped": lambda m, n: _behind(m, n, _swap_halves),
    "unseen bit": lambda m, n: _behind(m, n, _flip_bit),
    "unseen other table": lambda m, n: _behind(m, n, _other_table),
    "unseen as integers": lambda m, n: _view_data(m, n, lambda t: t.view(torch.int32)),
    "unseen as complex": lambda m, n: _view_data(m, n, lambda t: t.view(torch.complex64)),
    "unseen reshaped": lambda m, n: _view_data(m, n, lambda t: t.view(t.shape[1], t.shape[0])),
    "unseen transposed": lambda m, n: _view_data(m, n, lambda t: t.view(t.shape[1], t.shape[0]).t()),
    "unseen flat": lambda m, n: _view_data(m, n, lambda t: t.view(-1)),
    "unseen bytes ff": lambda m, n: _memset(m, n, 0xFF),
    "unseen bytes 00": lambda m, n: _memset(m, n, 0),
    # casts
    "half": lambda m, n: m.half(),
    "bfloat16": lambda m, n: m.to(torch.bfloat16),
    "double": lambda m, n: m.double(),
    "type": lambda m, n: m.type(torch.float16),
    "cast assigned": lambda m, n: _assign(m, n, _buffer(m, n).half()),
    "cast up assigned": lambda m, n: _assign(m, n, _buffer(m, n).double()),
    "cast down and back": _cast_and_back,
    "data cast": lambda m, n: setattr(_buffer(m, n), "data", _buffer(m, n).bfloat16()),
    # other tensors and memory
    "data swapped": lambda m, n: setattr(_buffer(m, n), "data", torch.zeros_like(_buffer(m, n))),
    "data swapped twice": _data_twice,
    "set to another storage": lambda m, n: _buffer(m, n).set_(torch.zeros_like(_buffer(m, n))),
    "tensors swapped": lambda m, n: torch.utils.swap_tensors(_buffer(m, n), torch.zeros_like(_buffer(m, n))),
    "replaced": lambda m, n: setattr(m, n, torch.zeros_like(_buffer(m, n))),
    "shorter": lambda m, n: _assign(m, n, _buffer(m, n)[:2].clone()),
    "narrower": lambda m, n: _assign(m, n, _buffer(m, n)[:, :2].clone()),
    "integers": lambda m, n: _assign(m, n, _buffer(m, n).int()),
    "an equal copy": lambda m, n: _assign(m, n, _buffer(m, n).clone()),
    "sparse": lambda m, n: _assign(m, n, _buffer(m, n).to_sparse()),
    "of another library": lambda m, n: _assign(m, n, _buffer(m, n).to_mkldnn()),
    "a negated view": lambda m, n: _assign(m, n, torch._neg_view(_buffer(m, n).clone())),
    "zeros without memory": lambda m, n: _assign(m, n, torch._efficientzerotensor(_buffer(m, n).shape)),
    "uninitialised": lambda m, n: _assign(m, n, nn.UninitializedBuffer()),
    "batched": _batched,
    "being differentiated": _differentiated,
    "nested": _nested,
    "nested without a layout": lambda m, n: _assign(m, n, torch.nested.nested_tensor(list(_buffer(m, n)[:3]))),
    "no tensor": lambda m, n: _assign(m, n, "cos and sin"),
    "deleted": _delete,
    "none": lambda m, n: setattr(m, n, None),
    "a parameter": _parameter,
    "a plain attribute": _plain_attribute,
    "fake": _fake,
    "inference tensor": _inference,
    "wants gradients": lambda m, n: _assign(m, n, _buffer(m, n).clone().requires_grad_()),
    "shared memory": lambda m, n: m.share_memory(),
    "shared memory freed": lambda m, n: (m.share_memory(), _buffer(m, n).untyped_storage().resize_(0)),
    # a copy shares the memory, as all equal modules do
    "copy zeroed": lambda m, n: copy.deepcopy(m)._buffers[n].zero_(),
}

# What leaves right values, or is stopped from changing them.
HARMLESS = (
    "half",
    "bfloat16",
    "double",
    "type",
    "to_empty",
    "meta then to_empty",
    "an equal copy",
    "wants gradients",
    "shared memory",
)
# What takes a module's learned parameters with it.
TAKES_PARAMETERS = ("moved to meta", "meta then to_empty", "to_empty")


def turned(query, angle, neox=True):
    """``query`` ``[tokens, heads, dim]`` turned by ``angle`` ``[tokens, dim/2]``, in float64."""
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    if neox:
        a, b = query.double().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = query.double()[..., ::2], query.double()[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def assert_right(case, rope, compiled=None):
    positions, query = case.inputs()
    ours = case.call(rope, positions, query) if compiled is None else compiled(positions, query)
    assert ours.device.type == "cpu" and ours.dtype == query.dtype
    assert (ours.double() - case.truth(positions, query)).abs().max() < 1e-4


def check_next_lookup(case, fault):
    dead = case.lookup()
    FAULTS[fault](dead, "cos_sin_cache")
    fresh = case.lookup()
    if fault in HARMLESS:
        assert fresh is dead
    elif not fault.startswith("unseen"):  # what leaves no trace is found where the rows are read
        assert fresh is not dead
    assert_right(case, fresh)
    assert case.lookup() is fresh


def check_model_that_holds_it(case, fault, caplog):
    held = case.lookup()
    assert_right(case, held)
    FAULTS[fault](held, "cos_sin_cache")
    with caplog.at_level("WARNING", "live_rope"):
        assert_right(case, held)
        assert_right(case, held)
    assert len(caplog.records) == (fault not in HARMLESS), [r.getMessage() for r in caplog.records]


def check_compiled_model_that_holds_it(case, but=()):
    """All faults in one compiled function: neither a graph break nor a recompile."""
    torch._dynamo.reset()
    held = case.lookup()
    compiled = torch.compile(lambda positions, query: case.call(held, positions, query), fullgraph=True, dynamic=True)
    assert_right(case, held, compiled)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for fault, ruin in FAULTS.items():
            if fault in but:
                continue
            ruin(held, "cos_sin_cache")
            try:
                assert_right(case, held, compiled)
            except Exception as error:
                raise AssertionError(f"after {fault!r}") from error
