"""Jobs for several threads, results as they come."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Result = TypeVar('Result')
_MOST_WORKERS = 8  # by default: more than a disk can feed


def default_workers() -> int:
    """One thread for each core that this process may use, and one that waits for the disk; up to a limit."""
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0)) + 1)


def run_jobs(jobs: Iterable[Callable[[], Result]], workers: int) -> Iterator[Result]:
    """Results in the order in which they come; the first error ends it, when the jobs that run have ended."""
    executor = ThreadPoolExecutor(workers, thread_name_prefix='xhf-verify')
    waiting: set[Future[Result]] = set()
    try:
        for job in jobs:
            waiting.add(executor.submit(job))
            if len(waiting) >= 4 * workers:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    finally:
        executor.shutdown(cancel_futures=True)
