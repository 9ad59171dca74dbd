"""What a run has begun and what goes on beside training: waited for, however the run ends."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable
from logging import LoggerAdapter
from typing import Any, Protocol

from xhf_hooks.planning.types import Step
from xhf_hooks.system.threads import Background


class Listener(Protocol):
    """Work beside training, which tells its outcomes in its own thread, when it has them.

    Attributes:
        name: For the log.
        must_finish: Whether it is waited for even when training was interrupted.
    """

    @property
    def name(self) -> str: ...

    @property
    def must_finish(self) -> bool: ...

    def wait(self, secs: float) -> bool:
        """Wait until nothing is left to do; returns False if time ran out. Needs no other rank."""

    def left(self) -> list[str]:
        """The saves on which work is left."""

    def close(self) -> None:
        """Drop what is left, and tell it. Needs no other rank."""


class SaveInFlight:
    """The save that is being made in the background."""

    name, must_finish = 'a save in the background', True

    def __init__(self) -> None:
        self._save: Callable[[], Background[Any] | None] = lambda: None
        self._step: Step | None = None

    def begun(self, save: Background[Any], step: Step) -> None:
        """Look after this save from now on."""
        # Weak: an error's traceback holds the model, which a forgotten run must not keep. A thread keeps its own work
        self._save, self._step = weakref.ref(save), step

    def wait(self, secs: float) -> bool:
        """Wait until it has ended; returns False if time ran out."""
        save = self._save()
        return save is None or save.wait(secs)

    def left(self) -> list[str]:
        """Its step."""
        return [] if self.wait(0.0) or self._step is None else [self._step.label]

    def close(self) -> None:
        """Does nothing: it cannot be stopped."""


class BegunWork:
    """All work beside the training of one run. Used by: the thread that trains, and signal handlers in it.

    It knows neither model nor run, so that it can be waited for when both are forgotten.

    Args:
        most_secs: How long it is waited for, in all, from the first wait after a save.
    """

    def __init__(self, log: LoggerAdapter, most_secs: float) -> None:
        self.listeners: list[Listener] = []
        self._log, self._most_secs, self._process = log, most_secs, os.getpid()
        self._deadline: float | None = None

    def renew(self) -> None:
        """A save begins: what follows may take as long as allowed."""
        self._deadline = None

    def wait(self, secs: float, *, for_all: bool = True) -> bool:
        """Returns whether nothing is left to wait for: the work has ended, or may not take longer. Needs no other rank.

        Args:
            for_all: Also wait for what need not finish.
        """
        is_first = self._deadline is None
        if self._deadline is None:
            self._deadline = time.monotonic() + self._most_secs
        for listener in [listener for listener in self.listeners if for_all or listener.must_finish]:
            if is_first and not listener.wait(0.0):
                self._log.info(f'waiting for {listener.name}')
            left_secs = max(0.0, self._deadline - time.monotonic())
            if not listener.wait(min(secs, left_secs)):
                if secs < left_secs:
                    return False
                if left_secs:  # else it has been said
                    left = '; '.join(listener.left())
                    self._log.warning(
                        f'{listener.name}: not finished within exit_wait_secs={self._most_secs:g} s: {left}'
                    )
        return True

    def finish(self) -> None:
        """The process may be about to end, or goes on: wait for what must finish. Does nothing in a forked child."""
        if os.getpid() != self._process:
            return
        try:
            self.wait(math.inf, for_all=False)
        except BaseException:  # Ctrl-C
            for listener in self.listeners:
                if listener.must_finish and (left := listener.left()):
                    self._log.warning(f'{listener.name}: no longer waited for: {"; ".join(left)}')
            raise

    def end(self) -> None:
        """Training is over: end what need not finish, and wait for the rest. Does nothing in a forked child."""
        if os.getpid() != self._process:
            return
        for listener in self.listeners:
            if not listener.must_finish:
                listener.close()
        self.finish()

    def close(self) -> None:
        """:meth:`end`, and drop what has not finished by then. Does nothing in a forked child."""
        if os.getpid() == self._process:
            self.end()
            for listener in self.listeners:
                listener.close()
