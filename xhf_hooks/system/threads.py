"""Threads: at a lower priority than training, those that share jobs, and waiting for them."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from typing import TypeVar

T = TypeVar('T')
_MOST_WORKERS = 8  # by default: more than a disk can feed
#: Added to the nice value. When all cores are busy, five levels leave a thread a quarter of a core. With ten (a tenth)
#: and 19 (a sixty-eighth), a save took two and three times as long as with five on a busy machine; and a thread that
#: is kept waiting may hold the GIL, so that training waits, too.
_NICER = 5
_POLL_SECS = 0.005


def wait_until(is_over: Callable[[], bool], secs: float = math.inf) -> bool:
    """Wait for something; returns False if time ran out. A signal handler that interrupts this may call it, too."""
    deadline = time.monotonic() + secs
    while not is_over() and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    return is_over()


def call_before_exit(function: Callable[[], None]) -> None:
    """Have a function called when the interpreter begins to exit, while threads can be started.

    ``atexit`` is too late: concurrent.futures has shut all its pools down by then, and asyncio looks up host names in
    one (CPython: ``_python_exit`` in concurrent/futures/thread.py). Nothing public comes before that. In Python 3.12.0
    and 3.12.1 no thread can be started then, either.
    """
    try:
        # In reverse order of registration; concurrent.futures, imported above, has registered its own
        threading._register_atexit(function)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # another Python, or the main thread has already ended
        atexit.register(function)


def lower_priority() -> None:
    """Lower the priority of the calling thread and of threads that it starts later, not of the process.

    On Linux nice values belong to threads, and I/O priorities follow from them (ioprio_set(2)). Does nothing on other
    systems, or if it is refused. It cannot be undone without privileges, so the thread should end with its work.
    """
    if sys.platform == 'linux':
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)


def count_usable_cores() -> int:
    """The number of cores that this process may use; on systems that do not say, such as macOS, all of them."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers() -> int:
    """One thread per core that this process may use, plus one that waits for the disk; up to a limit."""
    return min(_MOST_WORKERS, count_usable_cores() + 1)


class WorkerThreads:
    """Threads for jobs. Used by: one thread.

    Args:
        count: Number of threads. With 1, jobs run in the calling thread: while the interpreter exits, no thread can be
            started.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, 'xhf-worker') if count > 1 else None

    def run(self, jobs: Iterable[Callable[[], T]]) -> Iterator[T]:
        """Results as jobs end. The first error is raised once the running jobs have ended."""
        if self._pool is None:
            yield from (job() for job in jobs)
            return
        futures = [self._pool.submit(job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def __enter__(self) -> WorkerThreads:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
