"""Background tasks: work that runs beside training and is awaited when a run ends, however it ends.

:class:`.Uploads` and :class:`.OnSaved` get each committed save, work on it in a thread of their own, and log the
outcome there. The save in flight is one, too: the work of :class:`.SavesInBackground` is to save.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from logging import LoggerAdapter
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from xhf_hooks.collective import Collective
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Step
from xhf_hooks.system.threads import lower_priority

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL_SECS = 0.005


def wait_until(is_over: Callable[[], bool], secs: float = math.inf) -> bool:
    """Wait for something; returns False if time ran out. A signal handler that interrupts this may call it, too."""
    deadline = time.monotonic() + secs
    while not is_over() and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    return is_over()


#: The work on one save; as text, it names the save.
Job = TypeVar('Job')


class BackgroundTask(ABC, Generic[Job]):
    """Works on one save after another, in a thread of low priority that waits for work from :meth:`start` on.

    It is started before training, since a process that exits can start no thread. A task keeps neither the run
    nor its model in memory once a save is done: a run that is never closed can be forgotten.

    Attributes:
        name: Its name in the log.
        must_finish: Whether an end waits for it even when training was interrupted.
    """

    name: ClassVar[str]
    must_finish: ClassVar[bool]

    def __init__(self) -> None:
        self._current: Job | None = None
        self._waiting: deque[Job] = deque()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # at least once for each job; False: end
        self._must_end = threading.Event()
        # A daemon: at exit, ExitWait and not the interpreter waits for it, for a limited time
        self._thread = threading.Thread(target=self._run, name=f'xhf-{type(self).__name__}', daemon=True)

    def start(self) -> Self:
        """Start the thread; returns this task."""
        self._thread.start()
        return self

    @abstractmethod
    def work(self, job: Job) -> None:
        """Work on a save, in this thread. Raises nothing."""

    def handle_commit(self, target: CheckpointFolder, step: Step, collective: Collective) -> None:
        """Called after each commit, in the thread that saves, before the next save to that target begins.

        If it communicates, it starts with a vote, and all ranks have this task.
        """

    def add(self, job: Job) -> None:
        """Add a job after the waiting ones.

        Raises:
            RuntimeError: The task is closed: nobody would do the job, and a thread that waits for it would hang.
        """
        if self._must_end.is_set():
            raise RuntimeError(f'{self.name}: closed, and takes no more work')
        self._waiting.append(job)
        self._wake.put(True)

    def left(self) -> list[str]:
        """The saves on which work is left."""
        waiting = [*self._waiting]  # read first: a job that has left it since is the current one, or has ended
        return [str(job) for job in dict.fromkeys([self._current, *waiting]) if job is not None]

    def wait(self, secs: float = math.inf) -> bool:
        """Wait until nothing is left to do; returns False if time ran out. Needs no other rank.

        A signal handler may interrupt :meth:`add` or this and call this, so they take no locks.
        """
        self._wake.put(True)  # it may have interrupted add()
        return wait_until(lambda: not self.left(), secs)

    def close(self) -> None:
        """End the thread after what is left to do. Needs no other rank."""
        self._must_end.set()
        self._wake.put(False)

    def _run(self) -> None:
        lower_priority()
        while self._wake.get():
            try:
                self._current = self._waiting[0]
                self._waiting.remove(self._current)
            except (IndexError, ValueError):  # there is none, or another one was added in its place
                self._current = None
            if self._current is not None:
                self.work(self._current)
            self._current = None  # it may hold a model


class BackgroundTasks:
    """All background tasks of one run, in the order in which each commit reaches them and an end waits for them.

    It refers to neither model nor run, so that an end can wait for it when both are garbage. In a forked child, methods
    that wait do nothing.

    Args:
        most_secs: How long an end waits for all of them, from the first wait after a save.
    """

    def __init__(self, log: LoggerAdapter, most_secs: float) -> None:
        self.all: list[BackgroundTask] = []
        self._log = log
        self._most_secs = most_secs
        self._process = os.getpid()
        self._deadline: float | None = None
        self._given_up: set[str] = set()  # names of tasks that were logged as not finished

    def reset_wait_deadline(self) -> None:
        """A save begins: the next wait may take the whole time again."""
        self._deadline = None
        self._given_up.clear()

    def handle_commit(self, target: CheckpointFolder, step: Step, collective: Collective) -> None:
        """Pass a committed save to each task. Runs on: all ranks."""
        for task in self.all:
            task.handle_commit(target, step, collective)

    def wait(self, secs: float, *, for_all: bool = True) -> bool:
        """Returns whether nothing is left to wait for: the work has ended, or may not take longer. Needs no other rank.

        Args:
            secs: How long to wait for each task at most.
            for_all: Also wait for tasks that need not finish.
        """
        is_first = self._deadline is None
        if self._deadline is None:
            self._deadline = time.monotonic() + self._most_secs
        for task in [task for task in self.all if for_all or task.must_finish]:
            if is_first and task.left():
                self._log.info(f'waiting for {task.name}')
            left_secs = max(0.0, self._deadline - time.monotonic())
            if not task.wait(min(secs, left_secs)):
                if secs < left_secs:
                    return False
                if task.name not in self._given_up:
                    self._given_up.add(task.name)
                    left = '; '.join(task.left())
                    self._log.warning(f'{task.name}: not finished within exit_wait_secs={self._most_secs:g} s: {left}')
        return True

    def wait_before_exit(self) -> None:
        """Wait for the tasks that must finish: the process may be about to end, or goes on."""
        if os.getpid() != self._process:
            return
        try:
            self.wait(math.inf, for_all=False)
        except BaseException:  # Ctrl-C, too
            for task in self.all:
                if task.must_finish and (left := task.left()):
                    self._log.warning(f'{task.name}: no longer waited for: {"; ".join(left)}')
            raise

    def close(self) -> None:
        """Training is over: end tasks that need not finish, wait for the others, and drop work that is still left."""
        if os.getpid() != self._process:
            return
        for task in self.all:
            if not task.must_finish:
                task.close()
        self.wait_before_exit()
        for task in self.all:
            task.close()
