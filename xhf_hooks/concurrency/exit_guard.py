"""Lets a background save finish before the process ends, after an exception, SIGTERM or otherwise."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


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
