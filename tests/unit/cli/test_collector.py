"""What imports leave to the garbage collector."""

from __future__ import annotations

import gc
import sys
import types

import pytest

from xhf_hooks.cli.collector import without_collector

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


@pytest.mark.parametrize('freeze', [False, True])
def test_it_is_off_inside_alone(freeze):
    with without_collector(freeze=freeze):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_is_there_is_frozen(monkeypatch):
    monkeypatch.delitem(sys.modules, 'triton._C.libtriton', raising=False)  # torch's CUDA build may have loaded it
    with without_collector(freeze=True):
        pass
    assert gc.get_freeze_count() > 0


def test_beside_triton_nothing_is_frozen(monkeypatch):
    monkeypatch.setitem(sys.modules, 'triton._C.libtriton', types.ModuleType('libtriton'))
    with without_collector(freeze=True):
        pass
    assert gc.get_freeze_count() == 0
