"""What anyone's files decide on is first done in a process of its own: it takes so much time and memory and no more."""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

from xhf_hooks.errors import DamagedError, XhfError

T = TypeVar('T')

#: A model of 1,000 tensors is built in 0.5 s of CPU time and 10 MB.
_CPU_SECS, _CPU_SECS_OF_EACH = 10.0, 0.001
_MEMORY_NBYTES, _MEMORY_NBYTES_OF_EACH = 10**9, 20_000
_WAITING = 20.0  # seconds on the clock for each of CPU time: machines are busy, file systems slow
_PIECE_NBYTES = 2**20
_ANSWERED = 0


def in_child(task: Callable[[], T], what: str, size: int) -> T:
    """What ``task`` returns, computed in a forked process that may use only so much time and memory.

    It shows nothing of what the task prints, and ends on its own where this process is killed.

    Args:
        task: Its result can be pickled; it needs no accelerator.
        what: It does, for the message, as ``'building the model of x/config.json'``.
        size: Of what its files hold: tensors, or kilobytes of text. More may take more.

    Raises:
        DamagedError: It took more, or ended the process.
        XhfError: As ``task`` did.
    """
    secs = _CPU_SECS + _CPU_SECS_OF_EACH * size
    nbytes = _MEMORY_NBYTES + _MEMORY_NBYTES_OF_EACH * size
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _run(task, writing, secs, nbytes)
    os.close(writing)
    status: int | None = None
    try:
        answer = _read(reading, secs * _WAITING)
        if answer is not None:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(reading)
        if status is None:  # too late, or interrupted
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if answer and status == _ANSWERED:
        kind, value = pickle.loads(answer)  # of our own code
        if kind == 'returned':
            return value
        if kind == 'raised':
            error, text = value
            raise error(text)
        if kind == 'fault':
            raise RuntimeError(f'{what}, in a process of its own:\n{value}')
    if status in (None, -signal.SIGXCPU, -signal.SIGKILL):
        found = f'takes more than {secs:.0f} s'
    elif status in (_ANSWERED, -signal.SIGABRT):  # libraries in Rust end the process when they get no memory
        found = f'takes more than {nbytes / 1e9:.1f} GB of memory'
    else:
        found = f'ends the process (status {status})'
    raise DamagedError(f'{what} {found}, far more than real ones of its size do')


def _read(fd: int, secs: float) -> bytes | None:
    """All that comes until the other end is closed; None when that takes longer."""
    deadline = time.monotonic() + secs
    pieces: list[bytes] = []
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        piece = os.read(fd, _PIECE_NBYTES)
        if not piece:
            return b''.join(pieces)
        pieces.append(piece)


def _run(task: Callable[[], object], writing: int, secs: float, nbytes: int) -> NoReturn:
    """The child: it answers, and leaves nothing to be flushed or cleaned up twice."""
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        silence = os.open(os.devnull, os.O_RDWR)
        for fd in (1, 2):
            os.dup2(silence, fd)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, int(secs))
        _limit(resource.RLIMIT_DATA, _data_nbytes() + nbytes)
        answer = memoryview(pickle.dumps(_answer(task)))
        while answer:
            answer = answer[os.write(writing, answer) :]
        status = _ANSWERED
    finally:
        os._exit(status)


def _answer(task: Callable[[], object]) -> tuple[str, object]:
    import torch

    torch.set_num_threads(1)  # GNU's OpenMP does not live through a fork
    try:
        return 'returned', task()
    except MemoryError:
        return 'memory', None
    except XhfError as error:
        plain = type(error).__init__ is Exception.__init__  # else the class makes the text of other arguments
        return 'raised', (type(error) if plain else XhfError, str(error))
    except BaseException:
        return 'fault', traceback.format_exc()


def _limit(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, hard))


def _data_nbytes() -> int:
    """Of this process's own memory, what counts for RLIMIT_DATA."""
    with open('/proc/self/status', encoding='ascii', errors='replace') as file:
        (line,) = (line for line in file if line.startswith('VmData:'))
    return int(line.split()[1]) * 1024
