"""What tests of both subsystems share: the ways in which another owner tears a shared module down."""

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
