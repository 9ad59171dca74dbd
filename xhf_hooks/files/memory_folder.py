"""A folder in memory for small files, for libraries that write folders."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = 'xhf_assets-'
#: A file system in memory, on Linux.
_MEMORY = Path('/dev/shm')


class MemoryFolder:
    """Empty when it is made; removed by :meth:`close`, or after a kill by the next that is made on this host.

    It is in ``/dev/shm``; where that is not there, or not for us to write, in the system's folder for temporary files.
    """

    def __init__(self) -> None:
        parent = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        for left in parent.glob(f'{_PREFIX}*'):
            _remove_unless_held(left)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._fd = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove it; does nothing the second time."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def _remove_unless_held(folder: Path) -> None:
    """The kernel drops the lock of a process that has ended."""
    with contextlib.suppress(OSError):  # somebody else's, or just removed
        fd = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)
