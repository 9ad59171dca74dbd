"""The runs of this process that are not closed yet, so that a new run closes those that were interrupted."""

from __future__ import annotations

import inspect
import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import ClassVar

from xhf_hooks.errors import TargetError


class RunRegistration:
    """One run, from :meth:`register` until it is closed or garbage. Used by: the thread that trains.

    Hooks and callbacks are not notified when an exception or Ctrl-C interrupts training. So the next run in the same
    thread (a notebook, a sweep, Trainer's auto_find_batch_size) closes the interrupted one. A run whose callback starts
    the next run (it trains a probe, for example) is not interrupted: it stays open.

    Args:
        run: Identifies the run, such as MMEngine's runner. A later run closes this one if it was interrupted; a second
            hook of the same run does not.
        places: The folders of its saves: no two runs have one in common.

    Attributes:
        is_closed: Whether :meth:`unregister` was called.
    """

    #: Of the process, since the locks of folders belong to it and frontends know nothing of each other.
    _open: ClassVar[weakref.WeakSet[RunRegistration]] = weakref.WeakSet()

    def __init__(self, run: object | None, places: set[str]) -> None:
        self._run = None if run is None else weakref.ref(run)
        self._places = places
        self._close: Callable[[], None] = lambda: None
        self._thread = threading.current_thread()
        self._process = os.getpid()
        self.is_closed = False

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, whose parent goes on with the run."""
        return self._process == os.getpid()

    def close_earlier(self, log: logging.LoggerAdapter) -> None:
        """Close earlier runs that were interrupted. A thread trains one run at a time, except for nested runs.

        Raises:
            TargetError: A run that may still be going on has one of the places of this run.
        """
        for other in [*RunRegistration._open]:
            if not other.is_of_this_process:
                continue
            both = self._places & other._places
            is_another = self._run is not None and other._run is not None and other._run() is not self._run()
            is_over = bool(both) or other._thread is self._thread or not other._thread.is_alive()
            if is_another and is_over and not other._has_called_this_code:
                log.warning(f'{min(other._places)}: an earlier run was interrupted and is now closed')
                other._close()
            elif both and self._run is not None and other._run is not None and not is_another:
                raise TargetError(
                    f'another hook of this run already saves to {min(both)}: is it listed twice in custom_hooks (or '
                    f'callbacks)? If both are meant, set out_dir of one of them'
                )
            elif both:
                raise TargetError(
                    f'{min(both)} is in use by another run of this process; set out_dir to a folder of another name. '
                    f'If that run was interrupted, call close() of its hook or callback'
                )

    @property
    def _has_called_this_code(self) -> bool:
        """Whether the next run is nested in this one: a callback of this run has begun it.

        The stack is the only place that knows: no trainer records whether its training goes on or was interrupted, and
        the callback that begins the next run is the user's, so ours are not called around it. If training goes on, a
        method of the runner (MMEngine), or of the trainer that has this state (Trainer), is on the stack.
        """
        run = None if self._run is None else self._run()
        if run is None:
            return False
        owners = (frame.f_locals.get('self') for frame, _ in traceback.walk_stack(inspect.currentframe()))
        return any(owner is run or getattr(owner, '__dict__', {}).get('state') is run for owner in owners)

    def register(self, close: Callable[[], None]) -> None:
        """From now on, a later run may close this one, by calling ``close``."""
        self._close = close
        RunRegistration._open.add(self)

    def unregister(self) -> None:
        """Note that the run is closed."""
        self.is_closed = True
        RunRegistration._open.discard(self)

    def closed_error(self) -> TargetError:
        """The error of a save after the run was closed: its folders may belong to the next run by now."""
        return TargetError(
            f'{min(self._places)}: this run was closed, by close() or because another run in this process started '
            f'saving there, so it can save no more; set out_dir of one of them to a folder of another name'
        )
