"""Runs tasks on untrusted files in a child process with limits on time and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar

from xhf_hooks.errors import DamagedError, XhfError

T = TypeVar('T')

#: Building a model of 1,000 tensors takes 0.5 s of CPU time and 10 MB.
_CPU_SECS, _CPU_SECS_OF_EACH = 10.0, 0.001
_MEMORY_NBYTES, _MEMORY_NBYTES_OF_EACH = 10**9, 20_000
_WAITING = 20.0  # seconds of wall time per second of CPU time, for busy machines and slow file systems
_ANSWERED = 0


def in_child(task: Callable[[], T], what: str, size: int) -> T:
    """Call ``task`` in a forked process with limits on time and memory, and return its result.

    Its output is discarded.

    Args:
        task: Must return a picklable value and use no accelerator.
        what: Describes the task in messages, such as ``'building the model of x/config.json'``.
        size: Number of tensors, or kilobytes of text, in the task's files; the limits grow with it.

    Raises:
        DamagedError: The task exceeded a limit or crashed.
        XhfError: Raised by ``task``.
    """
    secs = _CPU_SECS + _CPU_SECS_OF_EACH * size
    nbytes = _MEMORY_NBYTES + _MEMORY_NBYTES_OF_EACH * size
    reading, writing = Pipe(duplex=False)
    child = os.fork()
    if not child:
        reading.close()
        _run(task, writing, secs, nbytes)
    writing.close()
    kind, value = None, None
    status: int | None = None
    try:
        if reading.poll(secs * _WAITING):
            with contextlib.suppress(EOFError, OSError):  # the child died
                kind, value = reading.recv()
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        reading.close()
        if status is None:  # timed out or interrupted
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if kind == 'returned':
        return value
    if kind == 'raised':
        error, text = value
        raise error(text)
    if kind == 'fault':
        raise RuntimeError(f'{what} failed in a child process:\n{value}')
    if status in (None, -signal.SIGXCPU, -signal.SIGKILL):
        found = f'takes more than {secs:.0f} s; valid files of this size need far less'
    elif status in (_ANSWERED, -signal.SIGABRT):  # libraries in Rust abort when out of memory
        found = f'takes more than {nbytes / 1e9:.1f} GB of memory; valid files of this size need far less'
    else:
        found = f'crashes the process (status {status})'
    raise DamagedError(f'{what} {found}')


def _run(task: Callable[[], object], writing: Connection, secs: float, nbytes: int) -> NoReturn:
    """Run the task in the child process, and exit without the cleanup that belongs to the parent."""
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
        writing.send(_answer(task))
        status = _ANSWERED
    finally:
        os._exit(status)


def _answer(task: Callable[[], object]) -> tuple[str, object]:
    import torch

    torch.set_num_threads(1)  # GNU OpenMP does not survive a fork
    try:
        return 'returned', task()
    except MemoryError:
        return 'memory', None
    except XhfError as error:
        plain = type(error).__init__ is Exception.__init__  # other classes do not take a message
        return 'raised', (type(error) if plain else XhfError, str(error))
    except BaseException:
        return 'fault', traceback.format_exc()


def _limit(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, hard))


def _data_nbytes() -> int:
    """This process's memory, as counted by RLIMIT_DATA."""
    with open('/proc/self/status', encoding='ascii', errors='replace') as file:
        (line,) = (line for line in file if line.startswith('VmData:'))
    return int(line.split()[1]) * 1024
