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

    Args:
        tell: Called in the background thread, as soon as the work has ended, with what it returned and what it raised.

    Attributes:
        done: Whether the work has ended and its outcome was told, so that :meth:`outcome` returns at once.
    """

    def __init__(self, work: Callable[[], T], tell: Callable[[T | None, BaseException | None], object]) -> None:
        self.done = False
        self._work: Callable[[], T] | None = work
        self._tell = tell
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

    def outcome(self) -> T:
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
        with contextlib.suppress(Exception):  # the thread goes on
            self._tell(self._value, self._error)
        self.done = True


#: Signals that ask a process to end, and do so where nothing handles them: of torchrun, SLURM and Kubernetes, of a
#: terminal that is closed, of a limit of CPU time. Ctrl-C raises KeyboardInterrupt instead.
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)


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
    """Waits before the interpreter exits and before a signal ends the process, until :meth:`close`.

    torchrun, SLURM and Kubernetes send SIGTERM and kill some time later (torchrun after 30 s, or its
    ``--shutdown-timeout``). Python handles signals in the main thread, so they are handled only if hooks run there. A
    signal that is ignored (``nohup``) stays ignored.

    Args:
        end: Called when the process is sure to end.
        wait: Called before a handler of the user, which may let training go on; None: as ``end``.
    """

    def __init__(self, end: Callable[[], object], wait: Callable[[], object] | None = None) -> None:
        self._end, self._wait = end, end if wait is None else wait
        self._is_open, self._thread = True, threading.current_thread()
        self._previous: dict[int, Any] = {}
        if self._thread is threading.main_thread():
            for number in _ENDING_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)
        _before_exit(self._at_exit)

    def close(self) -> None:
        """Restore the previous handlers."""
        self._is_open = False
        self._end = self._wait = lambda: None  # the interpreter keeps this object
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _at_exit(self) -> None:
        if self._is_open and not self._thread.daemon and self._thread is not threading.current_thread():
            self._thread.join()  # it still trains; the interpreter would wait for it next
        self._end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if callable(previous):
            self._wait()
            previous(number, frame)
        else:
            self._end()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _before_exit(function: Callable[[], None]) -> None:
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
