"""Work on one committed save after another, from pinned files, which stay until the work is done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import LoggerAdapter
from pathlib import Path

from xhf_hooks.errors import XhfError
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.pinned_save import PinnedSave
from xhf_hooks.planning.types import Step
from xhf_hooks.runs.ends.background_task import BackgroundTask

#: How long the end of the run waits for the thread: longer than a command may take to end after SIGTERM.
_END_SECS = 8.0


class RunHasEnded(Exception):
    """The run has ended before the work."""


@dataclass(eq=False)
class SaveJob:
    """The work on one save.

    Attributes:
        name: Name of the folder of the save, such as ``hf_model``.
        folder: Holds its files until they are unpinned.
        unpin: Called when the work has ended, or will not begin; perhaps twice.
        number: Number of the save, the same on all ranks; later saves have larger numbers.
        queued_at: When this was made, by ``time.monotonic()``.
    """

    name: str
    step: Step
    folder: Path
    unpin: Callable[[], object] = field(repr=False)
    number: int = 0
    queued_at: float = field(default_factory=time.monotonic, repr=False)

    def __str__(self) -> str:
        return f'{self.name}, {self.step.label}'


class EachSave(BackgroundTask[SaveJob]):
    """Works on committed saves. Errors are logged and never stop training.

    Work that has begun goes on when a newer save arrives; of the saves of one name that wait, the newest is next.

    Args:
        name: Its name in the log.
        what: Before the name of a save, in the log.

    Attributes:
        failed: Saves on which the work was not done.
    """

    def __init__(self, name: str, what: str, log: LoggerAdapter, *, must_finish: bool) -> None:
        self.failed: list[str] = []
        self._what, self._log = what, log
        super().__init__(name, self.work, must_finish=must_finish)

    def process(self, job: SaveJob) -> None:
        """Do the work on a save. Must call :meth:`pause` often."""
        raise NotImplementedError

    def work(self, job: SaveJob) -> None:
        """Work on a save unless the run has ended, and log what became of it."""
        try:
            self.pause()
            self.process(job)
        except RunHasEnded:
            self._drop(job, 'training has ended')
        except Exception as error:  # of any type: this thread goes on with the next save
            self.failed.append(str(job))
            self._log.error(f'{self._what} {job} failed; training goes on: {type(error).__name__}: {error}')
        job.unpin()

    def pin(self, target: CheckpointFolder, step: Step) -> PinnedSave | None:
        """Pin the save that was just committed, or log why it cannot be pinned."""
        try:
            return target.pin()
        except (OSError, XhfError) as error:  # the save itself is good
            self._log.error(f'{self._what} {target.name}, {step.label} was cancelled: {error}')
            return None

    def add(self, job: SaveJob, *, replaces: bool = True) -> None:
        """Work on this save next; with ``replaces``, in place of a waiting save of the same name."""
        for old in [old for old in [*self._waiting] if replaces and old.name == job.name]:
            with contextlib.suppress(ValueError):  # its work has just begun
                self._waiting.remove(old)
                self._drop(old, 'there is a newer save')
        if self._must_end.is_set():
            self._drop(job, 'training has ended')
        else:
            super().add(job)

    def pause(self, secs: float = 0.0) -> None:
        """Wait.

        Raises:
            RunHasEnded: The run has ended.
        """
        if self._must_end.wait(secs):
            raise RunHasEnded

    def close(self) -> None:
        """Drop the work that is left, log that, and end the thread. Does nothing the second time."""
        if self._must_end.is_set():
            return
        super().close()
        self._thread.join(_END_SECS)
        if self._current is not None:
            self._drop(self._current, 'it did not stop when training ended')  # a store does not answer

    def _drop(self, job: SaveJob, why: str) -> None:
        self.failed.append(str(job))
        self._log.warning(f'{self._what} {job} was cancelled: {why}')
        job.unpin()
