"""Writes from memory to the disk without the page cache, for a save that runs beside training.

This takes little CPU time and evicts no training data from the page cache. The disk takes whole blocks, from memory
with the same alignment. A snapshot is laid out like the files (host_memory.py); bytes that other ranks
sent are copied first. A partial block at either end goes through the page cache, and so does everything if the file
system refuses direct writes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

import numpy as np

from xhf_hooks.system import fstatfs

#: A multiple of every disk's block size; also the page size.
_BLOCK_NBYTES = 4096
#: Below this size, the overhead of starting a write dominates.
_LEAST_NBYTES = 256 * 1024
#: ext4 and XFS, where it was measured. Others may accept it but still use the page cache (Btrfs), or make their server
#: flush after each write (NFS).
_FILE_SYSTEMS = {0xEF53, 0x58465342}
_REFUSALS = {errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP, errno.ENOSYS}


class AlignedBuffer:
    """Holds bytes whose memory is not aligned like their file. Used by: one thread, for all of its files.

    Args:
        nbytes: Size: the most bytes to hold at once.
    """

    def __init__(self, nbytes: int) -> None:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # pages are allocated on first use
        self._memory = np.frombuffer(pages, np.uint8)

    def copy_of(self, data: memoryview) -> memoryview:
        """A page-aligned copy of the bytes, valid until the next call."""
        room = self._memory[: data.nbytes]
        room[:] = np.frombuffer(data, np.uint8)
        return room.data


class DirectWrites:
    """Direct writes to one open file. Used by: one thread, which makes all writes to the descriptor.

    Args:
        fd: Open for writing; O_DIRECT is set only while :meth:`write` runs.
    """

    def __init__(self, fd: int, buffer: AlignedBuffer) -> None:
        self._fd, self._buffer = fd, buffer
        self._works = hasattr(os, 'O_DIRECT') and _file_system(fd) in _FILE_SYSTEMS

    def within(self, offset: int, nbytes: int) -> tuple[int, int]:
        """The range of ``nbytes`` for ``offset`` of the file that can be written directly; may be empty."""
        start = -offset % _BLOCK_NBYTES
        end = nbytes - (offset + nbytes) % _BLOCK_NBYTES
        return (start, end) if self._works and end - start >= _LEAST_NBYTES else (0, 0)

    def write(self, data: memoryview, offset: int) -> int:
        """Write data that lies :meth:`within`; stops early if the file system refuses direct writes.

        Returns:
            Number of bytes written, from the start of the data.

        Raises:
            OSError: The write failed.
        """
        if np.frombuffer(data, np.uint8).ctypes.data % _BLOCK_NBYTES:
            data = self._buffer.copy_of(data)
        flags, done = fcntl.fcntl(self._fd, fcntl.F_GETFL), 0
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            while done < data.nbytes:
                done += os.pwrite(self._fd, data[done:], offset + done)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._works = False
        finally:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
        return done


def _file_system(fd: int) -> int | None:
    """The type of the file system (statfs(2)); None if unknown."""
    found = (ctypes.c_ulong * 64)()  # larger than any struct statfs, which begins with the type
    return found[0] if fstatfs(fd, found) else None
