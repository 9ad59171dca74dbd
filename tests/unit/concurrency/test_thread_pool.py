"""Results come as they are ready; whatever ends a run, the threads are idle after it, and fit for the next."""

from __future__ import annotations

import threading

import pytest

from xhf_hooks.system.threads import WorkerThreads


def test_an_error_ends_it_when_the_jobs_that_run_have_ended():
    running, may_end, ended = threading.Event(), threading.Event(), []

    def slow():
        running.set()
        may_end.wait()
        ended.append(1)

    def failing():
        running.wait()
        threading.Timer(0.1, may_end.set).start()
        raise ValueError('mine')

    with WorkerThreads(3) as threads:
        with pytest.raises(ValueError, match='mine'):
            list(threads.run([slow, failing]))
        assert ended == [1]
        assert list(threads.run([lambda: 5])) == [5]
