"""A lock on the output folder: one run at a time. Runs on: rank 0."""

from __future__ import annotations

import atexit
import contextlib
import copy
import errno
import fcntl
import os
import socket
import time
import weakref
from pathlib import Path
from typing import ClassVar

from xhf_hooks.places.file_system import look_up

#: errnos of flock(2) on file systems without locks: Lustre mounted without ``flock``, some FUSE file systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
#: Mount options that make locks local to the host: of Lustre, NFS version 3 and nfs(5).
_LOCAL_LOCKS = {'localflock', 'nolock', 'local_lock=all', 'local_lock=flock'}
_SIGN_NBYTES = 4096


class RunLock:
    """An advisory lock on ``.<name>.lock`` next to the output folder, held while a run lives.

    The kernel releases the lock when the process ends. The file names the process that holds it.

    Attributes:
        works_across_hosts: Whether other hosts see the lock. If not, it keeps out other runs on this host only,
            or none if the file system has no locks.
        holder: Another process that has signed the file: it holds the lock, or was killed.
    """

    _kept: ClassVar[dict[Path, RunLock]] = {}  # by the path of the lock file; locks belong to the process

    def __init__(self, folder: Path) -> None:
        self.path = folder.with_name(f'.{folder.name}.lock')
        self.works_across_hosts = True
        self.holder = ''
        self._fd: int | None = None
        self._pid = 0

    def acquire(self, patience_secs: float = 0.0) -> bool:
        """Take the lock; False if another run holds it and does not end within ``patience_secs``."""
        if self._take_over():
            return True
        deadline = time.monotonic() + patience_secs
        while not self._try():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.2)
        return True

    def keep_until_exit(self) -> None:
        """Keep the lock, but let a later RunLock of this process take it over; exit releases it.

        So several calls of ``save_hf`` are one run: between two of them no other run may save here.
        """
        if self._fd is not None and self._pid == os.getpid():
            kept = RunLock._kept[self.path] = copy.copy(self)
            self._fd = None
            _close_in_children(kept)
            atexit.register(kept.release)

    def _take_over(self) -> bool:
        """Take a kept lock of this process, if it is still that of the lock file."""
        kept = RunLock._kept.pop(self.path, None)
        if kept is None:
            return False
        atexit.unregister(kept.release)
        found = look_up(self.path)  # asks the server: this host's cache may be stale
        is_of_this_process = kept._fd is not None and kept._pid == os.getpid()
        if not is_of_this_process or found is None or found.st_ino != os.fstat(kept._fd or 0).st_ino:
            kept.release()
            return False
        self._fd, self._pid, self.works_across_hosts, self.holder = kept._fd, kept._pid, kept.works_across_hosts, ''
        kept._fd = None
        _close_in_children(self)
        return True

    def release(self) -> None:
        """Release the lock. Does nothing in a forked child of the holder."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):  # closing the file releases the lock
                # Otherwise the file at this path is another run's: ours was removed
                if os.path.samestat(os.lstat(self.path), os.fstat(fd)):
                    self.path.unlink()
        os.close(fd)

    def _try(self) -> bool:
        fd = _open_current(self.path)
        if fd is None:
            return False
        is_held = False
        try:
            is_free = self._lock(fd)
            self.holder = os.pread(fd, _SIGN_NBYTES, 0).decode(errors='replace').strip()
            if is_free:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f'process {os.getpid()} on {socket.gethostname()}'.encode(), 0)
                os.fsync(fd)
                self._fd, self._pid = fd, os.getpid()
                is_held = True
                _close_in_children(self)
        finally:
            if not is_held:
                os.close(fd)
        return is_held

    def _lock(self, fd: int) -> bool:
        """Returns False if another process holds it, or has removed the file meanwhile."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.works_across_hosts = not _locks_are_local(fd)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            if error.errno not in _NO_LOCKS:
                raise
            self.works_across_hosts = False  # the file system has no locks: go on without one
        found = look_up(self.path)  # as above; is it still the file that was opened?
        return found is not None and found.st_ino == os.fstat(fd).st_ino


def _close_in_children(lock: RunLock) -> None:
    """Let processes that are forked from now on close the lock file at once.

    They inherit the lock with it. If the holder were killed, a data loader worker that lives on would hold the lock,
    and the next run would be refused in the name of a dead process. Closing it in a child does not release the lock.
    """
    known = weakref.ref(lock)

    def close() -> None:
        found = known()
        if found is not None:
            found.release()

    os.register_at_fork(after_in_child=close)


def _open_current(path: Path) -> int | None:
    """Open or create the lock file; tries O_EXCL first, which bypasses stale caches (:func:`.look_up`).

    Returns:
        None if another host created it and this one does not see it yet.
    """
    for flags in (os.O_EXCL, 0):
        # Without O_EXCL, too, this is raised if the server has a name that this client's cache lacks
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    return None


def _locks_are_local(fd: int) -> bool:
    """Whether mount options make locks local to this host (proc(5), mountinfo)."""
    number = os.fstat(fd).st_dev
    device = f'{os.major(number)}:{os.minor(number)}'
    with contextlib.suppress(OSError):
        for line in Path('/proc/self/mountinfo').read_text().splitlines():
            fields = line.split()
            if fields[2] == device:
                return bool({*fields[5].split(','), *fields[-1].split(',')} & _LOCAL_LOCKS)
    return False
