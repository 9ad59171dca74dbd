"""Threads for many small jobs. Results arrive in the order in which jobs finish."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

Result = TypeVar('Result')
_MOST_WORKERS = 8  # by default: more than a disk can feed
_LOOK_SECS = 5.0  # between checks that all threads are alive
_TO_BEGIN_NBYTES = 64 * 2**20  # for a thread: its stack, usually 8 MB, and its Python objects
_Job = Callable[[], Any]


def default_workers() -> int:
    """One thread per core that this process may use, plus one that waits for the disk; up to a limit."""
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)) + 1)


def _require_memory() -> None:
    """Check first: a thread without memory to begin ends silently, and ``Thread.start`` waits forever."""
    try:
        mmap.mmap(-1, _TO_BEGIN_NBYTES).close()  # from the system, not memory that this process has freed
    except OSError:
        raise MemoryError(f'no {_TO_BEGIN_NBYTES >> 20} MB for a thread') from None


class WorkerThreads:
    """Threads that are all started at once and wait for jobs. Used by: one thread, for one :meth:`run` at a time.

    Not concurrent.futures, which accepts no jobs once the interpreter has begun to shut down; and since Python 3.12
    no thread can be started then. A background save may still be running, so its threads start when it does.

    Args:
        count: Number of threads.
        prepare: Called in each thread before its first job. It must not raise.

    Raises:
        RuntimeError: The system does not allow that many threads.
        MemoryError: There is not enough memory for them.
    """

    def __init__(self, count: int, prepare: Callable[[], None] = lambda: None) -> None:
        self._prepare = prepare
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(count):
                # A daemon: at exit a time-limited wait (exit_guard.py) applies, not the interpreter's
                thread = threading.Thread(target=self._work, name=f'xhf-worker-{number}', daemon=True)
                _require_memory()
                thread.start()
                self._threads.append(thread)
        except (RuntimeError, MemoryError):
            self.close()
            raise

    def run(self, jobs: Iterable[Callable[[], Result]]) -> Iterator[Result]:
        """Results as jobs end. The first error is raised once the running jobs have ended."""
        todo, waiting = iter(jobs), 0
        ended = False
        try:
            while True:
                for job in islice(todo, 4 * len(self._threads) - waiting):
                    self._jobs.put(job)
                    waiting += 1
                if not waiting:
                    ended = True
                    return
                value, error = self._next_result()
                waiting -= 1
                if error is not None:
                    raise error
                yield value
        finally:
            if not ended:
                self._forget_jobs()

    def _next_result(self) -> tuple[Any, BaseException | None]:
        """Wait for the next result.

        Raises:
            MemoryError: A thread ended without even the memory to report it.
        """
        while True:
            try:
                return self._results.get(timeout=_LOOK_SECS)
            except queue.Empty:
                if not all(thread.is_alive() for thread in self._threads):
                    raise MemoryError('a thread ran out of memory') from None

    def _forget_jobs(self) -> None:
        """Drop jobs that have not started, and wait for those that have.

        ``waiting`` of :meth:`run` cannot tell: Ctrl-C may come between taking a result and counting it.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if not self._threads:
            return
        all_idle, mark = threading.Barrier(len(self._threads)), object()
        for _ in self._threads:  # each thread takes one, since none continues before all have
            self._jobs.put(lambda: (all_idle.wait(), mark)[1])
        marks = 0
        while marks < len(self._threads):
            marks += self._next_result()[0] is mark

    def close(self) -> None:
        """End the threads. No job may be running."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def __enter__(self) -> WorkerThreads:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _work(self) -> None:
        self._prepare()
        while (job := self._jobs.get()) is not None:
            try:
                result: tuple[Any, BaseException | None] = job(), None
            except BaseException as error:  # raised by run()
                result = None, error
            del job  # frees what it holds before the next job arrives
            self._results.put(result)
            del result
