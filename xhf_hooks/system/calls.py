"""What the operating system gives: calls that Python lacks, limits, and errors that name a file."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xhf_hooks.errors import LimitError

#: errnos for unsupported calls or files.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ESPIPE}


class LinuxCall:
    """A function of the C library that returns 0 or sets errno.

    Attributes:
        function: None if the C library does not have it.
    """

    def __init__(self, name: str, *argument_types: Any) -> None:
        self.function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
        if self.function is not None:
            self.function.argtypes = argument_types

    def __call__(self, *arguments: Any, of: Any = None) -> bool:
        """Make the call, and repeat it if a signal interrupts it.

        Args:
            of: The path or paths, for the error.

        Returns:
            False if it is not supported; then nothing happened.

        Raises:
            OSError: The call failed.
        """
        if self.function is None:
            return False
        while self.function(*arguments):
            number = ctypes.get_errno()
            if number in _UNSUPPORTED:
                return False
            if number != errno.EINTR:
                names = of if isinstance(of, tuple) else (of,)
                filenames = [None if name is None else str(name) for name in names]
                raise OSError(number, os.strerror(number), filenames[0], None, *filenames[1:2])
        return True


renameat2 = LinuxCall('renameat2', ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
fstatfs = LinuxCall('fstatfs', ctypes.c_int, ctypes.c_void_p)
fallocate = LinuxCall('fallocate', ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
sync_file_range = LinuxCall('sync_file_range', ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


_OPEN = Path('/proc/self/fd')
#: Reserve for other files of the process: data, logs, libraries.
_SPARE = 64


def allow_open_files(n_files: int, what: str) -> None:
    """Raise the soft limit of open files for ``n_files`` more, if necessary. Runs on: any rank.

    The usual soft limit is 1024; a process may raise it up to the hard limit, which is usually far higher.

    Raises:
        LimitError: The hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = len(os.listdir(_OPEN)) if _OPEN.exists() else 0
    needed = n_open + n_files + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LimitError(
            f'a save needs {n_files} more open files ({what}) besides the {n_open} open ones: expected a limit of '
            f'at least {needed}, found {hard}; raise it with "ulimit -Hn {needed}", or in the job script'
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside the block, errors of the operating system that name no file get this path.

    A full disk or quota and I/O errors come from calls that know only a descriptor: write(2), fsync(2). Libraries in
    Rust (safetensors, tokenizers) raise them as errors of their own that end with the number.

    Raises:
        OSError: With its number and a path.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        found = _RUST_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


#: How Rust writes an error of the operating system.
_RUST_ERROR = re.compile(r'\(os error (\d+)\)$')
