"""What tests share: ways to tear a module down, both ways to rotate, and a process without other tests' entries.

Imports of the packages stand in the fixtures: tests that need only the standard library load this file too.
"""

import gc

import pytest


def _to_meta(module):
    module.to("meta")


def _assign_meta(module):
    for name, buffer in list(module.named_buffers()):
        module._buffers[name] = buffer.to("meta")


def _free(module):
    for buffer in module.buffers():
        buffer.untyped_storage().resize_(0)


def _free_half(module):
    for buffer in module.buffers():
        buffer.untyped_storage().resize_(buffer.nbytes // 2)


_TEARDOWNS = {"to meta": _to_meta, "meta assigned": _assign_meta, "storage freed": _free, "storage cut": _free_half}


@pytest.fixture(params=_TEARDOWNS.values(), ids=_TEARDOWNS)
def teardown(request):
    """A function that kills a module's buffers as another owner's teardown does."""
    return request.param


@pytest.fixture(params=["c", "torch"])
def kernel(request, monkeypatch):
    """Both ways to rotate on a CPU; the name of the one in use."""
    from common import rope_kernel

    if request.param == "torch":
        monkeypatch.setattr(rope_kernel, "_library", None)
        monkeypatch.setattr(rope_kernel, "short_way", None)
    elif rope_kernel._library is None:
        pytest.skip("the C kernel was not built here")
    return request.param


@pytest.fixture
def alone(monkeypatch):
    """No entries of other tests, no limit, strong caches."""
    from common import rope_frequencies
    from common.cache_liveness import clear_caches, set_caches_weak

    monkeypatch.setattr(rope_frequencies, "_limit_is_set", False)
    monkeypatch.delenv("LIVE_ROPE_TABLE_LIMIT", raising=False)
    clear_caches()
    gc.collect()
    yield
    set_caches_weak(False)
    clear_caches()
