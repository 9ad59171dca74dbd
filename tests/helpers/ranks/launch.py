"""Runs a function, or a program, on N real processes and fails loudly, with every rank's traceback.

Each process is forked from a server (multiprocessing's forkserver) that has only imported torch, DeepSpeed,
transformers and this package: nothing leaks in from the test process, and ranks save about 10 s of imports. To share a
launch between many tests see `tests.helpers.ranks.scenarios`.

What happens to the ranks of a launch:
- a rank returned: it stays until all have, since rank 0 may host the process group's store;
- a rank raised: it exits at once, so that peers blocked on it notice. They get `PEER_GRACE_SECS` to finish, then their
  stacks are dumped and they are killed;
- the time limit is exceeded: every rank still at work dumps its stacks, and all are killed.
"""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

from tests.helpers.ranks.processes import free_port

REPO_ROOT = Path(__file__).resolve().parents[3]
PEER_GRACE_SECS = 30.0
#: Anything that takes longer hangs, however busy the machine is.
HANG_SECS = 1800.0
#: For the stacks of ranks that hang.
DUMP_SECS = 3.0
OUTPUT_TAIL_LINES = 80
#: Modules that the server imports, if the environment has them: also what they themselves import late.
PRELOADED = (
    *('torch.distributed', 'deepspeed', 'deepspeed.module_inject.auto_ep_layer', 'deepspeed.runtime.fp16.onebit'),
    *('deepspeed.runtime.superoffload.superoffload_stage3', 'mmengine._strategy', 'mmengine.runner', 'peft'),
    *('transformers.modeling_utils', 'transformers.models.auto', 'transformers.models.llama.modeling_llama'),
    *('s3fs', 'pytest', 'matplotlib.pyplot'),
    # What XTuner imports first of all. Not XTuner itself: a run without it must not import it
    *('pandas', 'pyarrow.parquet', 'aiohttp', 'torchvision', 'skimage.io', 'scipy.signal'),
    *(
        'xhf_hooks.runs.run',
        'xhf_hooks.offline.convert.plan_conversion',
        'xhf_hooks.integrations.mmengine.hf_checkpoint_hook',
    ),
    *('tests.helpers.runs.toy_run', 'tests.helpers.ranks.frozen'),
)
_CONTEXT = multiprocessing.get_context('forkserver')
_CONTEXT.set_forkserver_preload(list(PRELOADED))


