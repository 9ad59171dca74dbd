"""Memory of snapshots: aligned as the file; its bytes are there once every device copied from was waited for."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch

from xhf_hooks.host_memory import SnapshotMemory


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


def test_every_device_that_was_copied_from_is_waited_for():
    memory = SnapshotMemory()
    ones = torch.ones(3)
    assert held(memory, ones) == []
    assert held(memory, ones.as_subclass(OnFirst), ones, ones.as_subclass(OnSecond)) == ['cuda:0', 'cuda:1']
    memory.clear()
    assert held(memory, ones.as_subclass(OnSecond)) == ['cuda:1']


def address(data: torch.Tensor) -> int:
    return data.data_ptr()


def test_what_is_large_is_aligned_as_in_its_file_and_keeps_its_bytes():
    """Whether it follows what was before it there, or not; small ones waste no page; nothing lies over another."""
    order = np.random.default_rng(0)
    sizes = [10, 2**20, 2**20, 0, 70_000, 100, 2**20 + 6, 65_536, 65_535]
    offsets = [8, 18, 18 + 2**20, 5, 4095, 77, 1, 2, 3]
    memory, again = SnapshotMemory(), []
    for _ in range(2):
        memory.clear()
        tensors = [torch.from_numpy(order.integers(0, 256, size, np.uint8)) for size in sizes]
        found = [memory.hold(tensor, offset) for tensor, offset in zip(tensors, offsets, strict=True)]
        for tensor, offset, data in zip(tensors, offsets, found, strict=True):
            assert torch.equal(data, tensor)
            assert data.nbytes < 65_536 or (address(data) - offset) % 4096 == 0
            assert not data.nbytes or address(data) % 64 == 0 or data.nbytes >= 65_536
        assert address(found[2]) == address(found[1]) + 2**20
        again.append([address(data) for data in found if data.nbytes])
    assert again[0] == again[1]
