"""Runs one task at a time in a separate thread; its outcome is collected later."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

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
