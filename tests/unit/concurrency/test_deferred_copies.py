"""Weights change when they have been copied, and not before; nothing waits for ever."""

from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.helpers.ranks import HANG_SECS
from tests.helpers.zoo.llamas import odd_llama
from xhf_hooks.commit.checkpoint_folder import CheckpointFolder
from xhf_hooks.concurrency.background_task import Background
from xhf_hooks.concurrency.deferred_copies import DeferredCopies
from xhf_hooks.concurrency.host_snapshot import SnapshotMemory
from xhf_hooks.config.options import SaveOptions
from xhf_hooks.distributed.collective import Collective
from xhf_hooks.errors import TensorError
from xhf_hooks.model.optimizers import inner_optimizer
from xhf_hooks.planning.types import Step
from xhf_hooks.save import Saver

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


@pytest.fixture
def model():
    return torch.nn.Linear(3, 2)


@pytest.fixture
def optimizer(model):
    model(torch.ones(3)).sum().backward()
    return torch.optim.SGD(model.parameters(), lr=1.0)


def held(copies, model):
    memory = SnapshotMemory(copies)
    return memory.hold(model.weight, 0, True)


def in_a_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize('how', ['step', 'load'])
def test_what_changes_weights_waits(model, optimizer, how):
    copies, before = DeferredCopies(optimizer, model), model.weight.detach().clone()
    data, begun = held(copies, model), threading.Event()
    change = optimizer.step if how == 'step' else lambda: model.load_state_dict({k: v + 1 for k, v in state.items()})
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    thread = in_a_thread(lambda: (begun.set(), change()))
    assert begun.wait(HANG_SECS)
    thread.join(0.2)  # were it not to wait, it would most likely have ended by then, and the copy be wrong
    copies.run()
    thread.join(HANG_SECS)
    assert data == memoryview(before.numpy()).cast('B')
    assert not model.weight.equal(before) and copies.waited_secs > 0
    copies.close()
    assert not optimizer._optimizer_step_pre_hooks and not model._load_state_dict_pre_hooks


def test_copies_that_are_given_up_stop_nobody(model, optimizer):
    copies = DeferredCopies(optimizer, model)
    held(copies, model)
    copies.clear()
    optimizer.step()
    assert copies.nbytes == copies.waited_secs == 0


def test_what_does_not_wait_is_found_and_stops_nobody(model, optimizer):
    copies = DeferredCopies(optimizer)
    held(copies, model)
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(TensorError, match='a weight was changed'):
        copies.run()
    optimizer.step()


@pytest.mark.parametrize('is_steady', [False, True])
def test_what_is_not_steady_or_of_no_known_optimizer_is_copied_at_once(model, optimizer, is_steady):
    copies = DeferredCopies(None if is_steady else optimizer)
    data = SnapshotMemory(copies).hold(model.weight, 0, is_steady)
    assert data == memoryview(model.weight.detach().numpy()).cast('B') and copies.nbytes == 0


@pytest.mark.parametrize('another', [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_has_nothing_to_wait_for(model, optimizer, another):
    copies = DeferredCopies(optimizer, model)
    held(copies, model)
    other = another(model)
    assert copies.nbytes
    other.load_state_dict(model.state_dict())
    copies.clear()


def test_a_save_that_cannot_begin_stops_nobody(tmp_path):
    model = odd_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    saver = Saver(model, SaveOptions(), Collective(), in_background=True, optimizer=optimizer)
    saver.prepare()
    with mock.patch.object(Background, 'start', side_effect=RuntimeError('no thread')), pytest.raises(RuntimeError):
        saver.start(CheckpointFolder(tmp_path / 'hf_model', 1), Step('iter', 1, 1))
    optimizer.step()
    assert saver.deferred_nbytes == 0


@pytest.mark.parametrize('wrap', [lambda inner: inner, lambda inner: SimpleNamespace(optimizer=inner)])
def test_the_inner_optimizer(optimizer, wrap):
    assert inner_optimizer(wrap(optimizer)) is optimizer


class Unknown(SimpleNamespace):
    __module__ = 'deepspeed.runtime.unknown'


@pytest.mark.parametrize(
    'other',
    [None, SimpleNamespace(), SimpleNamespace(optimizer=object()), Unknown(optimizer=torch.optim.SGD([torch.ones(1)]))],
)
def test_of_what_is_unknown_there_is_none(other):
    assert inner_optimizer(other) is None
