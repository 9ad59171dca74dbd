"""Runs the ``on_saved`` command for one save after another, beside training. Runs on: rank 0, the training thread.

Nothing here waits or has a thread: each iteration asks whether the command has ended (:meth:`AfterSaves.results`).
Standard programs look after it: ``timeout`` ends it with its process group, ``nice`` lowers its priority, and
``setpriv`` (util-linux), where there is one, ends it when this process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.collective import Collective
from xhf_hooks.config.checks import PLACEHOLDERS
from xhf_hooks.config.options import CallOptions, RunOptions
from xhf_hooks.errors import OptionError, XhfError
from xhf_hooks.places.kept_folder import KeptFolder
from xhf_hooks.places.store import StoredSave
from xhf_hooks.places.target import SaveTarget
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.telemetry import RunLog

LOG_NAME = 'output.log'
#: Folder beside the log for what a command adds to ``{path}``.
ADDED = 'added'
#: Time limit of a command. ``timeout`` in the command sets a shorter one.
MOST_SECS = 24 * 3600.0
#: Seconds between SIGTERM and SIGKILL.
_GRACE_SECS = 5
#: When memory runs out, the kernel kills the command before training.
_OOM_SCORE = 500
#: Of the output; the result is in its last lines.
_MOST_READ_NBYTES = 2**20
#: Seconds between two checks of the other ranks whether everything is done, and of rank 0.
_LOOK_SECS, _POLL_SECS = 5.0, 0.05
_PLACEHOLDER = re.compile('|'.join(re.escape(f'{{{name}}}') for name in PLACEHOLDERS))
#: Variables that torchrun, deepspeed, accelerate, MPI and SLURM's srun set for a rank. A program that finds them would
#: act as a rank and wait for the others.
_OF_A_RANK = {
    *('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE', 'NODE_RANK'),
    *('ROLE_RANK', 'ROLE_WORLD_SIZE', 'ROLE_NAME', 'CROSS_RANK', 'CROSS_SIZE', 'LOCAL_SIZE', 'MASTER_ADDR'),
    *('MASTER_PORT', 'TORCH_NCCL_ASYNC_ERROR_HANDLING', 'NCCL_ASYNC_ERROR_HANDLING', 'SLURM_PROCID'),
    *('SLURM_LOCALID', 'SLURM_NODEID', 'SLURM_NTASKS', 'SLURM_NPROCS', 'SLURM_STEP_NUM_TASKS'),
}
_PREFIXES_OF_A_RANK = ('TORCHELASTIC_', 'ACCELERATE_', 'FSDP_', 'OMPI_', 'PMI_', 'PMIX_', 'MV2_COMM_', 'PALS_')


@dataclass(frozen=True)
class Result:
    """The numbers that ``on_saved`` printed for a save.

    Attributes:
        name: Name of the save's folder, such as ``hf_model``.
    """

    name: str
    step: Step
    numbers: Mapping[str, float]

    def scalars(self) -> dict[str, float]:
        """The numbers with names for a visualizer, such as ``on_saved/hf_model/accuracy``."""
        return {f'on_saved/{self.name}/{name}': value for name, value in self.numbers.items()}


@dataclass(frozen=True)
class _Save:
    """A save to run the command for.

    Attributes:
        held: Keeps its files, on the disk or in a store, until it is released.
        output: Folder for results.
    """

    name: str
    step: Step
    held: KeptFolder | StoredSave
    output: Path

    @property
    def what(self) -> str:
        return f'on_saved for {self.name}, {self.step.label}'

    @property
    def log(self) -> Path:
        return self.output / LOG_NAME


@dataclass(frozen=True)
class _Running:
    """A command that was started.

    Attributes:
        log_start: Where its output begins in the log.
        files: What was in ``{path}``.
    """

    save: _Save
    process: subprocess.Popen[bytes]
    began: float
    log_start: int
    files: set[Path]


class AfterSaves:
    """Runs a command after each save, one at a time.

    A new save replaces a waiting one of the same name. Failures are logged and never stop training.

    Args:
        command: Its arguments, with placeholders (:func:`fill_in`).
        run_dir: Local folder of the run, for results where saves are only in a store.
        timeout_secs: Time limit of the command.
    """

    def __init__(self, command: Sequence[str], log: RunLog, *, timeout_secs: float, run_dir: Path = Path()) -> None:
        self._command, self._log, self._timeout_secs, self._run_dir = command, log, timeout_secs, run_dir
        self._process = os.getpid()
        self._waiting: list[_Save] = []
        self._running: _Running | None = None
        self._closed = False
        self._results: list[Result] = []
        atexit.register(self.close)

    def committed(self, save: CommittedCheckpoint, target: SaveTarget) -> None:
        """Queue the save that was just committed to a target, before its next save begins."""
        try:
            held = target.keep()
        except (XhfError, OSError) as error:
            self._log.error(f'on_saved for {target.name}, {save.step.label} was skipped: {error}')
            return
        beside = self._run_dir if isinstance(held, StoredSave) else target.final.parent
        new = _Save(target.name, save.step, held, beside / f'{target.name}_on_saved' / save.step.label)
        if self._closed:
            self._drop(new)
            return
        for old in [old for old in self._waiting if old.name == new.name]:
            self._waiting.remove(old)
            self._log.info(f'{old.what} was skipped: there is a newer save, and an earlier one is not finished yet')
            old.held.release()
        self._waiting.append(new)
        self._go_on()

    def results(self) -> list[Result]:
        """The results since the last call. Also starts the next command when one has ended."""
        self._go_on()
        found, self._results = self._results, []
        return found

    def wait(self, secs: float) -> bool:
        """Wait until nothing is left to do; returns False if time ran out."""
        deadline = time.monotonic() + secs
        while True:
            self._go_on()
            if self._running is None:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECS)

    def close(self) -> None:
        """End what is running, drop what is waiting, release all folders. Does nothing in a forked child.

        A signal handler may call it in the middle of any other method.
        """
        if os.getpid() != self._process or self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        dropped, self._waiting = self._waiting, []
        for save in dropped:
            self._drop(save)
        if self._running is not None:
            _signal_group(self._running.process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.process.wait(_GRACE_SECS)
            self._end('ended: training has ended')

    def _go_on(self) -> None:
        if self._running is not None and self._running.process.poll() is not None:
            self._end()
        while self._running is None and self._waiting:
            save = self._waiting.pop(0)
            try:
                self._begin(save)
            except OSError as error:
                self._log.error(f'{save.what} failed; training goes on: it could not be started: {error}')
                save.held.release()

    def _begin(self, save: _Save) -> None:
        save.output.mkdir(parents=True, exist_ok=True)
        path: Path | str = save.held.url if isinstance(save.held, StoredSave) else save.held.path
        files = set() if isinstance(path, str) else _make_private(path)
        values = {'path': path, 'step': save.step.iteration, 'label': save.step.label, 'output': save.output}
        with save.log.open('ab') as log:
            start = log.tell()
            process = subprocess.Popen(
                [*_minded(self._timeout_secs), *fill_in(self._command, values)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=without_ranks(os.environ),
                start_new_session=True,  # Ctrl-C and other signals to the rank's process group must not reach it
            )
        self._running = _Running(save, process, time.monotonic(), start, files)
        with contextlib.suppress(OSError):  # not on Linux, or not allowed
            Path(f'/proc/{process.pid}/oom_score_adj').write_text(str(_OOM_SCORE))

    def _end(self, ended: str | None = None) -> None:
        """Report the command that has ended, or ``ended`` it, and end what it has left."""
        running, self._running = self._running, None
        save, secs = running.save, time.monotonic() - running.began
        _signal_group(running.process, signal.SIGKILL)
        status = running.process.wait()
        if ended is None and secs > self._timeout_secs:
            ended = 'ended: out of time'
        lines = _last_lines(save.log, running.log_start)
        if ended is None and status:
            last = f'; last line: {lines[-1][:200]}' if lines else ''
            ended = f'exit status {status}{last}' if status > 0 else f'killed by signal {-status}{last}'
        try:
            self._keep_added(running)
        except OSError as error:
            self._log.error(f'{save.what}: what it added to {{path}} could not be moved to {save.output}: {error}')
        save.held.release()
        if ended is not None:
            self._log.error(
                f'{save.what} failed after {secs:.1f} s; training goes on: {ended}. Its output is in {save.log}'
            )
            return
        found = numbers_in(lines)
        if found:
            self._results.append(Result(save.name, save.step, found))
        shown = ', '.join(f'{name} {value:.4g}' for name, value in list(found.items())[:8])
        self._log.info(f'{save.what} took {secs:.1f} s{": " * bool(shown)}{shown}')

    def _keep_added(self, running: _Running) -> None:
        """Move files that the command added to ``{path}`` to its output, since the folder will be removed."""
        held, output = running.save.held, running.save.output
        if isinstance(held, StoredSave):
            return
        for path in sorted(_files(held.path) - running.files):
            place = output / ADDED / path.relative_to(held.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, place)
            self._log.info(f'{running.save.what} added a file to {{path}}, which is now {place}')

    def _drop(self, save: _Save) -> None:
        self._log.warning(f'{save.what} was skipped: training has ended')
        save.held.release()


def after_saves_of_run(options: RunOptions | CallOptions, log: RunLog, run_dir: Path) -> AfterSaves | None:
    """The runner of the option ``on_saved``; None if it is not set. Runs on: rank 0.

    Raises:
        OptionError: There is no such program.
    """
    if options.on_saved is None:
        return None
    for program in (options.on_saved[0], 'nice', 'timeout'):
        if shutil.which(program) is None:
            raise OptionError('on_saved', 'a program on the PATH of rank 0, or its full path', program)
    return AfterSaves(options.on_saved, log, timeout_secs=MOST_SECS, run_dir=run_dir)


def wait_for_all(after_saves: AfterSaves | None, collective: Collective, secs: float, log: RunLog) -> None:
    """After training, wait until nothing is left to do. Runs on: all ranks.

    The other ranks wait on gloo, a short time at a time, since an NCCL collective may follow training.

    Args:
        after_saves: None on other ranks than rank 0.

    Raises:
        RankLostError: A rank did not take part.
    """
    deadline = time.monotonic() + secs
    if after_saves is not None and not after_saves.wait(0.0):
        log.info('waiting for on_saved')
    while True:
        left_secs = deadline - time.monotonic()
        waits = after_saves is not None and not after_saves.wait(max(0.0, min(_LOOK_SECS, left_secs)))
        if waits and left_secs <= _LOOK_SECS:
            log.error(f'on_saved did not finish within exit_wait_secs={secs:g} s')
            waits = False
        if not collective.broadcast(waits):
            return


def fill_in(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The arguments with placeholders such as ``{path}`` replaced by their values; other braces stay."""
    return [_PLACEHOLDER.sub(lambda found: str(values[found[0][1:-1]]), argument) for argument in command]


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what makes a process a rank. What the user sets stays, such as CUDA_VISIBLE_DEVICES."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_RANK and not name.startswith(_PREFIXES_OF_A_RANK)
    }


