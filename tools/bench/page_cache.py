"""Measures how much of some files is in the page cache, whatever else the machine does."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path

#: cachestat(2), since Linux 6.5, the same number on all architectures. It visits only cached pages; mincore(2) visits
#: every page of a file, which for a save takes a quarter of a core at this interval.
_CACHESTAT = 451
_INTERVAL_SECS = 0.1


class _Range(ctypes.Structure):
    _fields_ = [('start', ctypes.c_uint64), ('nbytes', ctypes.c_uint64)]


class _Found(ctypes.Structure):
    _fields_ = [
        ('cached', ctypes.c_uint64),
        ('dirty', ctypes.c_uint64),
        ('writeback', ctypes.c_uint64),
        ('evicted', ctypes.c_uint64),
        ('recently_evicted', ctypes.c_uint64),
    ]


def cached_nbytes(files: Iterable[Path]) -> int | None:
    """Cached bytes of all files together; missing files count as 0. None if the system cannot tell."""
    libc, total = ctypes.CDLL(None, use_errno=True), 0
    for file in files:
        try:
            opened = file.open('rb')
        except FileNotFoundError:
            continue
        with opened:
            found, whole = _Found(), _Range()
            number = ctypes.c_uint(opened.fileno())
            if libc.syscall(ctypes.c_long(_CACHESTAT), number, ctypes.byref(whole), ctypes.byref(found), 0):
                error = ctypes.get_errno()
                if error in (errno.ENOSYS, errno.EPERM):  # an older kernel, or a container that forbids it
                    return None
                raise OSError(error, os.strerror(error), str(file))
        total += found.cached * mmap.PAGESIZE
    return total


class PageCacheSampler:
    """The peak of cached bytes of the files below a folder while the block runs.

    Attributes:
        peak_nbytes: The peak; None if the system cannot tell.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.peak_nbytes: int | None = 0

    def __enter__(self) -> PageCacheSampler:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_SECS):
            self._sample()

    def _sample(self) -> None:
        nbytes = cached_nbytes(path for path in list(self._folder.rglob('*')) if path.is_file())
        self.peak_nbytes = None if nbytes is None or self.peak_nbytes is None else max(self.peak_nbytes, nbytes)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
