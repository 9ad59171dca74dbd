"""Measures the time and memory of a call in a separate process with limits."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Limits that protect the machine; far beyond what a test accepts.
_MOST_NBYTES, _MOST_SECS = 8 * 10**9, 120


@dataclass(frozen=True)
class Measured:
    """The outcome of a call.

    Attributes:
        result: The return value, or the text of the exception.
        raised: Name of the exception, ``'killed'`` when the process died; None if it returned.
        cpu_secs: CPU time, which does not depend on how busy the machine is.
        nbytes: Peak memory, minus that before the call.
    """

    result: Any
    raised: str | None
    cpu_secs: float
    nbytes: int

    def __str__(self) -> str:
        return (
            f'{self.cpu_secs:.1f} s, {self.nbytes / 1e6:.0f} MB: {self.raised or "returned"}: {str(self.result)[:200]}'
        )


def measured(function: Callable[..., Any], *args: Any) -> Measured:
    """Call the function in a fork of this process."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(here)
        _call(there, function, args)
    os.close(there)
    with os.fdopen(here, 'rb') as pipe:
        answer = pipe.read()
    _, status, usage = os.wait4(child, 0)
    result, raised, before = pickle.loads(answer) if answer else (f'wait status {status}', 'killed', 0)
    return Measured(result, raised, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 - before)


def _call(pipe: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        before = _resident_nbytes()
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_NBYTES, _MOST_NBYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECS, _MOST_SECS))
        try:
            answer = (function(*args), None, before)
        except BaseException as error:
            answer = (str(error), type(error).__name__, before)
        with os.fdopen(pipe, 'wb') as file:
            file.write(pickle.dumps(answer))
    finally:
        os._exit(0)  # skips the exit handlers of the test run


def _resident_nbytes() -> int:
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
