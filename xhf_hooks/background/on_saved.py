"""Runs the ``on_saved`` command for one save after another, beside training. Runs on: rank 0, the training thread.

Nothing here has a thread: each iteration asks whether the command has ended (:meth:`AfterSaves.look`).
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.collective import Collective
from xhf_hooks.errors import OptionError, XhfError
from xhf_hooks.options import PLACEHOLDERS
from xhf_hooks.places.kept_folder import KeptFolder
from xhf_hooks.places.store import StoredSave
from xhf_hooks.places.target import SaveTarget
from xhf_hooks.planning.types import Step
from xhf_hooks.telemetry import RunLog

LOG_NAME = 'output.log'
#: Folder beside the log for what a command adds to ``{path}``.
ADDED = 'added'
#: Time limit of a command. ``timeout`` in the command sets a shorter one.
MOST_SECS = 24 * 3600.0
#: Seconds between SIGTERM and SIGKILL.
_GRACE_SECS = 5
_POLL_SECS = 0.05
#: When memory runs out, the kernel kills the command before training.
_OOM_SCORE = 500
#: Of the output; the result is in its last lines.
_MOST_READ_NBYTES = 2**20
_PLACEHOLDER = re.compile('|'.join(re.escape(f'{{{name}}}') for name in PLACEHOLDERS))
#: Variables that torchrun, deepspeed, accelerate, MPI and SLURM's srun set for a rank. A program that finds them would
#: act as a rank and wait for the others.
_OF_A_RANK = re.compile(
    r'(RANK|WORLD_SIZE|NODE_RANK|CROSS_(RANK|SIZE)|MASTER_(ADDR|PORT)|(TORCH_)?NCCL_ASYNC_ERROR_HANDLING'
    r'|(LOCAL|GROUP|ROLE)_(RANK|NAME|SIZE|WORLD_SIZE)|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|STEP_NUM_TASKS)'
    r'|(TORCHELASTIC|ACCELERATE|FSDP|OMPI|PMI|PMIX|MV2_COMM|PALS)_.*)'
)


@dataclass
class _Job:
    """The command for one save, which waits or runs.

    Attributes:
        held: Keeps the save's files, on the disk or in a store, until it is released.
        output: Folder for results.
        log_start: Where the command's output begins in the log.
        files: What was in ``{path}``.
    """

    name: str
    step: Step
    held: KeptFolder | StoredSave
    output: Path
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    log_start: int = 0
    files: frozenset[Path] = frozenset()

    def __str__(self) -> str:
        return f'on_saved for {self.name}, {self.step.label}'

    @property
    def log(self) -> Path:
        return self.output / LOG_NAME


class AfterSaves:
    """Runs a command after each save, one at a time.

    A new save replaces a waiting one of the same name. Failures are logged and never stop training.

    Args:
        command: Its arguments, with placeholders.
        on_result: Called with the step of a save and the numbers that the command printed for it, named for a
            visualizer: ``on_saved/hf_model/accuracy``.
        run_dir: Local folder of the run, for results where saves are only in a store.

    Raises:
        OptionError: There is no such program.
    """

    name, must_finish = 'on_saved', False

    def __init__(
        self,
        command: Sequence[str],
        log: RunLog,
        on_result: Callable[[Step, Mapping[str, float]], None],
        *,
        run_dir: Path = Path(),
        timeout_secs: float = MOST_SECS,
    ) -> None:
        for program in (command[0], 'nice', 'timeout'):
            if shutil.which(program) is None:
                raise OptionError('on_saved', 'a program on the PATH of rank 0, or its full path', program)
        self._command, self._log, self._on_result = command, log, on_result
        self._timeout_secs, self._run_dir = timeout_secs, run_dir
        self._process = os.getpid()
        self._new: deque[_Job] = deque()  # the thread that saves adds to it
        self._waiting: dict[str, _Job] = {}  # by name
        self._running: _Job | None = None
        self._closed = False
        atexit.register(self.close)

    def committed(self, target: SaveTarget, step: Step, collective: Collective | None = None) -> None:
        """Keep the files of the save that was just committed. Runs on: the thread that saves."""
        try:
            held = target.keep()
        except (XhfError, OSError) as error:
            self._log.error(f'on_saved for {target.name}, {step.label} was skipped: {error}')
            return
        beside = self._run_dir if isinstance(held, StoredSave) else target.final.parent
        job = _Job(target.name, step, held, beside / f'{target.name}_on_saved' / step.label)
        if self._closed:
            self._skip(job, 'training has ended')
        else:
            self._new.append(job)

    def look(self) -> None:
        """If the command has ended, report it and start the next one."""
        if self._closed:
            return
        if self._running is not None and self._running.process.poll() is not None:
            self._end()
        self._take_new()
        while self._running is None and self._waiting:
            job = self._waiting.pop(next(iter(self._waiting)))
            try:
                self._start(job)
            except OSError as error:
                self._log.error(f'{job} failed; training goes on: it could not be started: {error}')
                job.held.release()

    def wait(self, secs: float) -> bool:
        """Wait until nothing is left to do; returns False if time ran out."""
        deadline = time.monotonic() + secs
        self.look()
        while self._running is not None and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
            self.look()
        return self._running is None

    def close(self) -> None:
        """End what is running, drop what is waiting, release all folders. Does nothing in a forked child."""
        if os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._take_new()
        while self._waiting:
            self._skip(self._waiting.popitem()[1], 'training has ended')
        if self._running is not None:
            _signal_group(self._running.process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running.process.wait(_GRACE_SECS)
            self._end('ended: training has ended')

    def _skip(self, job: _Job, why: str) -> None:
        self._log.warning(f'{job} was skipped: {why}')
        job.held.release()

    def _take_new(self) -> None:
        while self._new:
            job = self._new.popleft()
            if old := self._waiting.pop(job.name, None):
                self._skip(old, 'there is a newer save, and an earlier one is not finished yet')
            self._waiting[job.name] = job

    def _start(self, job: _Job) -> None:
        job.output.mkdir(parents=True, exist_ok=True)
        if isinstance(job.held, KeptFolder):
            job.files = _make_private(job.held.path)
        path = job.held.url if isinstance(job.held, StoredSave) else job.held.path
        values = {'path': path, 'step': job.step.iteration, 'label': job.step.label, 'output': job.output}
        # Each of these programs becomes the next one, and ``timeout``, for which 0 is no limit, waits for the command
        dies_with_us = ['setpriv', '--pdeathsig', 'TERM'] if shutil.which('setpriv') else []
        limited = ['nice', '-n', '10', 'timeout', '-k', str(_GRACE_SECS), str(max(self._timeout_secs, 0.001))]
        with job.log.open('ab') as log:
            job.log_start, job.began = log.tell(), time.monotonic()
            job.process = subprocess.Popen(
                [*dies_with_us, *limited, *fill_in(self._command, values)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not _OF_A_RANK.fullmatch(name)},
                start_new_session=True,  # Ctrl-C and other signals to the rank's process group must not reach it
            )
        self._running = job
        with contextlib.suppress(OSError):  # not on Linux, or not allowed
            Path(f'/proc/{job.process.pid}/oom_score_adj').write_text(str(_OOM_SCORE))

    def _end(self, ended: str | None = None) -> None:
        """Report the command that has ended, or ``ended`` it, and end what it has left."""
        job, self._running = self._running, None
        secs = time.monotonic() - job.began
        _signal_group(job.process, signal.SIGKILL)
        status = job.process.wait()
        lines = _last_lines(job.log, job.log_start)
        if ended is None and secs > self._timeout_secs:
            ended = 'ended: out of time'
        elif ended is None and status:
            ended = f'exit status {status}' if status > 0 else f'killed by signal {-status}'
            ended += f'; last line: {lines[-1][:200]}' if lines else ''
        try:
            self._keep_added(job)
        except OSError as error:
            self._log.error(f'{job}: what it added to {{path}} could not be moved to {job.output}: {error}')
        job.held.release()
        if ended is not None:
            self._log.error(f'{job} failed after {secs:.1f} s; training goes on: {ended}. Its output is in {job.log}')
            return
        if found := numbers_in(lines):
            self._on_result(job.step, {f'on_saved/{job.name}/{name}': value for name, value in found.items()})
        shown = ', '.join(f'{name} {value:.4g}' for name, value in list(found.items())[:8])
        self._log.info(f'{job} took {secs:.1f} s{": " * bool(shown)}{shown}')

    def _keep_added(self, job: _Job) -> None:
        """Move files that the command added to ``{path}`` to its output, since the folder will be removed."""
        if isinstance(job.held, StoredSave):
            return
        for path in sorted(_files(job.held.path) - job.files):
            place = job.output / ADDED / path.relative_to(job.held.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, place)
            self._log.info(f'{job} added a file to {{path}}, which is now {place}')


def fill_in(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The arguments with placeholders such as ``{path}`` replaced by their values; other braces stay."""
    return [_PLACEHOLDER.sub(lambda found: str(values[found[0][1:-1]]), argument) for argument in command]


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


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # all have ended
        os.killpg(process.pid, number)


def _files(folder: Path) -> frozenset[Path]:
    return frozenset(path for path in folder.rglob('*') if not path.is_dir())


def _make_private(folder: Path) -> frozenset[Path]:
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
    with contextlib.suppress(OSError), log.open('rb') as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _MOST_READ_NBYTES))
        lines = file.read().decode(errors='replace').splitlines()
        return [line.strip() for line in lines if line.strip()]
    return []
