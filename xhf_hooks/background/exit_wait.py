"""Waits for background tasks before the process ends."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401
import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from xhf_hooks.background.background_tasks import wait_until

#: Signals that ask a process to end, and do so where nothing handles them: of torchrun, SLURM and Kubernetes, of a
#: terminal that is closed, of a limit of CPU time. Ctrl-C raises KeyboardInterrupt instead.
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)


class ExitWait:
    """Waits before the interpreter exits and before a signal ends the process, from :meth:`start` to :meth:`close`.

    torchrun, SLURM and Kubernetes send SIGTERM and kill some time later (torchrun after 30 s, or its
    ``--shutdown-timeout``). Python handles signals in the main thread, so they are handled only if hooks run there. A
    signal that is ignored (``nohup``) stays ignored.

    A handler may interrupt the main thread while that holds a lock which the awaited work needs, such as the lock of a
    log handler. So the handler does not wait: a thread does, and then sends the signal to the main thread
    once more, where it takes effect. Until then training goes on, at most to the end of its iteration
    (:meth:`block_if_process_is_ending`).

    Args:
        end: Called when the process is sure to end.
        wait: Called before a handler of the user, which may let training go on.
    """

    def __init__(self, end: Callable[[], object], wait: Callable[[], object]) -> None:
        self._end = end
        self._wait = wait
        self._is_open = True
        self._process = os.getpid()
        self._thread = threading.current_thread()
        self._previous: dict[int, Any] = {}
        self._pending: int | None = None  # the signal that takes effect after the wait
        self._has_waited = False
        self._wake: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # handlers may put into it; None: end

    @classmethod
    def start(cls, end: Callable[[], object], wait: Callable[[], object]) -> ExitWait:
        """From now on, wait before the process ends. Runs on: the thread that trains."""
        exit_wait = cls(end, wait)
        if exit_wait._thread is threading.main_thread():
            # Started now: no thread can be started while the process exits
            threading.Thread(target=exit_wait._wait_for_signals, name='xhf-ExitWait', daemon=True).start()
            for number in _ENDING_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    exit_wait._previous[number] = signal.signal(number, exit_wait._on_signal)
        _before_exit(exit_wait._at_exit)
        return exit_wait

    def close(self) -> None:
        """Restore the previous handlers. A signal that came before takes effect yet."""
        self._is_open = False
        self._end = self._wait = lambda: None  # the interpreter keeps this object
        if os.getpid() == self._process:
            self._wake.put(None)
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def block_if_process_is_ending(self) -> None:
        """If a signal has come, go no further until it takes effect. Runs on: the main thread, not in a handler."""
        wait_until(lambda: self._pending is None or os.getpid() != self._process)

    def finish_work_before(self, number: int) -> None:
        """Wait for the background tasks now, so that the signal can take effect. Runs on: the main thread."""
        if number in self._previous:
            self._wait_before(number)
            self._has_waited = True

    def _wait_before(self, number: int) -> None:
        (self._wait if callable(self._previous[number]) else self._end)()

    def _wait_for_signals(self) -> None:
        while (number := self._wake.get()) is not None:
            with contextlib.suppress(Exception):  # of any type: the signal must take effect in any case
                self._wait_before(number)
            self._has_waited = True
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _at_exit(self) -> None:
        if self._is_open and not self._thread.daemon and self._thread is not threading.current_thread():
            self._thread.join()  # it still trains; the interpreter would wait for it next
        self._end()
        if self._is_open:
            self.block_if_process_is_ending()  # the exit status is that of the signal

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_open and not self._has_waited and os.getpid() == self._process:
            if self._pending is None:
                self._pending = number
                self._wake.put(number)
            return
        self._has_waited, self._pending = False, None
        previous = self._previous[number]
        if callable(previous):
            previous(number, frame)
        else:
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
