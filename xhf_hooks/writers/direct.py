"""Writes past the page cache, for a save beside training: it takes little CPU time and evicts no training data.

The disk takes whole blocks, from memory with the same alignment: a snapshot is laid out like the files
(sources/host_memory.py). All else goes through the page cache: a partial block at either end, bytes that other ranks
sent, and everything if the file system refuses direct writes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

import numpy as np

from xhf_hooks.system.calls import fstatfs

#: A multiple of every disk's block size; also the page size.
_BLOCK_NBYTES = 4096
#: Below this size, the overhead of starting a write dominates.
_LEAST_NBYTES = 256 * 1024
#: ext4 and XFS, where it was measured. Others may accept it but still use the page cache (Btrfs), or make their server
#: flush after each write (NFS).
_FILE_SYSTEMS = {0xEF53, 0x58465342}
_REFUSALS = {errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP, errno.ENOSYS}


class DirectWrites:
    """Direct writes to one open file. Used by: one thread, which makes all writes to the descriptor.

    Args:
        fd: Open for writing; O_DIRECT is set only while :meth:`write` runs.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._works = hasattr(os, 'O_DIRECT') and _file_system(fd) in _FILE_SYSTEMS

    def write(self, data: memoryview, offset: int) -> tuple[int, int]:
        """Write the whole blocks of ``data`` if possible; returns the range of its bytes that were written.

        Raises:
            OSError: The write failed.
        """
        start, end = -offset % _BLOCK_NBYTES, data.nbytes - (offset + data.nbytes) % _BLOCK_NBYTES
        if not self._works or end - start < _LEAST_NBYTES:
            return 0, 0
        if (np.frombuffer(data, np.uint8).ctypes.data - offset) % _BLOCK_NBYTES:
            return 0, 0
        flags, done = fcntl.fcntl(self._fd, fcntl.F_GETFL), start
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            while done < end:
                done += os.pwrite(self._fd, data[done:end], offset + done)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            self._works = False
        finally:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
        return start, done


def _file_system(fd: int) -> int | None:
    """The type of the file system (statfs(2)); None if unknown."""
    found = (ctypes.c_ulong * 64)()  # larger than any struct statfs, which begins with the type
    return found[0] if fstatfs(fd, found) else None
