"""Work in a thread of its own, waited for by the main thread and by signal handlers that interrupt it."""

from __future__ import annotations

import signal

import pytest

from tests.helpers.ranks import HANG_SECS
from xhf_hooks.threads import Background

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


def test_outcome_and_error():
    background: Background[int] = Background('test')
    assert not background.busy and background.outcome() is None
    background.start(lambda: 7)
    assert background.busy and background.wait(5) and background.succeeded
    assert background.outcome() == 7 and not background.busy
    background.start(lambda: 1 // 0)
    assert background.wait(5) and background.done and not background.succeeded
    with pytest.raises(ZeroDivisionError):
        background.outcome()
    assert background.outcome() is None


def test_a_handler_that_interrupts_the_wait_may_wait():
    """With Thread.join it hung about once in a hundred kills: the handler waited for a lock of what it interrupted."""
    background: Background[int] = Background('test')
    late = []
    going_on = True

    def wait_too(*_: object) -> None:
        late.append(not background.wait(HANG_SECS))
        if going_on:  # the next one when this one has ended: on a busy machine they would pile up
            signal.setitimer(signal.ITIMER_REAL, 2e-5)

    before = signal.signal(signal.SIGALRM, wait_too)
    try:
        for number in range(500):
            background.start(lambda number=number: number)
            signal.setitimer(signal.ITIMER_REAL, 1e-5)
            outcome = background.outcome()
            assert outcome == number
    finally:
        going_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert late and not any(late)
