"""A lock on the output folder: one run at a time. Runs on: rank 0."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from xhf_hooks.places.file_system import look_up, mount_of

#: errnos of flock(2) on file systems without locks: Lustre mounted without ``flock``, some FUSE file systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
#: Mount options that make locks local to the host: of Lustre, NFS version 3 and nfs(5).
_LOCAL_LOCKS = {'localflock', 'nolock', 'local_lock=all', 'local_lock=flock'}
_SIGN_NBYTES = 4096
#: How long a run that is writing a save may change nothing there: it may be waiting for the disk to write a large file.
_SAVE_PATIENCE_SECS = 120.0
_POLL_SECS = 0.2


class RunLock:
    """An advisory lock on ``.<name>.lock`` next to the output folder, held while a run lives.

    The kernel releases the lock when the process ends. The file names the process that holds it.

    Attributes:
        works_across_hosts: Whether other hosts see the lock. If not, it keeps out other runs on this host only,
            or none if the file system has no locks.
        holder: Another process that has signed the file: it holds the lock, or was killed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder.with_name(f'.{folder.name}.lock')
        self.works_across_hosts = True
        self.holder = ''
        self._fd: int | None = None
        self._pid = 0

    def acquire(self, patience_secs: float = 0.0, say: Callable[[str], object] = lambda said: None) -> bool:
        """Take the lock; False if another run holds it, and makes no progress for ``patience_secs``.

        A preempted run may be writing its last save while its replacement starts. So a run that writes a save, or says
        by :meth:`show_progress` that it is ending, is waited for as long as something changes there.

        Args:
            say: Called once, with whom this waits for.
        """
        seen, changed_at, has_said = self._find_progress(), time.monotonic(), False
        while not self._try():
            found, now = self._find_progress(), time.monotonic()
            if found != seen:
                seen, changed_at = found, now
            if now - changed_at >= (_SAVE_PATIENCE_SECS if patience_secs and len(found) > 1 else patience_secs):
                return False
            if not has_said:
                has_said = True
                say(f'{self._folder}: waiting for {self.holder or "another run"}, which saves there, to end')
            time.sleep(_POLL_SECS)
        return True

    def show_progress(self) -> None:
        """Show runs that wait for this lock that its holder is ending. Does nothing if it is not held."""
        with contextlib.suppress(OSError):
            if self._fd is not None and self._pid == os.getpid():
                os.utime(self._fd)

    def release(self) -> None:
        """Release the lock. Does nothing in a forked child of the holder."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        _held.discard(self)
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
                _held.add(self)
        finally:
            if not is_held:
                os.close(fd)
        return is_held

    def _find_progress(self) -> tuple[object, ...]:
        """What changes while the holder is ending, or writes a save; more than one entry if it writes one."""
        found: list[object] = []
        for staged in [self.path, *self._folder.parent.glob(f'.{self._folder.name}.staging-*/**/*')]:
            with contextlib.suppress(OSError):  # it is gone
                status = staged.stat()
                found.append((staged.name, status.st_size, status.st_mtime_ns))
        return tuple(found)

    def _lock(self, fd: int) -> bool:
        """Returns False if another process holds it, or has removed the file meanwhile."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _, options = mount_of(os.fstat(fd).st_dev)
            self.works_across_hosts = not options & _LOCAL_LOCKS
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            if error.errno not in _NO_LOCKS:
                raise
            self.works_across_hosts = False  # the file system has no locks: go on without one
        found = look_up(self.path)  # is it still the file that was opened?
        return found is not None and found.st_ino == os.fstat(fd).st_ino


#: The locks that this process holds, as long as somebody refers to them.
_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the lock files in a forked child, at once.

    It inherits the locks with them. If the holder were killed, a data loader worker that lives on would hold the lock,
    and the next run would be refused in the name of a dead process. Closing it in a child does not release the lock.
    """
    for lock in [*_held]:
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)


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
