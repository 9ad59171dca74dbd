"""Lets a rank enter the Linux namespaces of other processes."""

import ctypes
import os
from pathlib import Path

_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter(pid: int, *kinds: str) -> None:
    """Join namespaces of another process, for this thread and everything that it starts later.

    Args:
        kinds: Names of files in /proc/PID/ns, such as ``mnt``.

    Raises:
        OSError: The process is gone, or this one is not root.
    """
    fds = [os.open(Path('/proc', str(pid), 'ns', kind), os.O_RDONLY) for kind in kinds]
    try:
        _check(_LIBC.unshare(_CLONE_FS))  # a thread that shares its file-system state cannot change its mounts
        for fd in fds:
            _check(_LIBC.setns(fd, 0))
    finally:
        for fd in fds:
            os.close(fd)


def leave_mounts() -> None:
    """Give this process a separate mount namespace."""
    _check(_LIBC.unshare(_CLONE_NEWNS))


def _check(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
