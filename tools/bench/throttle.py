"""Limits writes to the speed that a share gives one client."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Throttle:
    """Limits a rate and counts bytes.

    Args:
        buffer_nbytes: What a buffer behind it holds, such as that of a socket: a process that was late may catch up
            with that much.

    Attributes:
        nbytes: Bytes written so far.
    """

    def __init__(self, nbytes_per_sec: float, buffer_nbytes: int = 0) -> None:
        self._rate, self._buffered_secs = nbytes_per_sec, buffer_nbytes / nbytes_per_sec
        self._lock = threading.Lock()
        self._due = 0.0
        self.nbytes = 0

    def wrote(self, nbytes: int) -> None:
        """Wait as long as these bytes would have taken, after those of other threads."""
        with self._lock:
            self.nbytes += nbytes
            self._due = max(self._due, time.perf_counter() - self._buffered_secs) + nbytes / self._rate
            wait = self._due - time.perf_counter()
        time.sleep(max(0.0, wait))


@contextmanager
def limited_writes(nbytes_per_sec: float) -> Iterator[Throttle]:
    """Throttle this process's positional writes, which all weights use. Idle time does not allow a later burst."""
    throttle = Throttle(nbytes_per_sec)
    originals = {name: getattr(os, name) for name in ('pwrite', 'pwritev')}

    def limited(name: str) -> Any:
        def write_and_wait(*args: Any) -> int:
            nbytes = originals[name](*args)
            throttle.wrote(nbytes)
            return nbytes

        return write_and_wait

    for name in originals:
        setattr(os, name, limited(name))
    try:
        yield throttle
    finally:
        for name, original in originals.items():
            setattr(os, name, original)
