"""One run at a time per output folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from xhf_hooks.errors import TargetError


class RunLock:
    """An advisory lock on ``.<name>.lock`` beside the output folder, held while a run lives.

    The kernel drops it with the process, however that ends. A file system without locks gives none:
    then two runs cannot see each other, as with any other tool. Runs on: rank 0.
    """

    def __init__(self, final: Path) -> None:
        self.path = final.with_name(f'.{final.name}.lock')
        self._fd: int | None = None

    def acquire(self, patience_secs: float = 0.0) -> bool:
        """Take the lock; False when another run holds it. Waits a little for a run that is just ending."""
        deadline = time.monotonic() + patience_secs
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                    self.path.unlink(missing_ok=True)
                    return True
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.2)
                continue
            if self._is_current(fd):
                break
            os.close(fd)  # the holder removed the file between our open and our lock
        self._fd = fd
        try:
            os.ftruncate(fd, 0)
            os.write(fd, f'process {os.getpid()} on {socket.gethostname()}'.encode())
        except OSError:
            self.release()  # else this process would wait for itself when it tries again
            raise
        return True

    def _is_current(self, fd: int) -> bool:
        try:
            return os.fstat(fd).st_ino == os.stat(self.path).st_ino
        except FileNotFoundError:
            return False

    def acquire_or_explain(self, final: Path) -> None:
        """Take the lock.

        Raises:
            TargetError: Another run holds it; the holder is named.
        """
        if not self.acquire(patience_secs=10.0):
            holder = self.path.read_text(errors='replace') or 'another run'
            raise TargetError(f'{final} is in use by {holder}; give this run its own out_dir')

    def release(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # closing is what gives the lock back
                self.path.unlink()
            os.close(self._fd)
            self._fd = None
