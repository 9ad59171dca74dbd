"""A buffer comes back when nobody refers to it any more, and not before."""

from __future__ import annotations

import pytest
import torch

from xhf_hooks.sources.host_memory import BufferPool

NBYTES = 1000


def address(buffer) -> int:
    return buffer.__array_interface__['data'][0]


@pytest.mark.parametrize('view', [lambda b: b[3:5].data, lambda b: b.data[3:5], lambda b: torch.from_numpy(b)[3:5]])
def test_not_while_a_part_of_it_is_in_use(view):
    pool = BufferPool(NBYTES, 1)
    buffer = pool.take()
    where, part = address(buffer), view(buffer)
    del buffer
    second = pool.take()
    assert address(second) != where
    del part
    assert address(pool.take()) == where
