"""Memory-mapped files without SIGBUS when the disk fails or the file is truncated."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os

_POPULATE_READ = 22  # MADV_POPULATE_READ of linux/mman.h, Linux 5.14 and newer; Python has no name for it
_EHWPOISON = 133  # asm-generic/errno.h; Python has no name for it, either
_NOT_THERE = {errno.EFAULT, _EHWPOISON}  # access would raise SIGBUS
_AHEAD_NBYTES = 32 << 20  # readahead per file

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap.madvise holds the GIL while the disk works
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedFile:
    """A mapped file. Thread-safe.

    Each range is populated with madvise(2) before it is returned, which reports unreadable pages as an error. A page
    that becomes unreadable later still raises SIGBUS, so training runs use :func:`os.preadv` instead.

    Raises:
        OSError: The file cannot be mapped; use :func:`os.preadv`.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            # Private and writable, since torch requires a writable buffer; nothing is written
            self._map = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
        except ValueError as error:  # empty or truncated
            raise OSError(errno.EINVAL, str(error)) from None
        self._fd = fd
        self._first = ctypes.c_char.from_buffer(self._map)
        try:
            self._populate(0, min(nbytes, mmap.PAGESIZE))
        except OSError as error:
            if error.errno not in _NOT_THERE:
                self.close()
                raise

    def view(self, start: int, end: int) -> memoryview:
        """The bytes from ``start`` to ``end``; release the view before :meth:`close`.

        Raises:
            OSError: They cannot be read.
        """
        if end > start:
            os.posix_fadvise(self._fd, end + _AHEAD_NBYTES, end - start, os.POSIX_FADV_WILLNEED)
            try:
                self._populate(start, end)
            except OSError as error:
                if error.errno in _NOT_THERE:
                    raise OSError(errno.EIO, os.strerror(errno.EIO)) from None
                raise
        return memoryview(self._map)[start:end]

    def forget(self, start: int, end: int) -> None:
        """Release the pages of a range; a later access maps them again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def close(self) -> None:
        """Unmap the file, or leave that to garbage collection if a view still exists."""
        self._first = None
        with contextlib.suppress(BufferError):
            self._map.close()

    def _populate(self, start: int, end: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if _madvise(ctypes.addressof(self._first) + first, end - first, _POPULATE_READ):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def map_or_none(fd: int, nbytes: int) -> MappedFile | None:
    """Map the file; None if that is not possible (Linux before 5.14, empty files)."""
    try:
        return MappedFile(fd, nbytes)
    except OSError:
        return None
