"""Results come as they are ready; whatever ends a run, the threads are idle after it, and fit for the next."""

from __future__ import annotations

import queue
import threading

import pytest

import xhf_hooks.threads
from xhf_hooks.threads import WorkerThreads

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


@pytest.fixture
def threads():
    with WorkerThreads(3) as threads:
        yield threads


def test_an_error_ends_it_when_the_jobs_that_run_have_ended(threads):
    running, may_end, ended = threading.Event(), threading.Event(), []

    def slow():
        running.set()
        may_end.wait()
        ended.append(1)

    def failing():
        running.wait()
        threading.Timer(0.1, may_end.set).start()
        raise ValueError('mine')

    with pytest.raises(ValueError, match='mine'):
        list(threads.run([slow, failing]))
    assert ended == [1]
    assert list(threads.run([lambda: 5])) == [5]


@pytest.mark.parametrize('lost', [0, 1, 2])
def test_interrupted_between_taking_results_and_counting_them(threads, monkeypatch, lost):
    """As Ctrl-C does it: what has been taken is lost, and nobody may wait for it."""

    class Interrupted(queue.SimpleQueue):
        taken = 0

        def get(self, timeout=None):
            found = super().get(timeout=timeout)
            self.taken += 1
            if self.taken == lost + 1:
                raise KeyboardInterrupt
            return found

    monkeypatch.setattr(threads, '_results', Interrupted())
    with pytest.raises(KeyboardInterrupt):
        list(threads.run(lambda n=n: n for n in range(20)))
    assert sorted(threads.run(lambda n=n: n for n in range(20))) == list(range(20))


def test_a_thread_that_ends_without_a_word(threads, monkeypatch):
    """As one does that has no memory left to report its error."""
    monkeypatch.setattr(xhf_hooks.threads, '_LOOK_SECS', 0.05)

    class Dying(queue.SimpleQueue):
        def put(self, item):
            if item[1] is not None:
                raise SystemExit  # ends a thread in silence
            super().put(item)

    monkeypatch.setattr(threads, '_results', Dying())

    def fail():
        raise ValueError

    with pytest.raises(MemoryError, match='a thread ran out of memory'):
        list(threads.run([fail, lambda: 1]))
    assert list(threads.run([])) == []
