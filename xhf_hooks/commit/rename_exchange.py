"""Swaps two folders in one atomic step, where the file system supports it."""

from __future__ import annotations

import os
from pathlib import Path

from xhf_hooks.files.linux_calls import renameat2

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h; renameat2(2)


def exchange(one: Path, other: Path) -> bool:
    """Swap two existing paths so that no reader ever finds either name missing.

    Returns:
        False if this kernel or file system does not support it (NFS, macOS); then nothing happened.

    Raises:
        OSError: The call is supported but failed.
    """
    names = os.fsencode(one), os.fsencode(other)
    return renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE, of=(one, other))
