"""Let a save in the background finish when the process is about to end: by an exception, SIGTERM or otherwise."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class ExitWait:
    """Calls ``wait`` before the interpreter ends and before SIGTERM does its work, until :meth:`close`.

    torchrun, SLURM and Kubernetes announce the end with SIGTERM and kill some time after it (torchrun 30 s, or its
    ``--shutdown-timeout``). A signal is handled by the main thread, so only when that is where hooks run is it handled
    here. No thread can be started any more by what is waited for: it must have all that it needs.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._previous = signal.getsignal(signal.SIGTERM)
        self._handles_signals = threading.current_thread() is threading.main_thread()
        atexit.register(wait)
        if self._handles_signals:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def close(self) -> None:
        """Leave things as they were found."""
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
