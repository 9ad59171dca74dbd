"""Temporary folders that are removed even after a kill."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = 'xhf_temporary-'
#: A folder of this age may not have its lock yet.
_NEW_SECS = 10.0
#: Linux's in-memory file system.
_MEMORY = Path('/dev/shm')


def memory_place() -> Path:
    """Where small temporary files are in memory; the system's folder for temporary files if there is none."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


class MemoryFolder:
    """A new, empty folder; removed by :meth:`close` or, after a kill, when the next one is created on this host.

    Args:
        parent: None: ``/dev/shm`` or, if that is missing or not writable, the system's folder for temporary files.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or memory_place()
        for left in parent.glob(f'{_PREFIX}*'):
            _remove_unless_held(left)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._fd = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder. Does nothing the second time."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def _remove_unless_held(folder: Path) -> None:
    """Remove it unless a live process holds its lock: the kernel drops a process's locks when it ends."""
    with contextlib.suppress(OSError):  # another user's, or just removed
        if time.time() - folder.stat().st_mtime < _NEW_SECS:
            return
        fd = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)
