"""Runs a function on N real processes and fails loudly, with every rank's traceback.

Each rank is a separate process, forked from a server (multiprocessing's forkserver) that has only imported
torch, DeepSpeed, transformers and this package: nothing leaks in from the test process, and ranks save
about 10 s of imports per launch. To share one between many tests see
`tests.helpers.scenarios`.

What happens to the ranks of a launch:
- a rank returned: it stays until all have, since rank 0 may host the process group's store;
- a rank raised: it exits at once, so that peers blocked on it notice. They get
  `PEER_GRACE_SECS` to finish, then their stacks are dumped and they are killed;
- the time limit is exceeded: every rank still at work dumps its stacks, and all are killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.helpers.free_port import free_port
from tests.helpers.rank_child import RankFiles, main, main_of_program

REPO_ROOT = Path(__file__).resolve().parents[2]
PEER_GRACE_SECS = 30.0
#: Anything that takes longer hangs, however busy the machine is.
HANG_SECS = 1800.0
OUTPUT_TAIL_LINES = 40
INITS = ('deepspeed', 'torch', None)
#: Modules that the server imports, if the environment has them: also what they themselves import late.
PRELOADED = (
    *('torch.distributed', 'deepspeed', 'deepspeed.module_inject.auto_ep_layer', 'deepspeed.runtime.fp16.onebit'),
    *('deepspeed.runtime.superoffload.superoffload_stage3', 'mmengine._strategy', 'mmengine.runner', 'peft'),
    *('transformers.modeling_utils', 'transformers.models.auto', 'transformers.models.llama.modeling_llama'),
    *('s3fs', 'pytest', 'matplotlib.pyplot'),
    *('xhf_hooks.manager', 'xhf_hooks.convert', 'xhf_hooks.hooks', 'tests.helpers.toy_run', 'tests.helpers.frozen'),
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
        world_size: Number of processes.
        *args: Picklable arguments, the same on each rank.
        timeout_secs: Limit for the whole launch, imports included.
        init: Who makes the gloo process group: 'deepspeed', 'torch' or None (nobody).
        expected_deaths: Ranks that may end without reporting (a signal, `os._exit`); their result
            is then None. An exception that they raise is still a failure.
        env: Variables that override each rank's environment.

    Raises:
        RankFailures: A rank did not return, or exited with a status other than 0.
    """
    if init not in INITS:
        raise ValueError(f'init: expected one of {INITS}, found {init!r}')
    with tempfile.TemporaryDirectory(prefix='ranks-') as folder:
        setup = {
            'sys_path': sys.path,
            'init': init,
            'limit_secs': timeout_secs + 60,
            # Pickled separately: it can be loaded only after sys.path is set.
            'call': pickle.dumps((function, args)),
        }
        Path(folder, 'setup').write_bytes(pickle.dumps(setup))
        port = free_port()
        ranks: list[_Rank] = []
        try:
            for index in range(world_size):
                environment = _rank_environment(index, world_size, port) | dict(env or {})
                ranks.append(_Rank(index, Path(folder), environment, index in expected_deaths))
            why = _wait(ranks, timeout_secs)
            if any(rank.problem() for rank in ranks):
                name = getattr(function, '__name__', repr(function))
                raise RankFailures(_describe(name, ranks, why))
            return [rank.result() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()


def run_program(program: str | Path, *arguments: str | Path, world_size: int = 1) -> list[CompletedProcess[str]]:
    """Runs a program of Python (a file, or its lines) as torchrun would: with `world_size` processes in this folder.

    They are forked like ranks; their ends are those of a program.
    """
    port = free_port()
    command = [str(program), *map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix='program-') as folder:
        processes = []
        try:
            for index in range(world_size):
                environment = _rank_environment(index, world_size, port)
                outputs = [str(Path(folder, f'{index}.{stream}')) for stream in ('stdout', 'stderr')]
                processes.append(start_process(main_of_program, command, os.getcwd(), environment, outputs))
            deadline = time.monotonic() + HANG_SECS
            for process in processes:
                process.join(deadline - time.monotonic())
        finally:
            for process in processes:
                process.kill()
        return [
            CompletedProcess(
                command,
                process.exitcode,
                Path(folder, f'{index}.stdout').read_text(errors='replace'),
                Path(folder, f'{index}.stderr').read_text(errors='replace'),
            )
            for index, process in enumerate(processes)
        ]


def start_process(function: Callable[..., None], *args: Any) -> multiprocessing.Process:
    """Starts a process from the same server; the caller communicates with it and ends it.

    Unlike :func:`run_ranks`, this allows a test to kill runs at any instant.
    """
    process = _CONTEXT.Process(target=function, args=args, daemon=True)
    with _environment(_cpu_environment()):
        process.start()
    return process


class _Rank:
    """One child process as the parent sees it, and the files that it reports through."""

    def __init__(self, index: int, folder: Path, env: Mapping[str, str], may_die: bool) -> None:
        self.index = index
        self._may_die = may_die
        self._files = RankFiles(folder, index)
        self._gave_up = False
        self._exit_status: int | None = None
        self._files.stacks.touch()
        self._files.output.touch()
        released, self._release = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=main, args=(str(folder), index, dict(env), released))
        with _environment(env):  # for the server, which the first launch starts
            self._process.start()
        released.close()

    def has_exited(self) -> bool:
        self._exit_status = self._process.exitcode
        return self._exit_status is not None

    def has_returned(self) -> bool:
        return self._files.result.exists()

    def result(self) -> Any:
        return pickle.loads(self._files.result.read_bytes()) if self.has_returned() else None

    def release(self) -> None:
        """Lets a rank that has returned exit."""
        self._release.close()

    def give_up(self) -> None:
        """Makes a rank that is still at work dump its stacks."""
        self._gave_up = not self.has_exited()
        if self._gave_up:
            os.kill(self._process.pid, signal.SIGUSR1)

    def has_dumped(self) -> bool:
        """Whether its stacks have been written, if they were requested."""
        return not self._gave_up or self.has_exited() or self._files.stacks.stat().st_size > 0

    def kill(self) -> None:
        """Kills the whole process group, so that nothing that the function started survives."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # in case it has no group of its own yet
        self._process.join()
        self._release.close()

    def problem(self) -> str | None:
        """Returns what is wrong with a rank that ended or was given up; None if nothing."""
        if self._files.error.exists():
            return f'raised\n{self._files.error.read_text()}'
        if self._gave_up:
            where = 'returned, but did not exit' if self.has_returned() else 'did not return'
            return f'{where}; its stacks:\n{self._files.stacks.read_text()}'
        if not self.has_returned():
            return None if self._may_die else f'died: {_exit_words(self._exit_status)}'
        if self._exit_status:
            return f'returned, then died: {_exit_words(self._exit_status)}'
        return None

    def output_tail(self) -> str:
        lines = self._files.output.read_text(errors='replace').splitlines()
        return '\n'.join(lines[-OUTPUT_TAIL_LINES:])


def _wait(ranks: Sequence[_Rank], timeout_secs: float) -> str:
    """Waits until all ranks have exited or are given up; returns why any were given up."""
    deadline = time.monotonic() + timeout_secs
    why = f'the time limit of {timeout_secs:g} s is over'
    released = False
    failed_rank = None
    while time.monotonic() < deadline:
        # In this order: a rank may return and exit between the two checks.
        if all([rank.has_exited() for rank in ranks]):
            return ''
        if not released and all(rank.has_exited() or rank.has_returned() for rank in ranks):
            released = True
            for rank in ranks:
                rank.release()
        if failed_rank is None:
            failed_rank = next((r for r in ranks if r.has_exited() and r.problem()), None)
            if failed_rank and time.monotonic() + PEER_GRACE_SECS < deadline:
                deadline = time.monotonic() + PEER_GRACE_SECS
                why = f'rank {failed_rank.index} had failed {PEER_GRACE_SECS:g} s before'
        time.sleep(0.02)
    for rank in ranks:
        if released or not rank.has_returned():
            rank.give_up()
    _await_stacks(ranks)
    return why


def _await_stacks(ranks: Sequence[_Rank]) -> None:
    """Gives the signal handlers of ranks that were given up time to write."""
    deadline = time.monotonic() + 30
    while not all(rank.has_dumped() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(1)  # stacks are written line by line


def _describe(name: str, ranks: Sequence[_Rank], why: str) -> str:
    problems = {rank.index: rank.problem() for rank in ranks}
    failed = [index for index, problem in problems.items() if problem]
    parts = [f'{name}: ranks {failed} of {len(ranks)} failed']
    if why:
        parts.append(f'ranks still running were stopped: {why}')
    for rank in ranks:
        parts.append(f'===== rank {rank.index}: {problems[rank.index] or "no problem of its own"}')
        parts.append(f'----- rank {rank.index}: end of its output\n{rank.output_tail()}')
    return '\n'.join(parts)


def _exit_words(status: int | None) -> str:
    if status is not None and status < 0:
        return f'killed by {signal.Signals(-status).name}'
    return f'exit status {status}'


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


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
