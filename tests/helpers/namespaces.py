"""Linux namespaces of other processes, and how a rank gets into them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_FS = 0x200
#: By the names of /proc/PID/ns.
KINDS = {'mnt': 0x20000, 'uts': 0x4000000, 'net': 0x40000000}
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter(pid: int, *kinds: str) -> None:
    """Make this thread, and all that it starts from now on, one of another process's namespaces.

    Args:
        kinds: Of :data:`KINDS`.

    Raises:
        OSError: The process is gone, or this one is not root.
    """
    fds = [os.open(Path('/proc', str(pid), 'ns', kind), os.O_RDONLY) for kind in kinds]
    try:
        _check(_LIBC.unshare(_CLONE_FS))  # a thread that shares these cannot change its mounts
        for kind, fd in zip(kinds, fds, strict=True):
            _check(_LIBC.setns(fd, KINDS[kind]))
    finally:
        for fd in fds:
            os.close(fd)


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
