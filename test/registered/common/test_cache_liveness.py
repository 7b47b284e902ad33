"""The guard and the modules that rebuild themselves, with a module that has nothing to do with RoPE."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from common.cache_liveness import (
    LiveBuffers,
    LiveCache,
    born_clean,
    find_dead_buffer,
    get_live_entry,
    get_or_build,
    row_checks,
)
from common.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")


class Powers(LiveBuffers):
    """Row n holds the first powers of n / rows, and a second buffer their sums."""

    def __init__(self, rows, width=4, device=None, shareable=True):
        super().__init__()
        self.rows, self.width, self.shareable, self.derived = rows, width, shareable, 0
        self.build_buffers(device)

    def shapes(self):
        return {"powers": (self.rows, self.width), "sums": (self.rows,)}

    def derivation(self):
        return ("powers", self.rows, self.width) if self.shareable else None

    def derive(self):
        self.derived += 1
        table = true_powers(self.rows, self.width)
        return {"powers": table, "sums": table.sum(dim=1)}


def true_powers(rows, width=4):
    return (torch.arange(rows, dtype=torch.float32, device="cpu") / rows)[:, None] ** torch.arange(width, device="cpu")


def assert_right(module, rows=16):
    assert torch.equal(module.live("powers"), true_powers(rows))
    assert torch.equal(module.live("sums"), true_powers(rows).sum(dim=1))


# --- find_dead_buffer -------------------------------------------------------------------------------------------------


def plain(**buffers):
    module = nn.Module()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def freed(tensor, nbytes=0):
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def corner(nbytes):
    """Elements 5, 6, 9 and 10 of a memory cut to ``nbytes``."""
    view = torch.zeros(4, 4)[1:3, 1:3].t()
    return freed(view, nbytes)


def fake():
    with FakeTensorMode():
        return torch.zeros(3)


@pytest.mark.parametrize(
    ("buffer", "fault"),
    [
        (torch.zeros(3, device="meta"), "on meta"),
        (None, "missing"),
        (fake(), "fake"),
        (freed(torch.zeros(3)), "storage freed"),
        (freed(torch.zeros(3), 8), "storage too small: 8 of the 12 bytes"),
        (corner(4 * 10), "storage too small: 40 of the 44 bytes"),
    ],
)
def test_finds_what_is_gone_and_says_why(buffer, fault):
    module = nn.Sequential(nn.Linear(2, 2), plain(good=torch.zeros(2), bad=buffer))
    name, found = find_dead_buffer(module)
    assert name == "1.bad" and found.startswith(fault)


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(3),
        torch.zeros(0),
        torch.zeros(0, 5)[:, ::2],
        torch.zeros(1).expand(1000),
        corner(4 * 11),
        torch.zeros(2, 2).to_sparse(),
    ],
)
def test_what_is_alive_is_alive(buffer):
    assert find_dead_buffer(plain(buffer=buffer)) is None


def test_a_deleted_derived_buffer_is_missing():
    module = Powers(16)
    del module.sums
    assert find_dead_buffer(module) == ("sums", "missing")


# --- checksums --------------------------------------------------------------------------------------------------------


def by_hand(*rows):
    words = [word & 0xFFFFFFFF for row in rows for word in row.view(torch.int32).tolist()]
    total = 0x9E3779B9 + sum((w ^ (w >> 15)) * (0x9E3779B1 * (2 * j + 1) & 0xFFFFFFFF) for j, w in enumerate(words))
    total &= 0xFFFFFFFF
    return total - (1 << 32) if total >> 31 else total


def test_row_checks_are_what_they_say():
    left, right = torch.randn(1500, 7), torch.randn(1500, 300)
    checks = row_checks(left, right)
    for row in (0, 1, 900, 1499):
        assert int(checks[row]) == by_hand(left[row], right[row])


def test_row_checks_see_any_one_word_and_the_usual_mix_ups():
    row = torch.randn(1, 64)
    original = int(row_checks(row))
    changed = [row.roll(32, 1), -row, row * 0, torch.cat((row[:, :32], -row[:, 32:]), 1), row.flip(1), row + 1]
    for at in range(64):
        for bit in (0, 14, 15, 16, 30, 31):
            other = row.clone()
            other.view(torch.int32)[0, at] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            changed.append(other)
    assert original not in [int(row_checks(other)) for other in changed]
    for byte in (0, 0xFF):
        filled = torch.full((1, 64 * 4), byte, dtype=torch.uint8).view(torch.float32)
        assert int(row_checks(filled)) not in (0, -1)  # a memory filled with one byte does not vouch for itself


# --- modules ----------------------------------------------------------------------------------------------------------


def test_unchanged_costs_no_derivation_and_no_comparison():
    module = Powers(16)
    assert module.derived == 1
    module.checksum = None  # would fail if it were called
    for _ in range(3):
        assert module.live("powers") is module.powers
        assert module.intact()
    assert module.derived == 1


def test_is_rebuilt_in_the_same_tensor_and_memory():
    module = Powers(16)
    tensor, address = module.powers, module.powers.data_ptr()
    tensor.zero_()
    assert_right(module)
    assert module.powers is tensor and tensor.data_ptr() == address
    tensor.untyped_storage().resize_(0)
    assert_right(module)
    assert module.powers is tensor


def test_a_strangers_memory_is_never_written_to():
    module, stranger = Powers(16), torch.full((16, 4), 7.0)
    for ruin in (
        lambda: setattr(module, "powers", stranger),
        lambda: setattr(module.powers, "data", stranger),
        lambda: module.powers.set_(stranger),
    ):
        ruin()
        assert_right(module)
        assert bool((stranger == 7.0).all())


def test_a_strangers_memory_is_not_taken_for_the_one_whose_address_it_got():
    for _ in range(50):
        module = Powers(16, shareable=False)
        module.powers.data = torch.zeros(1)  # frees the module's memory
        stranger = torch.full((16, 4), 7.0)  # often at the very address
        module.powers.data = stranger
        assert_right(module)
        assert bool((stranger == 7.0).all())


def test_a_replica_knows_its_own_tensors():
    module = Powers(16)
    replica = module._replicate_for_data_parallel()
    replica.powers = torch.zeros(16, 4)
    assert_right(replica)
    assert module.powers is not replica.powers
    module.checksum = None  # would fail if it were called: what the replica does makes nobody compare anew
    assert_right(module)
    assert module.heals == 0


def test_released_memory_is_not_cut_from_under_a_view():
    module = Powers(16, shareable=False)
    view, array, tensor = module.powers[3], module.powers.numpy(), module.powers
    module.release_memory()
    assert tensor.shape == (16, 4) and tensor.untyped_storage().nbytes() == 0
    assert torch.equal(view, true_powers(16)[3]) and array[15, 0] == 1.0
    assert_right(module)
    assert module.powers is tensor and module.heals == 0


def test_memory_of_an_equal_module_is_taken_over_only_if_its_values_are_right():
    first = Powers(16)
    first.powers.data.zero_()  # without a trace
    assert_right(Powers(16))


def test_a_dead_equal_module_stands_in_nobodys_way():
    first = Powers(16)
    first._buffers["powers"] = "not a tensor"
    assert_right(Powers(16))
    assert_right(first)


def test_builds_at_exit():
    script = (
        "import atexit, torch\n"
        "from srt.layers.rotary_embedding import get_rope\n"
        "rope = get_rope(8, 8, 8, 10000.0, dtype=torch.float32)\n"
        "def use():\n"
        "    rope.to('meta')\n"
        "    print(rope(torch.tensor([0]), torch.ones(1, 1, 8))[0].sum().item())\n"
        "atexit.register(use)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "8.0", done.stderr


def test_an_owner_that_pulls_the_buffer_away_while_it_is_healed_does_not_harm_the_reader(monkeypatch):
    module = Powers(16)
    own = module._own
    monkeypatch.setattr(module, "_own", lambda: (own(), module._buffers.clear()))  # the last step of a rebuild
    for _ in range(3):
        assert torch.equal(module.live("powers"), true_powers(16))
        module._buffers.clear()


def test_an_owner_that_pulls_the_buffer_away_while_it_is_compared_does_not_harm_an_equal_module(monkeypatch):
    first = Powers(16)
    monkeypatch.setattr(
        first, "_adopt", lambda name, _: name == "sums" and first._buffers.clear()
    )  # compared, then gone
    assert_right(Powers(16))


def test_equal_values_are_accepted_and_kept():
    module = Powers(16, shareable=False)
    loaded = module.powers.clone()
    module.powers = loaded
    assert_right(module)
    assert module.powers is loaded and module.derived == 1 and module.heals == 0


def test_what_is_remembered_keeps_no_memory_and_no_weak_reference():
    module = Powers(16)
    torch.utils.swap_tensors(module.powers, torch.zeros(16, 4))  # PyTorch refuses where a weak reference exists
    assert_right(module)
    gone = weakref.ref(module.powers)
    module._buffers["powers"] = torch.zeros(16, 4, device="meta")
    gc.collect()
    assert gone() is None
    module = Powers(16, shareable=False)
    storage = weakref.ref(module.powers.untyped_storage())
    module.to("meta")
    gc.collect()
    assert storage() is None and module.powers.is_meta


def test_state_dict_has_no_derived_buffer_and_loads_strictly():
    module = Powers(16)
    assert not module.state_dict()
    module.load_state_dict({})
    assert [name for name, _ in module.named_buffers()] == ["powers", "sums"]


@pytest.mark.parametrize(
    "carry",
    [
        copy.deepcopy,
        copy.copy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: torch.load(_saved(m), weights_only=False),
        lambda m: copy.deepcopy(nn.Sequential(m))[0],
    ],
)
def test_copies_carry_the_arguments_and_derive_anew(carry):
    module = Powers(16)
    module.powers.data.zero_()  # without a trace; a ruined original does not ruin its copy
    other = carry(module)
    assert other is not module and other.rows == 16
    assert_right(other)
    module.heal(*module.fault(verify=True))
    other.to("meta")
    assert_right(module)
    assert_right(other)


def _saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("cast", ["half", "double", "bfloat16", "float"])
def test_casts_leave_the_dtype(cast):
    model = nn.Sequential(nn.Linear(2, 2), Powers(16))
    getattr(model, cast)()
    assert_right(model[1])
    assert model[1].heals == 0


def test_moves():
    module = Powers(16)
    model = nn.Sequential(nn.Linear(2, 2), module)
    model.to("meta")
    assert module.powers.is_meta and module.sums.is_meta
    model.half()
    assert module.powers.is_meta
    model.to_empty(device="cpu")
    assert not module.powers.is_meta and module.heals == 0
    assert_right(module)
    with torch.device("meta"):
        meta = Powers(16)
    assert meta.derived == 0 and meta.powers.is_meta and meta.powers.shape == (16, 4)
    meta.to("cpu")  # its values are known, so they need not be copied out of meta
    assert_right(meta)


def test_equal_modules_share_one_memory_until_the_last_is_gone():
    first, second = Powers(16), Powers(16)
    assert first.powers is not second.powers and first.powers.data_ptr() == second.powers.data_ptr()
    assert second.derived == 0
    other = Powers(17)
    assert other.powers.data_ptr() != first.powers.data_ptr()
    first.to("meta")
    assert_right(second)
    assert second.heals == 0
    first.to_empty(device="cpu")
    assert first.powers.data_ptr() == second.powers.data_ptr()


class Learned(LiveBuffers):
    learned = ("weight",)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.build_buffers()

    def shapes(self):
        return {"squares": (4,)}

    def derive(self):
        return {"squares": self.weight.detach().to("cpu", torch.float32).square()}


def test_buffers_follow_learned_parameters():
    module = Learned()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)

    def assert_follows():
        assert torch.equal(module.live("squares"), module.weight.detach().float().square())

    assert_follows()
    module.weight.grad = torch.ones(4)
    optimizer.step()
    assert_follows()
    module.load_state_dict({"weight": torch.arange(4.0)})
    assert_follows()
    module.load_state_dict({"weight": torch.arange(4.0) + 1}, assign=True)
    assert_follows()
    module.weight.data = torch.full((4,), 3.0)
    assert_follows()
    module.weight.data.copy_(torch.arange(4.0) + 2)  # as weight loaders do: neither version nor address changes
    assert_follows()
    module.to(torch.bfloat16).weight.data[1] = 7.0
    assert_follows()
    module.float()
    module.weight = nn.Parameter(torch.full((4,), 5.0))
    assert_follows()
    module.squares.zero_()
    assert_follows()


# --- birth ------------------------------------------------------------------------------------------------------------


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


class DefaultDtype:
    def __enter__(self):
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_):
        torch.set_default_dtype(self.before)


SURROUNDINGS = {
    "autocast": autocast,
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "default dtype": DefaultDtype,
    "fake tensors": FakeTensorMode,
    "functions disabled": torch._C.DisableTorchFunction,
}


@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_birth_is_the_same_whatever_surrounds_it(surrounding):
    with surrounding():
        module = Powers(16, shareable=False)
    assert type(module.powers) is torch.Tensor and not module.powers.is_inference()
    assert_right(module)
    assert module.heals == 0
    (module.powers * torch.ones(4, requires_grad=True)).sum().backward()  # usable in training afterwards
    module.powers.zero_()
    with surrounding():
        module.live("powers")
    assert_right(module)
    assert module.heals == 1


def test_birth_in_a_trace():
    born = []

    def build(x):
        born.append(Powers(16, shareable=False))
        return x + 1

    torch.jit.trace(build, torch.zeros(1), check_trace=False)
    torch.fx.experimental.proxy_tensor.make_fx(build)(torch.zeros(1))
    torch.compile(build)(torch.zeros(1))
    assert len(born) >= 3
    for module in born:
        assert type(module.powers) is torch.Tensor
        assert_right(module)


def test_born_clean_raises_what_the_build_raises():
    with pytest.raises(ZeroDivisionError):
        born_clean(lambda: 1 // 0)


# --- caches -----------------------------------------------------------------------------------------------------------


def test_foreign_modules_are_guarded_by_their_memory():
    cache = {}
    first = get_or_build(cache, "key", lambda: plain(table=torch.ones(3)))
    assert get_live_entry(cache, "key") is first
    first.table.untyped_storage().resize_(0)
    assert get_live_entry(cache, "key") is None and not cache


def test_a_build_that_raises_caches_nothing():
    cache = LiveCache("test.raises")
    with pytest.raises(ZeroDivisionError):
        get_or_build(cache, 1, lambda: 1 // 0)
    assert len(cache) == 0
    assert get_or_build(cache, 1, lambda: Powers(3)) is cache[1]


def test_the_default_device_is_asked_for_only_when_an_entry_looks_dead(monkeypatch):
    cache = LiveCache("test.device")
    entry = get_or_build(cache, 1, lambda: Powers(3))
    asked = []
    real = torch.get_default_device
    monkeypatch.setattr(torch, "get_default_device", lambda: asked.append(1) or real())
    assert get_live_entry(cache, 1) is entry and get_live_entry(cache, 2) is None and not asked
    entry.to("meta")
    assert get_live_entry(cache, 1) is None and asked


def test_another_threads_fresh_entry_is_not_dropped():
    cache = LiveCache("test.fresh")
    dead, fresh = Powers(3), Powers(3)
    cache[1] = dead
    dead.to("meta")
    looked = threading.Event()

    class Slow(dict):
        def get(self, key, default=None):
            value = super().get(key, default)
            if value is dead and not looked.is_set():
                looked.set()
                self[key] = fresh  # another thread replaces it between look and drop
            return value

    slow = Slow({1: dead})
    assert get_live_entry(slow, 1) is None
    assert slow[1] is fresh


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
