"""Memory of snapshots: aligned as the file; its bytes are there once every device copied from was waited for."""

from __future__ import annotations

from unittest import mock

import torch

from xhf_hooks.system.memory import SnapshotMemory


class OnFirst(torch.Tensor):
    """A tensor on the CPU that says to be on another device, for want of one."""

    device = property(lambda self: torch.device('cuda', 0))


class OnSecond(torch.Tensor):
    """Another."""

    device = property(lambda self: torch.device('cuda', 1))


def held(memory: SnapshotMemory, *tensors: torch.Tensor) -> list[str]:
    """The devices that are waited for."""
    for tensor in tensors:
        assert torch.equal(memory.hold(tensor, 0), torch.ones(3).view(torch.uint8))
    with mock.patch('torch.cuda.synchronize') as synchronize, mock.patch('torch.cuda.is_available', return_value=True):
        memory.synchronize()
    return sorted(str(device) for call in synchronize.call_args_list for device in call.args)


def test_a_gpu_that_training_does_not_use_is_left_alone():
    """A model on the CPU of a machine with a GPU, for want of one: pinned memory would fail here."""
    with mock.patch('torch.cuda.is_available', return_value=True):
        assert held(SnapshotMemory(), torch.ones(3)) == []


def test_every_device_that_was_copied_from_is_waited_for():
    memory = SnapshotMemory()
    ones = torch.ones(3)
    assert held(memory, ones) == []
    assert held(memory, ones.as_subclass(OnFirst), ones, ones.as_subclass(OnSecond)) == ['cuda:0', 'cuda:1']
    memory.clear()
    assert held(memory, ones.as_subclass(OnSecond)) == ['cuda:1']
