"""Threads of a save: at a lower priority than training, in the background, and awaited when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import math
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
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


class Background(Generic[T]):
    """Runs a function in the background of training. Used by: one thread, and signal handlers in it.

    A handler may interrupt any of these methods and call another one, so they poll a flag and take no lock. A handler
    that interrupted :meth:`threading.Thread.join` and called it again would deadlock. A forked child does not have the
    thread, so it has no work.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = self._ended = False
        self._process = 0  # the process that has the thread
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether there is work whose outcome has not been collected."""
        return self._busy and self._process == os.getpid()

    @property
    def done(self) -> bool:
        """Whether the work has ended, so that :meth:`outcome` returns at once."""
        return self.busy and self._ended

    @property
    def succeeded(self) -> bool:
        """Whether the work has ended without an error."""
        return self.done and self._error is None

    def start(self, work: Callable[[], T]) -> None:
        """Start work. The outcome of earlier work must have been collected."""
        if self.busy:
            raise RuntimeError(f'{self._name}: the outcome of earlier work was not collected')
        self._value = self._error = None
        self._ended, self._process = False, os.getpid()
        # A daemon: at exit, ExitWait and not the interpreter waits for it, for a limited time
        threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True).start()
        self._busy = True  # last: a handler that interrupts this must not wait for a thread that has not started

    def wait(self, timeout_secs: float = math.inf) -> bool:
        """Wait for the end; returns whether the work has ended. The outcome is kept."""
        deadline = time.monotonic() + timeout_secs
        while self.busy and not self._ended and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
        return not self.busy or self._ended

    def outcome(self) -> T | None:
        """Wait for the end and return what the work returned; None if there was no work.

        Raises:
            BaseException: What the work raised.
        """
        self.wait()
        value, error = self._value, self._error
        self._value = self._error = None
        self._busy = False
        if error is not None:
            raise error
        return value

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._value = work()
        except BaseException as error:  # raised by outcome()
            self._error = error
        self._ended = True


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
                # A daemon: at exit a time-limited wait (:class:`ExitWait`) applies, not the interpreter's
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
