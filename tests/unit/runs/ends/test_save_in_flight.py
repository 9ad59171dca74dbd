"""Saves in a thread of their own, waited for by the main thread and by signal handlers that interrupt it."""

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from tests.helpers.ranks.launch import HANG_SECS
from tests.helpers.runs.tiny_checkpoint import iteration
from xhf_hooks.runs.ends.background_task import BackgroundTask
from xhf_hooks.runs.save_in_flight import SaveInFlight


def nice_value() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class Saves(BackgroundTask):
    """Makes anything."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, BaseException | None]] = []
        super().__init__('a save', SaveInFlight.save, must_finish=True)

    def begin(self, make: Callable[[], Any]) -> Future[Any]:
        save = SaveInFlight(iteration(1), make, lambda made, error: self.told.append((made, error)))
        self.add(save)
        return save.outcome


@pytest.fixture
def saves() -> Iterator[Saves]:
    made = Saves().start()
    yield made
    made.close()
    made._thread.join(HANG_SECS)
    assert not made._thread.is_alive()


def test_outcome_and_error(saves):
    may_end = threading.Event()
    outcome = saves.begin(lambda: (may_end.wait(HANG_SECS), nice_value()))
    assert saves.left() == ['iter_1'] and not saves.wait(0.01) and saves.told == []
    may_end.set()
    assert saves.wait() and saves.left() == []
    assert outcome.result(0)[1] > nice_value()
    failed = saves.begin(lambda: 1 // 0)
    assert saves.wait() and isinstance(failed.exception(0), ZeroDivisionError)
    assert saves.told == [(outcome.result(0), None), (None, failed.exception(0))]


def test_nothing_is_kept_in_memory(saves):
    model = threading.Event()
    kept = weakref.ref(model)
    assert saves.begin(partial(id, model)).result(HANG_SECS) == id(model)
    del model
    while kept() is not None:  # the thread may not have reached its next line
        time.sleep(0.01)


def test_what_a_save_held_is_freed_while_an_end_still_waits(saves):
    """Else 3 of 48 processes that ended after ``save_hf(..., async_save=True)`` aborted, on a busy machine."""
    model, may_end, left = threading.Event(), threading.Event(), []
    weakref.finalize(model, lambda: left.append(saves.left()))
    saves.begin(partial(lambda held: may_end.wait(HANG_SECS), model))
    del model
    may_end.set()
    assert saves.wait(HANG_SECS) and left == [['iter_1']]


def test_a_handler_that_interrupts_the_wait_may_wait(saves):
    """With Thread.join it hung about once in a hundred kills: the handler waited for a lock of what it interrupted."""
    late = []
    going_on = True

    def wait_too(*_: object) -> None:
        late.append(not saves.wait(HANG_SECS))
        if going_on:  # the next one when this one has ended: on a busy machine they would pile up
            signal.setitimer(signal.ITIMER_REAL, 2e-5)

    before = signal.signal(signal.SIGALRM, wait_too)
    try:
        for number in range(100):
            outcome = saves.begin(partial(int, number))
            signal.setitimer(signal.ITIMER_REAL, 1e-5)
            assert saves.wait(HANG_SECS) and outcome.result(0) == number
    finally:
        going_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert late and not any(late)
