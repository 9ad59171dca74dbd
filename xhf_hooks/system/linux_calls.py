"""Calls of Linux that Python lacks."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

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
