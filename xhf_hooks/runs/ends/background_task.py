"""Work that goes on beside training, one job after another in a thread: the save in flight, uploads, ``on_saved``."""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from xhf_hooks.system.threads import lower_priority, wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

#: The work on one save; as text, it names the save.
Job = TypeVar('Job')


class BackgroundTask(Generic[Job]):
    """Works on one save after another, in a thread of low priority that waits for work from :meth:`start` on.

    It is started before training, since a process that exits can start no thread. A task keeps neither the run
    nor its model in memory once a save is done: a run that is never closed can be forgotten.

    Args:
        name: Its name in the log.
        work: Works on a save, in this task's thread. Raises nothing.
        must_finish: Whether an end waits for it even when training was interrupted.
    """

    def __init__(self, name: str, work: Callable[[Job], object], *, must_finish: bool) -> None:
        self.name, self.must_finish = name, must_finish
        self._work = work
        self._current: Job | None = None
        self._waiting: deque[Job] = deque()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # at least once for each job; False: end
        self._must_end = threading.Event()
        # A daemon: at exit, RunEnd and not the interpreter waits for it, for a limited time
        self._thread = threading.Thread(target=self._run, name=f'xhf-{name.replace(" ", "-")}', daemon=True)

    def start(self) -> Self:
        """Start the thread; returns this task."""
        self._thread.start()
        return self

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
                self._work(self._current)
            self._current = None  # it may hold a model
