"""Reports how much of a benchmark is done and how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence


class Progress:
    """Reports each finished run. The estimate is scaled by its accuracy so far.

    Args:
        planned_secs: Estimated duration of each run, in the order of the runs.
        tell: Called with one line of text.
    """

    def __init__(self, planned_secs: Sequence[float], tell: Callable[[str], None]) -> None:
        self._planned, self._tell = list(planned_secs), tell
        self._n_done = 0
        self._started = time.perf_counter()

    def done(self, name: str, seconds: float) -> None:
        """Record the end of a run."""
        self._n_done += 1
        factor = (time.perf_counter() - self._started) / sum(self._planned[: self._n_done])
        left = factor * sum(self._planned[self._n_done :])
        self._tell(f'[{self._n_done}/{len(self._planned)}] {name}: {seconds:.2f} s; {time_words(left)} left')


def time_words(seconds: float) -> str:
    """A duration in words."""
    return f'about {seconds / 60:.0f} min' if seconds >= 90 else f'about {seconds:.0f} s'


def tell_on_stderr(line: str) -> None:
    """Print a line to standard error; on a terminal it replaces the previous one."""
    if sys.stderr.isatty():
        print(f'\r\033[K{line}', end='', file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


def end_of_progress() -> None:
    """Begin a new line after the last one."""
    if sys.stderr.isatty():
        print(file=sys.stderr)
