"""Makes file-system calls fail or kill the process: the Python side of ``fault_layer.c``.

A process has the layer if it, or the server that it was forked from, was started with it, as by :func:`launch`.
"""

import ctypes
import functools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.ranks.launch import python_path, run_ranks
from tests.helpers.ranks.scenarios import Outcome, run_scenarios_of

SOURCE = Path(__file__).with_name('fault_layer.c')
#: All calls that change something on disk, and ``open``.
CHANGES = 'open pwrite write fsync fdatasync ftruncate fallocate rename renameat2 unlink rmdir mkdir'
KILL, SHORT = -1, -2  # any other outcome is an errno
EVERY = 10**9


@functools.cache
def _process() -> subprocess.Popen[str]:
    """A process with the layer, and so are the ranks that are forked from its server. It ends with this one."""
    library = Path(tempfile.mkdtemp(prefix='fault_layer-'), 'fault_layer.so')
    command = ['cc', '-shared', '-fPIC', '-O1', '-Wall', '-Werror', '-o', str(library), str(SOURCE), '-ldl']
    subprocess.run(command, check=True)
    environment = {**os.environ, 'LD_PRELOAD': str(library), 'PYTHONPATH': python_path()}
    pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
    return subprocess.Popen([sys.executable, '-m', __name__], env=environment, **pipes)


def launch(module: str, root: Path, world_size: int) -> dict[str, list[Outcome]]:
    """Run what ``scenarios(root)`` of a module returns on ranks with the layer."""
    print(module, root, world_size, file=_process().stdin, flush=True)
    assert _process().stdout.readline() == 'done\n', 'its traceback is in the output'
    return pickle.loads((root / 'outcomes').read_bytes())


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
    for line in sys.stdin:
        module, folder, n_ranks = line.split()
        per_rank = run_ranks(run_scenarios_of, int(n_ranks), module, Path(folder))
        found = {name: [outcomes[name] for outcomes in per_rank] for name in per_rank[0]}
        Path(folder, 'outcomes').write_bytes(pickle.dumps(found))
        print('done', flush=True)
