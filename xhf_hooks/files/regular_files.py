"""Opens untrusted paths if they are regular files: reading a FIFO, a socket or a device may block."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = (
    (stat.S_ISFIFO, 'a FIFO'),
    (stat.S_ISSOCK, 'a socket'),
    (stat.S_ISCHR, 'a device'),
    (stat.S_ISBLK, 'a device'),
)


def special_kind(mode: int) -> str | None:
    """The kind of a special file, such as ``'a FIFO'``; None for files and folders.

    Args:
        mode: ``st_mode``, with links followed.
    """
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), None)


def open_regular_fd(path: str | Path) -> int:
    """``os.open`` for reading, but regular files only. Never blocks; the caller closes the descriptor.

    Raises:
        OSError: It is not a regular file, is missing, or cannot be read.
    """
    _require_regular(os.stat(path).st_mode, path)  # before opening, which alone may affect a device
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_regular(os.fstat(fd).st_mode, path)  # again: the name may have been replaced
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_regular(path: str | Path) -> BinaryIO:
    """``open(path, 'rb')``, but regular files only.

    Raises:
        OSError: See :func:`open_regular_fd`.
    """
    return os.fdopen(open_regular_fd(path), 'rb')


def read_regular_text(path: str | Path) -> str:
    """The text of a regular file in UTF-8.

    Raises:
        OSError: See :func:`open_regular_fd`.
        UnicodeDecodeError: It is not UTF-8.
    """
    with os.fdopen(open_regular_fd(path), encoding='utf-8') as file:
        return file.read()


def _require_regular(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f'{special_kind(mode) or "something else"}, not a regular file', str(path))