def python_path() -> str:
    """PYTHONPATH of programs that import the tests and this package, whatever their folder is."""
    return os.pathsep.join([str(REPO_ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])


class RankFailures(AssertionError):
    """At least one rank did not finish; the message has all that is known of every rank."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_secs: float = HANG_SECS,
    init: str | None = 'deepspeed',
    expected_deaths: Collection[int] = (),
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs `function(*args)` on `world_size` processes; returns the results in rank order.

    Args:
        function: Picklable, so defined at the top level of an importable module.
        timeout_secs: Limit for the whole launch, imports included.
        init: Who makes the gloo process group: 'deepspeed', 'torch' or None (nobody); with 'sim', DeepSpeed, for
            the simulated device.
        expected_deaths: Ranks that may end without reporting (a signal, `os._exit`); their result
            is then None. An exception that they raise is still a failure.
        env: Variables that override each rank's environment.

    Raises:
        RankFailures: A rank did not return, or exited with a status other than 0.
    """
    call, port = pickle.dumps((init, function, args)), free_port()
    with tempfile.TemporaryDirectory(prefix='ranks-') as folder:
        ranks: list[_Rank] = []
        try:
            for index in range(world_size):
                environment = _rank_environment(index, world_size, port) | dict(env or {})
                output = Path(folder, f'{index}.output')
                ranks.append(_Rank(output, index in expected_deaths, call, environment, timeout_secs))
            why = _wait(ranks, timeout_secs)
            if any(rank.problem() for rank in ranks):
                name = getattr(function, '__name__', repr(function))
                raise RankFailures(_describe(name, ranks, why))
            return [rank.outcome and rank.outcome[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()


def run_program(program: str | Path, *arguments: str | Path, world_size: int = 1) -> list[CompletedProcess[str]]:
    """Runs a program of Python (a file, or its lines) as torchrun would: with `world_size` processes in this folder.

    They are forked like ranks; their ends are those of a program.
    """
    port, command, processes = free_port(), [str(program), *map(str, arguments)], []
    with tempfile.TemporaryDirectory(prefix='program-') as folder:
        outputs = [[str(Path(folder, f'{index}.{end}')) for end in ('stdout', 'stderr')] for index in range(world_size)]
        try:
            for index in range(world_size):
                environment = _rank_environment(index, world_size, port)
                run = (command, os.getcwd(), environment, outputs[index])
                processes.append(start_process(_run_program, *run, daemon=False))  # may start processes
            deadline = time.monotonic() + HANG_SECS
            for process in processes:
                process.join(deadline - time.monotonic())
        finally:
            for process in processes:
                process.kill()
        said = [[Path(path).read_text(errors='replace') for path in paths] for paths in outputs]
        return [CompletedProcess(command, p.exitcode, *texts) for p, texts in zip(processes, said, strict=True)]


def start_process(function: Callable[..., None], *args: Any, daemon: bool = True) -> multiprocessing.Process:
    """Starts a process from the same server; the caller communicates with it and ends it.

    Unlike :func:`run_ranks`, this allows a test to kill runs at any instant.
    """
    process = _CONTEXT.Process(target=function, args=args, daemon=daemon)
    with mock.patch.dict(os.environ, _cpu_environment()):  # for the server, which the first launch starts
        process.start()
    return process


def until(condition: Callable[[], Any]) -> None:
    """Wait for another thread or process, and fail if it hangs."""
    deadline = time.monotonic() + HANG_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class _Rank:
    """One child process as the parent sees it.

    Attributes:
        outcome: Whether it returned, and its result or traceback.
    """

    def __init__(
        self, output: Path, may_die: bool, call: bytes, environment: Mapping[str, str], timeout_secs: float
    ) -> None:
        self.outcome: tuple[bool, Any] | None = None
        self._output, self._may_die, self._hangs = output, may_die, False
        self._connection, theirs = _CONTEXT.Pipe()
        limit_secs = timeout_secs + 60  # if the parent is killed, nobody else ends this process
        self._process = start_process(_run_rank, call, dict(environment), str(output), limit_secs, theirs, daemon=False)
        theirs.close()

    def has_exited(self) -> bool:
        """Also takes what it has reported."""
        exited = self._process.exitcode is not None
        with contextlib.suppress(EOFError, OSError):
            if self.outcome is None and self._connection.poll():
                self.outcome = pickle.loads(self._connection.recv_bytes())
        return exited

    def release(self) -> None:
        """Lets a rank that has returned exit."""
        self._connection.close()

    def give_up(self) -> None:
        """Makes a rank that has not exited dump its stacks into its output, unless it waits for others."""
        if not self.has_exited() and (self.outcome is None or self._connection.closed):
            self._hangs = True
            os.kill(self._process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kills the whole process group, so that nothing that the function started survives."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # in case it has no group of its own yet
        self._process.join()
        self.release()

    def problem(self) -> str | None:
        """Returns what is wrong with a rank that ended or was given up; None if nothing."""
        status = self._process.exitcode
        ended = f'killed by {signal.Signals(-status).name}' if (status or 0) < 0 else f'exit status {status}'
        if self.outcome and not self.outcome[0]:
            return f'raised\n{self.outcome[1]}'
        if self._hangs:
            return 'returned, but did not exit' if self.outcome else 'did not return; its stacks are in its output'
        if not self.outcome:
            return None if self._may_die else f'died: {ended}'
        return f'returned, then died: {ended}' if status else None

    def output_tail(self) -> str:
        lines = self._output.read_text(errors='replace').splitlines() if self._output.exists() else []
        return '\n'.join(lines[-OUTPUT_TAIL_LINES:])


def _wait(ranks: Sequence[_Rank], timeout_secs: float) -> str:
    """Waits until all ranks have exited or are given up; returns why any were given up."""
    deadline = time.monotonic() + timeout_secs
    why = f'the time limit of {timeout_secs:g} s is over'
    has_failed = False
    while time.monotonic() < deadline:
        exited = [rank.has_exited() for rank in ranks]
        if all(exited):
            return ''
        if all(gone or rank.outcome for rank, gone in zip(ranks, exited, strict=True)):
            for rank in ranks:
                rank.release()
        failed = [index for index, rank in enumerate(ranks) if exited[index] and rank.problem()]
        if failed and not has_failed and time.monotonic() + PEER_GRACE_SECS < deadline:
            has_failed, deadline = True, time.monotonic() + PEER_GRACE_SECS
            why = f'rank {failed[0]} had failed {PEER_GRACE_SECS:g} s before'
        time.sleep(0.02)
    for rank in ranks:
        rank.give_up()
    time.sleep(DUMP_SECS)
    return why


def _describe(name: str, ranks: Sequence[_Rank], why: str) -> str:
    problems = [rank.problem() for rank in ranks]
    failed = [index for index, problem in enumerate(problems) if problem]
    parts = [f'{name}: ranks {failed} of {len(ranks)} failed']
    if why:
        parts.append(f'ranks still running were stopped: {why}')
    for index, rank in enumerate(ranks):
        parts.append(f'===== rank {index}: {problems[index] or "no problem of its own"}')
        parts.append(f'----- rank {index}: end of its output\n{rank.output_tail()}')
    return '\n'.join(parts)


def _cpu_environment() -> dict[str, str]:
    """The environment of the server and of all that is forked from it."""
    # DeepSpeed compiles an op here on first use, and two versions that share a folder rebuild it
    # forever: one folder per virtual environment, unless the caller chose one.
    extensions = REPO_ROOT / '.torch_extensions' / Path(sys.prefix).name
    environment = {'TORCH_EXTENSIONS_DIR': str(extensions)} | dict(os.environ)
    return environment | {
        'PYTHONPATH': python_path(),
        'DS_ACCELERATOR': 'cpu',
        'CUDA_VISIBLE_DEVICES': '',
        'OMP_NUM_THREADS': '1',
    }


def _rank_environment(index: int, world_size: int, port: int) -> dict[str, str]:
    return _cpu_environment() | {
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(port),
        'RANK': str(index),
        'LOCAL_RANK': str(index),
        'WORLD_SIZE': str(world_size),
        'LOCAL_WORLD_SIZE': str(world_size),
    }


# What runs in the processes


def _begin(environment: dict[str, str], *outputs: str) -> None:
    os.setsid()  # processes that the function starts are killed with it
    for stream, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)


def _run_rank(call: bytes, environment: dict[str, str], output: str, limit_secs: float, parent: Connection) -> None:
    """Make the process group, call the function, report; wait until the parent knows that all ranks are done."""
    _begin(environment, output, output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.dump_traceback_later(limit_secs, exit=True)
    try:
        init, function, args = pickle.loads(call)
        _init_process_group(init)
        parent.send_bytes(pickle.dumps((True, function(*args))))
    except BaseException:
        parent.send_bytes(pickle.dumps((False, traceback.format_exc())))
        sys.stdout.flush()
        os._exit(1)  # at once, without waiting for threads and atexit handlers: peers may be waiting
    with contextlib.suppress(EOFError, OSError):
        parent.recv_bytes()
    if init:
        import torch.distributed as dist

        dist.destroy_process_group()


def _init_process_group(init: str | None) -> None:
    if init == 'deepspeed':
        import deepspeed

        deepspeed.init_distributed(dist_backend='gloo')
    elif init == 'torch':
        import torch.distributed as dist

        dist.init_process_group('gloo')
    elif init == 'sim':
        import deepspeed

        from tests.helpers.ranks import simulated_device

        simulated_device.use(int(os.environ['LOCAL_RANK']))
        deepspeed.init_distributed(dist_backend='simccl')


def _run_program(command: list[str], folder: str, environment: dict[str, str], outputs: list[str]) -> None:
    """What ``python PROGRAM ARGUMENTS`` does in that folder, its last steps included."""
    _begin(environment, *outputs)
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
