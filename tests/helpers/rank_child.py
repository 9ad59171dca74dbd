"""The main function of processes that `tests.helpers.ranks` starts."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
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
    gc.freeze()  # DeepSpeed often collects garbage: skip everything that the server has imported
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
