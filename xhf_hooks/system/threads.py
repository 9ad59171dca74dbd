"""Threads of a save: at a lower priority than training, in the background, and awaited when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from types import FrameType
from typing import Any, Generic, TypeVar

#: Added to the nice value. When all cores are busy, five levels leave a thread a quarter of a core. With ten (a tenth)
#: and 19 (a sixty-eighth), a save took two and three times as long as with five on a busy machine; and a thread that
#: is kept waiting may hold the GIL, so that training waits, too.
_NICER = 5


def lower_priority() -> None:
    """Lower the priority of the calling thread and of threads that it starts later, not of the process.

    On Linux nice values belong to threads, and I/O priorities follow from them (ioprio_set(2)). Does nothing on other
    systems, or if it is refused. It cannot be undone without privileges, so the thread should end with its work.
    """
    if sys.platform == 'linux':
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)


T = TypeVar('T')
_POLL_SECS = 0.005
_MOST_WORKERS = 8  # by default: more than a disk can feed


class Background(Generic[T]):
    """A function for a :class:`BackgroundThread`. Used by: one thread, and signal handlers in it.

    A handler may interrupt any of these methods and call another one, so they poll a flag and take no lock. A handler
    that interrupted :meth:`threading.Thread.join` and called it again would deadlock.

    Attributes:
        done: Whether the work has ended, so that :meth:`outcome` returns at once.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self.done = False
        self._work: Callable[[], T] | None = work
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the work has ended without an error."""
        return self.done and self._error is None

    def wait(self, secs: float = math.inf) -> bool:
        """Wait for the end; returns whether the work has ended."""
        deadline = time.monotonic() + secs
        while not self.done and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
        return self.done

    def outcome(self) -> T | None:
        """Wait for the end; returns what the work returned, or raises what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def run(self) -> None:
        """Do the work. Called in the background thread."""
        work, self._work = self._work, None
        try:
            self._value = work()
        except BaseException as error:  # raised by outcome()
            self._error = error
        self.done = True


class BackgroundThread:
    """Runs one function after another beside training, at a lower priority, until :meth:`close`.

    It waits for work from the beginning: no thread can be started while the process exits, nor perhaps when a save is
    due, and then other ranks would wait for this one.

    Attributes:
        works: Put in what it is to run.
    """

    def __init__(self, name: str) -> None:
        self.works: queue.SimpleQueue[Background[Any] | None] = queue.SimpleQueue()
        # A daemon: at exit, ExitWait and not the interpreter waits for it, for a limited time
        threading.Thread(target=_run_each, args=(self.works,), name=name, daemon=True).start()
        weakref.finalize(self, self.works.put, None).atexit = False

    def close(self) -> None:
        """End the thread after what it was given."""
        self.works.put(None)


def _run_each(works: queue.SimpleQueue[Background[Any] | None]) -> None:
    lower_priority()
    while (work := works.get()) is not None:
        work.run()
        del work  # its error and its outcome belong to others


class ExitWait:
    """Calls ``wait`` before the interpreter exits and before SIGTERM takes effect, until :meth:`close`.

    torchrun, SLURM and Kubernetes send SIGTERM and kill some time later (torchrun after 30 s, or its
    ``--shutdown-timeout``). Python handles signals in the main thread, so SIGTERM is handled only if hooks run there.
    While the interpreter exits, no thread can be started, so the save must have started its threads before.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._previous = signal.getsignal(signal.SIGTERM)
        self._handles_signals = threading.current_thread() is threading.main_thread()
        atexit.register(wait)
        if self._handles_signals:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def close(self) -> None:
        """Restore the previous handlers."""
        atexit.unregister(self._wait)
        if self._handles_signals and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._wait()
        self.close()
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous is not signal.SIG_IGN:
            os.kill(os.getpid(), number)


def default_workers() -> int:
    """One thread per core that this process may use, plus one that waits for the disk; up to a limit."""
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)) + 1)


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
