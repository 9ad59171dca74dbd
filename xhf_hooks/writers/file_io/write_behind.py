"""Starts writing data to the disk at once, and drops it from the page cache when it is there.

By default, a save fills the page cache, evicts the training data, and is written back only at the very end. With early
write-back the disk works from the first bytes on, and the whole save reuses the same few pages. Measured for 1.66 GB,
until flushed: 0.6 s; O_DIRECT 0.9 s; the page cache and fsync 0.8 to 3.5 s, depending on how costly fresh pages are at
that moment. With two ranks (medians of five runs): windows of 32 MB, two underway, 0.54 to 0.55 s; of 8 MB, four
underway, 0.63 to 0.78 s.
"""

from __future__ import annotations

import os
import threading
from collections import deque

from xhf_hooks.files.linux_calls import sync_file_range

_WINDOW_NBYTES = 32 * 2**20
#: Windows on their way to the disk before a writer waits for the oldest.
_DEPTH = 2

# sync_file_range(2): WAIT_BEFORE, WRITE, WAIT_AFTER
_START = 2
_START_AND_WAIT = 1 | 2 | 4


class WriteBehind:
    """Tracks the writes to one file. Used by: all threads that write to it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._works = True
        self._lock = threading.Lock()
        self._filling: tuple[int, int, int] | None = None  # start, end, bytes written in between
        self._underway: deque[tuple[int, int]] = deque()

    def wrote(self, offset: int, nbytes: int) -> None:
        """Record that bytes were written to the page cache.

        Raises:
            OSError: Earlier bytes could not be written to the disk.
        """
        if not self._works:
            return
        oldest = None
        with self._lock:
            start, end, count = self._filling or (offset, offset, 0)
            window = (min(start, offset), max(end, offset + nbytes), count + nbytes)
            if window[2] < _WINDOW_NBYTES:
                self._filling = window
                return
            self._filling = None
            self._underway.append(window[:2])
            if len(self._underway) > _DEPTH:
                oldest = self._underway.popleft()
        self._sync(window[0], window[1], _START)
        if oldest is not None:
            self._sync(*oldest, _START_AND_WAIT)
            os.posix_fadvise(self._fd, oldest[0], oldest[1] - oldest[0], os.POSIX_FADV_DONTNEED)

    def _sync(self, start: int, end: int, how: int) -> None:
        # If the file system does not support it, everything is left to fsync
        self._works = self._works and sync_file_range(self._fd, start, end - start, how)