def numbers_in(lines: Sequence[str]) -> dict[str, float]:
    """The finite numbers in the last line that is a JSON object; nested names are joined by slashes."""
    for line in reversed(lines):
        if line.startswith('{'):
            with contextlib.suppress(ValueError, OverflowError, RecursionError):  # another line, or no result
                return dict(_flat(json.loads(line), ''))
    return {}


def _flat(found: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f'{prefix}{name}/')
        elif isinstance(value, (int, float)) and math.isfinite(value):
            yield f'{prefix}{name}', float(value)


def _minded(timeout_secs: float) -> list[str]:
    """What starts the command: each of these programs becomes the next one, and ``timeout`` waits for the command."""
    dies_with_us = ['setpriv', '--pdeathsig', 'TERM'] if shutil.which('setpriv') else []
    limit = str(max(timeout_secs, 0.001))  # 0 would be none
    return [*dies_with_us, 'nice', '-n', '10', 'timeout', '-k', str(_GRACE_SECS), limit]


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # all have ended
        os.killpg(process.pid, number)


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob('*') if not path.is_dir()}


def _make_private(folder: Path) -> set[Path]:
    """Make links to the files of a save safe to work with: copies of small ones, weights that are read-only.

    The weights are the save's own files, so those are read-only from now on as well.
    """
    files = _files(folder)
    for path in files:
        if path.suffix == '.safetensors':
            path.chmod(path.stat().st_mode & ~0o222)
        else:
            copy = path.with_name(f'{path.name}.copy')
            shutil.copy(path, copy)
            copy.replace(path)
    return files


def _last_lines(log: Path, start: int) -> list[str]:
    """The last lines of what a command has written to a log; carriage returns end lines, too."""
    try:
        with log.open('rb') as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _MOST_READ_NBYTES))
            lines = file.read().decode(errors='replace').splitlines()
    except OSError:
        return []
    return [line.strip() for line in lines if line.strip()]
