"""System calls that Python has no name for. A kernel or a file system may lack each, which is no error."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

#: What kernels and file systems answer that do not know a call, or not for this kind of file.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ESPIPE}


class LinuxCall:
    """A function of the C library that returns 0, or sets errno.

    Attributes:
        function: None where the C library does not have it.
    """

    def __init__(self, name: str, *argument_types: Any) -> None:
        self.function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
        if self.function is not None:
            self.function.argtypes = argument_types

    def __call__(self, *arguments: Any, of: Any = None) -> bool:
        """Make the call, again when a signal interrupts it.

        Args:
            of: What it is about, for the message: a path, or several.

        Returns:
            False where it is not supported; nothing happened then.

        Raises:
            OSError: It is supported, and failed.
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
fallocate = LinuxCall('fallocate', ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
sync_file_range = LinuxCall('sync_file_range', ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
