"""Bytes of a file without copying them, and without SIGBUS when the disk fails or the file shrinks."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

_POPULATE_READ = 22  # MADV_POPULATE_READ of linux/mman.h, Linux 5.14 and newer; Python has no name for it
_EHWPOISON = 133  # asm-generic/errno.h; Python has no name for it, either
_NOT_THERE = {errno.EFAULT, _EHWPOISON}  # where touching the page would end the process


class MappedFile:
    """A file in memory as far as it is looked at. Safe to use from several threads.

    Each range is populated before it is handed out: madvise(2) says so when it cannot be read, where a bare access
    would end the process. A program that must survive anything, such as a training run, reads instead.

    Raises:
        OSError: It cannot be mapped so; read it with :func:`os.preadv`.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            # Private and writable, since torch takes no buffer that is not; nothing is written
            self._map = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
        except ValueError as error:  # empty, or shorter than it was
            raise OSError(errno.EINVAL, str(error)) from None
        self._nbytes = nbytes
        try:
            self._map.madvise(_POPULATE_READ, 0, min(nbytes, mmap.PAGESIZE))
        except OSError as error:
            if error.errno not in _NOT_THERE:
                self._map.close()
                raise

    def view(self, start: int, end: int) -> memoryview:
        """The bytes from ``start`` to ``end``; release the view before :meth:`close`.

        Raises:
            OSError: They cannot be read.
        """
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            if end > start:
                self._map.madvise(_POPULATE_READ, first, end - first)
        except OSError as error:
            if error.errno in _NOT_THERE:
                raise OSError(errno.EIO, os.strerror(errno.EIO)) from None
            raise
        return memoryview(self._map)[start:end]

    def forget(self, start: int, end: int) -> None:
        """Give the pages of a range back; looking at them again only maps them anew."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def close(self) -> None:
        """Unmap it; if an error holds on to a view of it, when that is gone."""
        with contextlib.suppress(BufferError):
            self._map.close()


def map_or_none(fd: int, nbytes: int) -> MappedFile | None:
    """The file, mapped; None where that is not possible: on an older Linux, elsewhere, an empty file."""
    try:
        return MappedFile(fd, nbytes)
    except OSError:
        return None
