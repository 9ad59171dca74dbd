"""Work in a thread of its own, waited for by the main thread and by signal handlers that interrupt it."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.helpers.ranks.launch import HANG_SECS
from xhf_hooks.system.threads import Background, BackgroundThread


def nice_value() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


TOLD: list[tuple[Any, BaseException | None]] = []


def begun(thread: BackgroundThread, work: Callable[[], Any]) -> Background[Any]:
    background = Background(work, lambda value, error: TOLD.append((value, error)))
    thread.works.put(background)
    return background


def test_outcome_and_error():
    thread = BackgroundThread('test')
    background = begun(thread, lambda: (7, nice_value()))
    value, lower = background.outcome()
    assert value == 7 and lower > nice_value() and background.done and background.succeeded
    failed = begun(thread, lambda: 1 // 0)
    assert failed.wait(HANG_SECS) and failed.done and not failed.succeeded
    with pytest.raises(ZeroDivisionError):
        failed.outcome()
    (_, nothing), (_, error) = TOLD[-2:]
    assert nothing is None and isinstance(error, ZeroDivisionError)


@pytest.mark.parametrize('end', ['close', 'forget'])
def test_the_thread_ends_and_keeps_nothing_in_memory(end):
    thread = BackgroundThread(f'test-{end}')
    model = Model()
    kept = weakref.ref(model)
    assert begun(thread, partial(id, model)).outcome() == id(model)
    del model
    while kept() is not None:  # the thread may not have reached its next line
        time.sleep(0.01)
    if end == 'close':
        thread.close()
    else:
        del thread
    while any(running.name == f'test-{end}' for running in threading.enumerate()):
        time.sleep(0.01)


class Model:
    """Takes a weak reference."""


def test_a_handler_that_interrupts_the_wait_may_wait():
    """With Thread.join it hung about once in a hundred kills: the handler waited for a lock of what it interrupted."""
    thread = BackgroundThread('test')
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
            background.append(begun(thread, lambda number=number: number))
            signal.setitimer(signal.ITIMER_REAL, 1e-5)
            assert background[-1].outcome() == number
    finally:
        going_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert late and not any(late)
