"""Limits how fast one rank sends."""

from __future__ import annotations

import time
from collections.abc import Callable

_SLICE_SECS = 0.2


class Bandwidth:
    """Limits the average number of bytes per second by waiting. Used by: one thread.

    Args:
        nbytes_per_sec: The limit; None means no limit.
    """

    def __init__(self, nbytes_per_sec: int | None) -> None:
        self._rate = nbytes_per_sec
        self._free_at = time.monotonic()

    def take(self, nbytes: int, is_wanted: Callable[[], bool]) -> None:
        """Wait until this many bytes may be sent. Returns early if they are no longer wanted."""
        if self._rate is None:
            return
        while is_wanted() and (left := self._free_at - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE_SECS))
        self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
