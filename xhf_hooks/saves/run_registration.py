"""The runs of this process that have not been closed. The locks of their folders belong to the process."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import ClassVar

from xhf_hooks.errors import TargetError


class RunRegistration:
    """One run, from :meth:`register` until it is closed or forgotten. Used by: the thread that trains.

    Hooks and callbacks are not notified when an exception or Ctrl-C interrupts training. So the next run in the same
    thread (a notebook, a sweep, Trainer's auto_find_batch_size) closes an earlier one, unless a callback of the earlier
    one has begun the next: then the earlier one goes on.

    Args:
        run: Identifies it, such as MMEngine's runner. Only another run can close this one.
        places: The folders and URLs of its saves: no two runs have one in common.
        close: Called to close it, when another run begins.

    Attributes:
        is_closed: Whether :meth:`unregister` was called.
    """

    _open: ClassVar[weakref.WeakSet[RunRegistration]] = weakref.WeakSet()

    def __init__(self, run: object | None, places: set[str], close: Callable[[], None]) -> None:
        self._run = None if run is None else weakref.ref(run)
        self._places = places
        self._close = close
        self._thread = threading.current_thread()
        self._process = os.getpid()
        self.is_closed = False

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, whose parent goes on with the run."""
        return self._process == os.getpid()

    def close_earlier(self, log: logging.LoggerAdapter) -> None:
        """Close earlier runs that are over. A thread trains one run at a time, but for runs within another.

        Raises:
            TargetError: A run that may still be going on has one of our places.
        """
        for other in [*RunRegistration._open]:
            if not other.is_of_this_process:
                continue
            both = self._places & other._places
            is_another = self._run is not None and other._run is not None and other._run() is not self._run()
            is_over = bool(both) or other._thread is self._thread or not other._thread.is_alive()
            if is_another and is_over and not other._is_calling:
                log.warning(f'{min(other._places)}: an earlier run was interrupted and is now closed')
                other._close()
            elif both and self._run is not None and other._run is not None and not is_another:
                raise TargetError(
                    f'{min(both)} is where another hook of this run saves: is it listed twice in custom_hooks (or '
                    f'callbacks)? If both are meant, set out_dir, or upload_to, of one of them'
                )
            elif both:
                raise TargetError(
                    f'{min(both)} is in use by another run of this process; set out_dir to a folder of another name, '
                    f'or upload_to to another URL. If that run was interrupted, call close() of its hook or callback'
                )

    @property
    def _is_calling(self) -> bool:
        """Whether this run has called the code that runs now, as one whose callback trains a probe.

        No trainer tells whether its training goes on or was interrupted. If it goes on, a method of the runner
        (MMEngine), or of the trainer that has this state (Trainer), is on the stack.
        """
        run = None if self._run is None else self._run()
        frame: FrameType | None = sys._getframe()
        while run is not None and frame is not None:
            owner = frame.f_locals.get('self')
            if owner is run or getattr(owner, '__dict__', {}).get('state') is run:
                return True
            frame = frame.f_back
        return False

    def register(self) -> None:
        """From now on, later runs may close it."""
        RunRegistration._open.add(self)

    def unregister(self) -> None:
        """It is closed."""
        self.is_closed = True
        RunRegistration._open.discard(self)

    def closed_error(self) -> TargetError:
        """Says that its folders are no longer its own, but perhaps those of the next run in them."""
        return TargetError(
            f'{min(self._places)}: this run was closed, by close() or because another run in this process started '
            f'saving there, so it can save no more; set out_dir of one of them to a folder of another name'
        )
