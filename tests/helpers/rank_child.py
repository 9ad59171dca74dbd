"""The main function of processes that `tests.helpers.ranks` starts."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import runpy
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path


class RankFiles:
    """The files in which a rank reports: a result or an error, its stacks, and stdout with stderr."""

    def __init__(self, folder: Path, index: int) -> None:
        self.result = folder / f'rank{index}.result'
        self.error = folder / f'rank{index}.error'
        self.stacks = folder / f'rank{index}.stacks'
        self.output = folder / f'rank{index}.output'


def main(folder: str, index: int, environment: dict[str, str], released: Connection) -> None:
    """Run in a child process: make the process group, call the function, report.

    Args:
        released: Closed when the process may exit.
    """
    os.setsid()  # processes that the function starts are killed with it
    files = RankFiles(Path(folder), index)
    output = os.open(files.output, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    stacks = files.stacks.open('w')
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    setup = pickle.loads(Path(folder, 'setup').read_bytes())
    # If the parent is killed, nobody else ends this process.
    faulthandler.dump_traceback_later(setup['limit_secs'], exit=True)
    try:
        sys.path += [entry for entry in setup['sys_path'] if entry not in sys.path]
        _init_process_group(setup['init'])
        function, args = pickle.loads(setup['call'])
        _write_whole(files.result, pickle.dumps(function(*args)))
    except BaseException:
        _write_whole(files.error, traceback.format_exc().encode())
        sys.stdout.flush()
        os._exit(1)  # at once, without waiting for threads and atexit handlers: peers may be waiting
    with contextlib.suppress(EOFError):
        released.recv()  # wait until the parent knows that all ranks are done
    if setup['init']:
        import torch.distributed as dist

        dist.destroy_process_group()


def main_of_program(command: list[str], folder: str, environment: dict[str, str], outputs: list[str]) -> None:
    """Run in a child process: what ``python PROGRAM ARGUMENTS`` does in that folder, its last steps included.

    Args:
        outputs: The files of standard output and standard error.
    """
    os.setsid()
    for stream, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = command
    status: object = 0
    try:
        if os.path.exists(command[0]):
            sys.path.insert(0, os.path.dirname(command[0]))
            runpy.run_path(command[0], run_name='__main__')
        else:
            sys.argv = ['-c', *command[1:]]
            exec(compile(command[0], '-c', 'exec'), {'__name__': '__main__'})
    except SystemExit as error:
        status = error.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 1)


def _init_process_group(init: str | None) -> None:
    if init == 'deepspeed':
        import deepspeed

        deepspeed.init_distributed(dist_backend='gloo')
    elif init == 'torch':
        import torch.distributed as dist

        dist.init_process_group('gloo')


def _write_whole(path: Path, content: bytes) -> None:
    unfinished = path.with_name(path.name + '.unfinished')
    unfinished.write_bytes(content)
    unfinished.rename(path)
