"""Makes file-system calls fail or kill the process: the Python side of ``fault_layer.c``.

A process has the layer if it, or the server that it was forked from, was started with :func:`environment`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name('fault_layer.c')
#: All calls that change something on disk, and ``open``.
CHANGES = 'open pwrite write fsync fdatasync ftruncate fallocate rename renameat2 unlink rmdir mkdir'
KILL, SHORT = -1, -2  # any other outcome is an errno
EVERY = 10**9


def environment(folder: Path) -> dict[str, str]:
    """Compile the layer into ``folder``; returns environment variables that load it into a new process."""
    library = folder / 'fault_layer.so'
    command = ['cc', '-shared', '-fPIC', '-O1', '-Wall', '-Werror', '-o', str(library), str(SOURCE), '-ldl']
    subprocess.run(command, check=True)
    return {'LD_PRELOAD': str(library)}


class Injected:
    """What the layer saw: ``n_calls`` is set when the block ends."""

    n_calls = 0


@contextmanager
def fault(calls: str, path: Path | str, outcome: int, *, first: int = 1, last: int | None = None) -> Iterator[Injected]:
    """Give the ``first`` to ``last`` of the ``calls`` on paths that contain ``path`` this outcome, in this process.

    Args:
        outcome: An errno, KILL, or SHORT (write half of the bytes).
        last: Default: ``first``, so that one call fails. ``first=0`` only counts calls.
    """
    layer = ctypes.CDLL(None)
    layer.fault_disarm.restype = ctypes.c_long
    layer.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_long, ctypes.c_int]
    layer.fault_arm(calls.encode(), os.fsencode(path), first, first if last is None else last, outcome)
    seen = Injected()
    try:
        yield seen
    finally:
        seen.n_calls = layer.fault_disarm()


@contextmanager
def no_exchange() -> Iterator[None]:
    """Behave like a file system that cannot swap two folders, such as NFS."""
    layer = ctypes.CDLL(None)
    layer.fault_forbid_exchange(1)
    try:
        yield
    finally:
        layer.fault_forbid_exchange(0)
