"""How much of some files is in the page cache: mincore(2), file by file, whatever else the machine does."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path

_INTERVAL_SECS = 0.1


def cached_nbytes(files: Iterable[Path]) -> int:
    """Of all of them together; those that are gone meanwhile count as nothing."""
    return sum(map(_cached_nbytes_of, files))


def _cached_nbytes_of(file: Path) -> int:
    try:
        with file.open('r+b') as opened:  # mincore tells only those who may write
            nbytes = os.fstat(opened.fileno()).st_size
            if nbytes == 0:
                return 0
            mapped = mmap.mmap(opened.fileno(), nbytes)
    except FileNotFoundError:
        return 0
    pages = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
    start = ctypes.c_char.from_buffer(mapped)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(nbytes), pages)
    error = ctypes.get_errno()
    del start  # or the mapping could not be closed
    mapped.close()
    if failed:
        raise OSError(error, os.strerror(error), str(file))
    return (len(pages) - pages.raw.count(b'\0')) * mmap.PAGESIZE


class PageCacheSampler:
    """The most that files below a folder have in the page cache while the block runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.peak_nbytes = 0

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
        self.peak_nbytes = max(self.peak_nbytes, nbytes)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
