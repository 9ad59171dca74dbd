"""Writes from memory to the disk without the page cache: for a save that goes on beside training.

It costs the processor little, and drives no file of the training's out of the page cache. The disk takes whole blocks
from memory that is aligned as they are. A snapshot is laid out as the files are (concurrency/host_snapshot.py); what
other ranks have sent is copied first. What is less than a block at either end goes through the page cache, and so does
everything where the file system refuses.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

import numpy as np

from xhf_hooks.files.linux_calls import fstatfs

#: A multiple of the blocks of every disk; the size of a page, too.
_BLOCK_NBYTES = 4096
#: In less than this, the disk spends its time on the beginning of writes.
_LEAST_NBYTES = 256 * 1024
#: ext4 and XFS, where it was measured. Others may accept it and write through the page cache all the same (Btrfs), or
#: ask their server to flush after each write (NFS).
_FILE_SYSTEMS = {0xEF53, 0x58465342}
_REFUSALS = {errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP, errno.ENOSYS}


class AlignedBuffer:
    """Where bytes are put whose memory is not aligned as their file. Used by: one thread, for all of its files.

    Args:
        nbytes: At most, at once.
    """

    def __init__(self, nbytes: int) -> None:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # none is there before it is used
        self._memory = np.frombuffer(pages, np.uint8)

    def copy_of(self, data: memoryview) -> memoryview:
        """The same bytes from the beginning of a page on, until the next call."""
        room = self._memory[: data.nbytes]
        room[:] = np.frombuffer(data, np.uint8)
        return room.data


class DirectWrites:
    """Of one open file. Used by: one thread, which makes all writes to the descriptor.

    Args:
        fd: Open for writing; through the page cache, but while :meth:`write` runs.
    """

    def __init__(self, fd: int, buffer: AlignedBuffer) -> None:
        self._fd, self._buffer = fd, buffer
        self._works = hasattr(os, 'O_DIRECT') and _file_system(fd) in _FILE_SYSTEMS

    def within(self, offset: int, nbytes: int) -> tuple[int, int]:
        """From where to where bytes can be written so that belong at ``offset`` of the file; empty: not at all."""
        start = -offset % _BLOCK_NBYTES
        end = nbytes - (offset + nbytes) % _BLOCK_NBYTES
        return (start, end) if self._works and end - start >= _LEAST_NBYTES else (0, 0)

    def write(self, data: memoryview, offset: int) -> int:
        """Write what lies :meth:`within`; less of it, from its beginning on, where the file system refuses.

        Returns:
            How many bytes.

        Raises:
            OSError: The disk could not take them.
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
    """Which kind it is (statfs(2)); None where the system does not tell."""
    found = (ctypes.c_ulong * 64)()  # no struct statfs is larger; it begins with the kind
    return found[0] if fstatfs(fd, found) else None
