"""Threads that send parts. They start early, since no thread can be started while the interpreter exits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Senders:
    """Run jobs in order; jobs must not raise. Objects may share the threads.

    Args:
        count: Number of threads.
        prepare: Called in each thread before its first job. It must not raise.
    """

    def __init__(self, count: int, prepare: Callable[[], None] = lambda: None) -> None:
        self._prepare = prepare
        self.count = count
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f'xhf-store-{number}', daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job for one of the threads."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads once the jobs are done."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        self._prepare()
        while (job := self._jobs.get()) is not None:
            job()
            del job  # frees what it holds
