"""One piece of work in a thread of its own, at most one at a time; its outcome is asked for later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar('T')


class Background(Generic[T]):
    """Runs one function beside the training loop. Used by: one thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._value: T | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether work was started whose outcome nobody has asked for yet."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether the work has ended; its outcome can be asked for without waiting."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def succeeded(self) -> bool:
        """Whether it has ended well."""
        return self.done and self._error is None

    def start(self, work: Callable[[], T]) -> None:
        """Begin; the outcome of earlier work must have been asked for."""
        if self.busy:
            raise RuntimeError(f'{self._name}: the outcome of earlier work was not asked for')
        self._value = self._error = None
        # A daemon: what waits for it at exit is a bounded wait, not the interpreter
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Wait for the end; whether it has come. The outcome stays to be asked for."""
        if self._thread is not None:
            self._thread.join(timeout_secs)
        return self._thread is None or not self._thread.is_alive()

    def outcome(self) -> T | None:
        """Wait for the end and return what the work returned; None if there was no work.

        Raises:
            BaseException: What the work raised.
        """
        self.wait()
        value, error = self._value, self._error
        self._thread = self._value = self._error = None
        if error is not None:
            raise error
        return value

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._value = work()
        except BaseException as error:  # whatever it is, it must reach the one who asks for the outcome
            self._error = error
