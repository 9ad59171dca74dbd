"""What is done with one committed save after another, beside training: uploads, and the command of ``on_saved``."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from logging import LoggerAdapter
from typing import ClassVar, Generic, TypeVar

from xhf_hooks.collective import Collective
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.kept_save import KeptSave
from xhf_hooks.planning.types import Step
from xhf_hooks.system.threads import lower_priority

#: How long the end of the run waits for the thread: longer than a command may take after SIGTERM.
_END_SECS = 8.0


class RunHasEnded(Exception):
    """The run has ended before the work."""


@dataclass(eq=False)
class Job:
    """What is done with one save.

    Attributes:
        name: Name of its folder, such as ``hf_model``.
        kept: Keeps its files until the work has ended; None on other ranks than rank 0.
    """

    name: str
    step: Step
    kept: KeptSave | None = field(repr=False)

    def __str__(self) -> str:
        return f'{self.name}, {self.step.label}'

    def end(self) -> None:
        """Release the files. Does nothing the second time."""
        if self.kept is not None:
            self.kept.release()


AnyJob = TypeVar('AnyJob', bound=Job)


class EachSave(Generic[AnyJob]):
    """Works on one save after another, in a thread of low priority. Errors are logged and never stop training.

    Work that has begun goes on when a newer save arrives; of the saves of one name that wait, the newest is next.

    Attributes:
        failed: Saves on which the work was not done.
    """

    #: For the log, and before the name of a save.
    name: ClassVar[str]
    what: ClassVar[str]
    #: Whether it is waited for even when training was interrupted.
    must_finish: ClassVar[bool]

    def __init__(self, log: LoggerAdapter) -> None:
        self.failed: list[str] = []
        self._log, self._process = log, os.getpid()
        self._jobs: list[AnyJob] = []  # the first is being worked on
        self._changed = threading.Condition()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f'xhf-{self.name}', daemon=True)
        self._thread.start()

    def work(self, job: AnyJob) -> None:
        """What is done with a save, in this thread. Calls :meth:`pause` often."""
        raise NotImplementedError

    def committed(self, target: CheckpointFolder, step: Step, collective: Collective) -> None:
        """Called after each commit, in the thread that saves, before the next save to that target begins."""
        raise NotImplementedError

    def wait(self, secs: float) -> bool:
        """Wait until nothing is left to do; returns False if time ran out. Needs no other rank."""
        if os.getpid() != self._process:
            return True
        with self._changed:
            return self._changed.wait_for(self._is_idle, min(secs, threading.TIMEOUT_MAX))

    def _is_idle(self) -> bool:
        return not self._jobs

    def left(self) -> list[str]:
        """The saves on which work is left."""
        return [str(job) for job in [*self._jobs]]

    def close(self) -> None:
        """Drop what is left. Needs no other rank. Does nothing in a forked child."""
        if os.getpid() != self._process or self._has_ended.is_set():
            return
        with self._changed:
            self._has_ended.set()
            self._changed.notify_all()
        self._thread.join(_END_SECS)
        for job in [*self._jobs]:
            self._drop(job, 'it did not stop when training ended')  # a store does not answer
        self._closed()

    def _closed(self) -> None:
        """The last part of :meth:`close`."""

    def keep(self, target: CheckpointFolder, step: Step) -> KeptSave | None:
        """Keep the files of the save that was just committed, or log why they cannot be kept."""
        try:
            return target.keep()
        except Exception as error:  # the save itself is good
            self._log.error(f'{self.what} {target.name}, {step.label} was cancelled: {error}')
            return None

    def add(self, job: AnyJob, *, replaces: bool = True) -> None:
        """Queue a save, in place of one of that name that waits."""
        with self._changed:
            for old in [old for old in self._jobs[1:] if replaces and old.name == job.name]:
                self._jobs.remove(old)
                self._drop(old, 'there is a newer save')
            if self._has_ended.is_set():
                self._drop(job, 'training has ended')
                return
            self._jobs.append(job)
            self._changed.notify_all()

    def pause(self, secs: float = 0.0) -> None:
        """Wait.

        Raises:
            RunHasEnded: It has.
        """
        if self._has_ended.wait(secs):
            raise RunHasEnded

    def _run(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._has_ended.is_set())
                if not self._jobs:
                    return
                job = self._jobs[0]
            try:
                self.pause()
                self.work(job)
            except RunHasEnded:
                self._drop(job, 'training has ended')
            except Exception as error:
                self.failed.append(str(job))
                self._log.error(f'{self.what} {job} failed; training goes on: {type(error).__name__}: {error}')
            job.end()
            with self._changed:
                self._jobs.remove(job)
                self._changed.notify_all()

    def _drop(self, job: Job, why: str) -> None:
        self.failed.append(str(job))
        self._log.warning(f'{self.what} {job} was cancelled: {why}')
        job.end()
