"""Signals that request a save. Those that end a process do so after the save."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from xhf_hooks.errors import OptionError

_GO_ON = (signal.SIGUSR1, signal.SIGUSR2)


class SignalRequests:
    """Records that a signal requested a save, and lets the signal take effect afterwards.

    After SIGUSR1 and SIGUSR2 training goes on; the user's handler, if any, is called at once. Any other signal takes
    effect after the save: it ends the process or calls the user's handler. If no save is made within ``wait_secs``, it
    takes effect without one. In a forked child, such as a data loader worker, SIGUSR1 and SIGUSR2 do nothing, and the
    others take effect at once.

    Python may call handlers in the main thread between any two instructions, so they only set attributes and take no
    lock.

    Args:
        names: Signal names such as ``'SIGTERM'``.
        wait_secs: How long a signal that ends the process waits for the save.

    Raises:
        OptionError: Training is not in the main thread.
    """

    def __init__(self, names: Sequence[str], wait_secs: float) -> None:
        if names and threading.current_thread() is not threading.main_thread():
            raise OptionError('save_on_signal', 'None, since training is not in the main thread', names)
        self._wait_secs, self._process = wait_secs, os.getpid()
        self._asked: signal.Signals | None = None
        self._ending: signal.Signals | None = None
        self._ending_since = 0.0
        self._is_late = False
        self._waits = True  # whether signals that end the process wait for a save
        self._before: dict[signal.Signals, Any] = {}
        for number in map(signal.Signals.__getitem__, names):
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._handle)

    @property
    def asked(self) -> str | None:
        """The name of the signal that requests a save, if any."""
        return None if self._asked is None else self._asked.name

    @property
    def must_end(self) -> bool:
        """Whether a signal will end the process after the save."""
        return self._ending is not None

    def take(self) -> None:
        """Called when the requested save begins."""
        self._asked = None

    def end(self) -> None:
        """Let a pending signal take effect. Runs on: the main thread."""
        number, self._ending, self._is_late = self._ending, None, False
        if number is None:
            return
        before = self._before[number]
        if before is signal.SIG_IGN:
            return
        signal.signal(number, signal.SIG_DFL if before is None else before)
        if not callable(before):
            os.kill(os.getpid(), number)
        else:
            before(number, sys._getframe())
            if self._waits:  # the user's handler lets training go on
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._handle)

    def end_when_late(self) -> bool:
        """Let a signal that has waited too long take effect; returns whether there is one. Runs on: any thread."""
        number = self._ending
        if number is None or self._is_late or time.monotonic() - self._ending_since <= self._wait_secs:
            return False
        self._is_late = True
        os.kill(os.getpid(), number)
        return True

    def stop_waiting(self) -> None:
        """There will be no more saves: signals take effect at once. Runs on: any thread."""
        self._waits, number = False, self._ending
        if number is not None:
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Restore the previous handlers. Does nothing outside the main thread."""
        self._waits = False
        if os.getpid() != self._process or threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_IGN if before is None else before)

    def _handle(self, given: int, frame: FrameType | None) -> None:
        number = signal.Signals(given)
        if number in _GO_ON:
            if os.getpid() != self._process:
                return
            self._asked = number
            if callable(before := self._before[number]):
                before(number, frame)
            return
        if self._ending is None:
            self._ending_since = time.monotonic()
        self._ending = number
        if self._is_late or not self._waits or os.getpid() != self._process:
            self.end()
        else:
            self._asked = number
