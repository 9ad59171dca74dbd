"""Writes past the page cache, for a save in the background: it takes little CPU time and evicts no training data.

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

from xhf_hooks.system.linux_calls import fstatfs

#: A multiple of every disk's block size; also the page size.
_BLOCK_NBYTES = 4096
#: Below this size, the overhead of starting a write dominates.
_LEAST_NBYTES = 256 * 1024
#: ext4 and XFS, where it was measured. Others may accept it but still use the page cache (Btrfs), or make their server
#: flush after each write (NFS).
_FILE_SYSTEMS = {0xEF53, 0x58465342}
_REFUSALS = {errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP, errno.ENOSYS}


def takes_direct_writes(fd: int) -> bool:
    """Whether the file system of an open file takes them well (statfs(2))."""
    found = (ctypes.c_ulong * 64)()  # larger than any struct statfs, which begins with the type
    return hasattr(os, 'O_DIRECT') and fstatfs(fd, found) and found[0] in _FILE_SYSTEMS


def write_directly(fd: int, data: memoryview, offset: int) -> range:
    """Write the whole blocks of ``data`` if possible; returns the range of its bytes that were written.

    Args:
        fd: Open for writing. One thread makes all writes to it, since O_DIRECT is set meanwhile.

    Raises:
        OSError: The write failed.
    """
    start = -offset % _BLOCK_NBYTES
    end = data.nbytes - (offset + data.nbytes) % _BLOCK_NBYTES
    if end - start < _LEAST_NBYTES or (np.frombuffer(data, np.uint8).ctypes.data - offset) % _BLOCK_NBYTES:
        return range(0)
    flags, done = fcntl.fcntl(fd, fcntl.F_GETFL), start
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < end:
            done += os.pwrite(fd, data[done:end], offset + done)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return range(start, done)
