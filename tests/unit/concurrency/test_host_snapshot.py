"""Memory of snapshots: bytes are there once every device that was copied from has been waited for."""

from __future__ import annotations

from unittest import mock

import torch

from xhf_hooks.concurrency.host_snapshot import SnapshotMemory


class OnFirst(torch.Tensor):
    """A tensor on the CPU that says to be on another device, for want of one."""

    device = property(lambda self: torch.device('cuda', 0))


class OnSecond(torch.Tensor):
    """Another."""

    device = property(lambda self: torch.device('cuda', 1))


def held(memory: SnapshotMemory, *tensors: torch.Tensor) -> list[str]:
    """The devices that are waited for."""
    for tensor in tensors:
        assert memory.hold(tensor) == memoryview(torch.ones(3).numpy()).cast('B')
    with mock.patch('torch.cuda.synchronize') as synchronize, mock.patch('torch.cuda.is_available', return_value=True):
        memory.synchronize()
    return sorted(str(device) for call in synchronize.call_args_list for device in call.args)


def test_every_device_that_was_copied_from_is_waited_for():
    memory = SnapshotMemory()
    ones = torch.ones(3)
    assert held(memory, ones) == []
    assert held(memory, ones.as_subclass(OnFirst), ones, ones.as_subclass(OnSecond)) == ['cuda:0', 'cuda:1']
    memory.clear()
    assert held(memory, ones.as_subclass(OnSecond)) == ['cuda:1']
