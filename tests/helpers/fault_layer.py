"""Makes file-system calls fail or kill the process: the Python side of ``fault_layer.c``.

A process has the layer if it, or the server that it was forked from, was started with it, as by :func:`launch`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.ranks import python_path
from tests.helpers.scenarios import Outcome, run_scenarios

SOURCE = Path(__file__).with_name('fault_layer.c')
#: All calls that change something on disk, and ``open``.
CHANGES = 'open pwrite write fsync fdatasync ftruncate fallocate rename renameat2 unlink rmdir mkdir'
KILL, SHORT = -1, -2  # any other outcome is an errno
EVERY = 10**9


def launch(module: str, root: Path, folder: Path, world_size: int) -> dict[str, list[Outcome]]:
    """Run what ``scenarios(root)`` of a module returns on ranks with the layer, which is compiled into ``folder``.

    A process of its own starts a new server for these ranks to be forked from.
    """
    library, outcomes = folder / 'fault_layer.so', folder / 'outcomes'
    compiler = ['cc', '-shared', '-fPIC', '-O1', '-Wall', '-Werror', '-o', str(library), str(SOURCE), '-ldl']
    subprocess.run(compiler, check=True)
    environment = {**os.environ, 'LD_PRELOAD': str(library), 'PYTHONPATH': python_path()}
    command = [sys.executable, '-m', __name__, module, str(root), str(outcomes), str(world_size)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    return pickle.loads(outcomes.read_bytes())


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


if __name__ == '__main__':
    module, root, outcomes, world_size = sys.argv[1:]
    found = run_scenarios(importlib.import_module(module).scenarios(Path(root)), int(world_size))
    Path(outcomes).write_bytes(pickle.dumps(found))
