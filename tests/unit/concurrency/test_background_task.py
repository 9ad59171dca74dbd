"""Work in a thread of its own, waited for by the main thread and by signal handlers that interrupt it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.helpers.ranks import HANG_SECS
from xhf_hooks.system.threads import Background


def nice_value() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_outcome_and_error():
    background = Background(lambda: (7, nice_value()), 'test')
    value, lower = background.outcome()
    assert value == 7 and lower > nice_value() and background.done and background.succeeded
    failed = Background(lambda: 1 // 0, 'test')
    assert failed.wait(5) and failed.done and not failed.succeeded
    with pytest.raises(ZeroDivisionError):
        failed.outcome()


def test_a_handler_that_interrupts_the_wait_may_wait():
    """With Thread.join it hung about once in a hundred kills: the handler waited for a lock of what it interrupted."""
    background: list[Background[int]] = []
    late = []
    going_on = True

    def wait_too(*_: object) -> None:
        late.append(not background[-1].wait(HANG_SECS))
        if going_on:  # the next one when this one has ended: on a busy machine they would pile up
            signal.setitimer(signal.ITIMER_REAL, 2e-5)

    before = signal.signal(signal.SIGALRM, wait_too)
    try:
        for number in range(500):
            background.append(Background(lambda number=number: number, 'test'))
            signal.setitimer(signal.ITIMER_REAL, 1e-5)
            assert background[-1].outcome() == number
    finally:
        going_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert late and not any(late)
