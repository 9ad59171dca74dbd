"""A lock on the output folder: one run at a time."""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import re
import socket
import threading
import time
from pathlib import Path

from xhf_hooks.errors import TargetError
from xhf_hooks.places.kept_folder import look_up

#: errnos of flock(2) on file systems without locks: Lustre mounted without ``flock``, some FUSE file systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
#: Mount options that make locks local to the host: of Lustre, NFS version 3 and nfs(5).
_LOCAL_LOCKS = {'localflock', 'nolock', 'local_lock=all', 'local_lock=flock'}
_SIGN = re.compile(r'process (\d+) on ([^\s,]+)')
_SIGN_NBYTES = 4096


class Answer(enum.Enum):
    """The outcome of :meth:`RunLock.acquire`."""

    OURS = 'this run holds the lock'
    HELD = 'another run holds the lock'
    UNKNOWN = 'the file system has no reliable locks; no other run has a heartbeat, and this run writes one'


class RunLock:
    """An advisory lock on ``.<name>.lock`` beside the output folder, held while a run lives. Runs on: rank 0.

    The kernel releases it when the process ends. Where hosts do not see each other's locks, the holder writes a
    heartbeat into the file, and other runs watch for it.

    Attributes:
        beat_secs: Interval of the heartbeat.
        lifeless_secs: A run on another host is considered dead after this time without a heartbeat.
    """

    beat_secs = 10.0
    lifeless_secs = 900.0

    def __init__(self, final: Path) -> None:
        self.path = final.with_name(f'.{final.name}.lock')
        self._fd: int | None = None
        self._pid = 0
        self._released = threading.Event()
        self.answer: Answer | None = None

    def acquire(self, patience_secs: float = 0.0, *, may_watch: bool = False) -> Answer:
        """Take the lock unless another run holds it.

        Args:
            patience_secs: How long to wait for another run to end.
            may_watch: Without reliable locks, wait for another run's heartbeat; if False, a recently changed lock file
                counts as alive.
        """
        deadline = time.monotonic() + patience_secs
        while True:
            self.answer = self._try(may_watch)
            if self.answer in (Answer.OURS, Answer.UNKNOWN):
                return self.answer
            if self.answer is Answer.HELD and time.monotonic() >= deadline:
                return self.answer
            time.sleep(0.0 if self.answer is None else 0.2)

    def acquire_or_explain(self, final: Path, elsewhere: str = 'set out_dir to') -> None:
        """Take the lock.

        Args:
            elsewhere: The option that chooses another folder, for the message.

        Raises:
            TargetError: Another run holds it; the message names the holder.
        """
        if self.acquire(patience_secs=10.0, may_watch=True) is Answer.HELD:
            holder = (_read(self.path) or 'another run').strip()
            raise TargetError(
                f'{final} is in use by {holder}; {elsewhere} another. If that host is dead and the file '
                f'system has kept its lock, remove {self.path}'
            )

    def release(self) -> None:
        """Release the lock. Does nothing in a forked child of the holder."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        if self._pid == os.getpid():
            self._released.set()
            with contextlib.suppress(OSError):  # closing the file releases the lock
                self.path.unlink()
        os.close(fd)

    def changed_lately(self, path: Path) -> bool:
        """Whether a file, or anything in a folder, was changed within ``lifeless_secs`` by the server's clock."""
        probe = self.path.with_name(f'{self.path.name}.clock-{os.urandom(4).hex()}')
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        for each in (path, *path.rglob('*')):
            with contextlib.suppress(OSError):  # deleted meanwhile
                if now - each.lstat().st_mtime < self.lifeless_secs:
                    return True
        return False

    def _try(self, may_watch: bool) -> Answer | None:
        """Try once; None if the holder removed the file between open and lock."""
        fd = _open_current(self.path)
        if fd is None:
            return Answer.HELD
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_reliable = not _locks_are_local(self.path)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return Answer.HELD
                if error.errno not in _NO_LOCKS:
                    raise
                is_reliable = False
            found = look_up(self.path)
            if found is None or found.st_ino != os.fstat(fd).st_ino:
                return None
            if not is_reliable and self._shows_life(os.pread(fd, _SIGN_NBYTES, 0).decode(errors='replace'), may_watch):
                return Answer.HELD
            os.ftruncate(fd, 0)
            _write_sign(fd)
            if not is_reliable:
                time.sleep(self.beat_secs / 10)
                if _read(self.path) != _sign():
                    return Answer.HELD  # two runs started at once, and the other wrote last
                self._start_to_beat(fd)
            self._fd, self._pid, fd = fd, os.getpid(), -1
        finally:
            if fd >= 0:
                os.close(fd)
        return Answer.OURS if is_reliable else Answer.UNKNOWN

    def _shows_life(self, sign: str, may_watch: bool) -> bool:
        """Whether the run that signed the file is alive: by process id on this host, else by its heartbeat."""
        match = _SIGN.match(sign)
        if not match:  # a new file
            return False
        if match[2] == socket.gethostname():
            return int(match[1]) != os.getpid() and _is_alive(int(match[1]))
        if not self.changed_lately(self.path):
            return False
        if not may_watch:
            return True
        deadline = time.monotonic() + 2.5 * self.beat_secs
        while time.monotonic() < deadline:
            time.sleep(self.beat_secs / 10)
            if _read(self.path) != sign:
                return True
        return False

    def _start_to_beat(self, fd: int) -> None:
        released = self._released = threading.Event()

        def beat(own_fd: int) -> None:
            number = 0
            while not released.wait(self.beat_secs):
                number += 1
                with contextlib.suppress(OSError):  # the file system is unreachable
                    _write_sign(own_fd, f', beat {number}')
            os.close(own_fd)

        threading.Thread(target=beat, args=(os.dup(fd),), name='xhf-lock', daemon=True).start()


def _open_current(path: Path) -> int | None:
    """Open or create the lock file; tries O_EXCL first, which bypasses stale caches (:func:`.kept_folder.look_up`).

    Returns:
        None if another host created it and this one does not see it yet.
    """
    for flags in (os.O_EXCL, 0):
        with contextlib.suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    return None


def _sign() -> str:
    return f'process {os.getpid()} on {socket.gethostname()}'


def _write_sign(fd: int, more: str = '') -> None:
    os.pwrite(fd, f'{_sign()}{more}'.encode(), 0)
    os.fsync(fd)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors='replace')
    except OSError:
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        pass
    return True


def _locks_are_local(path: Path) -> bool:
    """Whether mount options make locks local to this host (proc(5), mountinfo). Runs on: rank 0."""
    number = os.stat(path).st_dev
    device = f'{os.major(number)}:{os.minor(number)}'
    with contextlib.suppress(OSError):
        for line in Path('/proc/self/mountinfo').read_text().splitlines():
            fields = line.split()
            if fields[2] == device:
                options = {*fields[5].split(','), *fields[-1].split(',')}
                return bool(options & _LOCAL_LOCKS)
    return False
