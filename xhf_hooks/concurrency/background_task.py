"""One piece of work in a thread of its own, at most one at a time; its outcome is asked for later."""

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
    """Runs one function beside the training loop. Used by: one thread, and signal handlers in it.

    A handler may interrupt any of these methods and call another. So there is a flag to look at and no lock to wait
    for: in a handler that interrupts :meth:`threading.Thread.join`, a second join waits for what the first holds.
    A child that was forked has no such thread, and so no work.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = self._ended = False
        self._process = 0  # that has the thread
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether work was started whose outcome nobody has asked for yet."""
        return self._busy and self._process == os.getpid()

    @property
    def done(self) -> bool:
        """Whether the work has ended; its outcome can be asked for without waiting."""
        return self.busy and self._ended

    @property
    def succeeded(self) -> bool:
        """Whether it has ended well."""
        return self.done and self._error is None

    def start(self, work: Callable[[], T]) -> None:
        """Begin; the outcome of earlier work must have been asked for."""
        if self.busy:
            raise RuntimeError(f'{self._name}: the outcome of earlier work was not asked for')
        self._value = self._error = None
        self._ended, self._process = False, os.getpid()
        # A daemon: what waits for it at exit is a bounded wait, not the interpreter
        threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True).start()
        self._busy = True  # only now: a handler that interrupts this must not wait for what cannot start meanwhile

    def wait(self, timeout_secs: float = math.inf) -> bool:
        """Wait for the end; whether it has come. The outcome stays to be asked for."""
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
        except BaseException as error:  # whatever it is, it must reach the one who asks for the outcome
            self._error = error
        self._ended = True
