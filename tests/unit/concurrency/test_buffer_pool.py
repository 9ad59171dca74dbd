"""A buffer comes back when nobody refers to it any more, and not before."""

from __future__ import annotations

import threading

import pytest
import torch

from xhf_hooks.host_memory import BufferPool

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

NBYTES = 1000


def address(buffer) -> int:
    return buffer.__array_interface__['data'][0]


def test_what_is_dropped_is_given_again():
    pool = BufferPool(NBYTES, 1)
    first = pool.take()
    assert first.nbytes == NBYTES
    where = address(first)
    del first
    assert address(pool.take()) == where


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


def test_who_takes_more_than_there_are_gets_more():
    pool = BufferPool(NBYTES, 2)
    taken = [pool.take() for _ in range(5)]
    assert len({address(buffer) for buffer in taken}) == 5


def test_it_may_come_back_from_another_thread():
    pool = BufferPool(NBYTES, 1)
    held = [pool.take()]
    where = address(held[0])
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert address(pool.take()) == where


def test_of_no_bytes():
    assert BufferPool(0, 1).take().nbytes == 0
