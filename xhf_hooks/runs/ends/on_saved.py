"""``on_saved``: runs a command for one save after another, while training goes on. Runs on: rank 0.

Standard programs look after it: ``timeout`` ends it with its process group, ``nice`` lowers its priority, and
``setpriv`` (util-linux), where there is one, ends it when this process is killed.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping, Sequence
from logging import LoggerAdapter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.errors import OptionError
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import Step
from xhf_hooks.runs.ends.each_save import EachSave, SaveJob

if TYPE_CHECKING:
    from typing_extensions import Self

LOG_NAME = 'output.log'
#: Time limit of a command. ``timeout`` in the command sets a shorter one.
MOST_SECS = 24 * 3600.0
#: Seconds between SIGTERM and SIGKILL.
_GRACE_SECS = 5
_POLL_SECS = 0.05
#: When memory runs out, the kernel kills the command before training.
_OOM_SCORE = 500
#: Of the output; the result is in its last lines.
_MOST_READ_NBYTES = 2**20
_PLACEHOLDER = re.compile(r'\{(path|step|label|output)\}')
#: Variables by which torchrun, deepspeed, accelerate, MPI and SLURM's srun describe a rank, and by which launchers find
#: nodes (PET_* of torchrun, set by Kubeflow; NNODES and NPROC_PER_NODE, read by ms-swift and others). With them, a
#: program would act as a rank, or a launcher as a node of the training, and wait for the other ranks.
_OF_A_RANK = re.compile(
    r'(RANK|WORLD_SIZE|CROSS_(RANK|SIZE)|(MASTER_)?(ADDR|PORT)|NNODES|NODE_RANK|NPROC(_PER_NODE)?'
    r'|(TORCH_)?NCCL_ASYNC_ERROR_HANDLING|(LOCAL|GROUP|ROLE)_(RANK|NAME|SIZE|WORLD_SIZE)'
    r'|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|STEP_NUM_TASKS)|MPI_LOCAL(NRANKS|RANKID)'
    r'|(PET|TORCHELASTIC|ACCELERATE|FSDP|OMPI|PMI|PMIX|MV2_COMM|PALS)_.*)'
)


class OnSaved(EachSave):
    """Runs a command after each save.

    Args:
        command: Its arguments, with placeholders.

    Attributes:
        results: The step of a save and the numbers that the command printed for it, named for a visualizer:
            ``on_saved/hf_model/accuracy``. The reader removes them.
    """

    def __init__(self, command: Sequence[str], log: LoggerAdapter) -> None:
        self._command = command
        self.results: deque[tuple[Step, Mapping[str, float]]] = deque()
        super().__init__('on_saved', 'on_saved for', log, must_finish=False)

    def start(self) -> Self:
        """Start the thread; returns this task.

        Raises:
            OptionError: There is no such program.
        """
        for program in (self._command[0], 'nice', 'timeout'):
            if shutil.which(program) is None:
                raise OptionError('on_saved', 'a program on the PATH of rank 0, or its full path', program)
        return super().start()

    def handle_commit(self, target: CheckpointFolder, step: Step) -> None:
        """Pin the save that was just committed, and queue the command."""
        if pinned := self.pin(target, step):
            self.add(SaveJob(target.name, step, pinned.path, pinned.unpin))

    def process(self, job: SaveJob) -> None:
        """Run the command, and log what became of it."""
        began = time.monotonic()
        output = job.folder.with_name(f'{job.name}_on_saved') / job.step.label
        output.mkdir(parents=True, exist_ok=True)
        values = {'path': job.folder, 'step': job.step.iteration, 'label': job.step.label, 'output': output}
        with (output / LOG_NAME).open('ab') as log:
            log_start = log.tell()
            process = _start(fill_in(self._command, values), log)
        try:
            while process.poll() is None:
                self.pause(_POLL_SECS)
        finally:
            status = _end(process)
        secs, lines = time.monotonic() - began, _last_lines(output / LOG_NAME, log_start)
        if status:
            ended = f'exit status {status}' if status > 0 else f'killed by signal {-status}'
            ended += f'; last line: {lines[-1][:200]}' if lines else ''
            where = f'Its output is in {output / LOG_NAME}'
            self._log.error(f'{self._what} {job} failed after {secs:.1f} s; training goes on: {ended}. {where}')
            return
        if found := numbers_in(lines):
            self.results.append((job.step, {f'on_saved/{job.name}/{name}': value for name, value in found.items()}))
        shown = ', '.join(f'{name} {value:.4g}' for name, value in list(found.items())[:8])
        self._log.info(f'{self._what} {job} took {secs:.1f} s{": " * bool(shown)}{shown}')


def _start(command: Sequence[str], log: Any) -> subprocess.Popen[bytes]:
    """Start the command, with its output in the log."""
    # Each of these programs becomes the next one, and ``timeout`` waits for the command
    dies_with_us = ['setpriv', '--pdeathsig', 'TERM'] if shutil.which('setpriv') else []
    # Of lower priority than the thread that starts it
    limited = ['nice', '-n', '5', 'timeout', '-k', str(_GRACE_SECS), str(MOST_SECS)]
    process = subprocess.Popen(
        [*dies_with_us, *limited, *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={name: value for name, value in os.environ.items() if not _OF_A_RANK.fullmatch(name)},
        start_new_session=True,  # Ctrl-C and other signals to the rank's process group must not reach it
    )
    with contextlib.suppress(OSError):  # not on Linux, or not allowed
        Path(f'/proc/{process.pid}/oom_score_adj').write_text(str(_OOM_SCORE))
    return process


def _end(process: subprocess.Popen[bytes]) -> int:
    """End the command, if it has not ended, and processes that it has left; returns its exit status."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECS)
    _signal_group(process, signal.SIGKILL)
    return process.wait()


def fill_in(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The arguments with placeholders such as ``{path}`` replaced by their values; other braces stay."""
    return [_PLACEHOLDER.sub(lambda found: str(values[found[1]]), argument) for argument in command]


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


def _last_lines(log: Path, start: int) -> list[str]:
    """The last lines of what a command has written to a log; carriage returns end lines, too."""
    with contextlib.suppress(OSError), log.open('rb') as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - _MOST_READ_NBYTES))
        lines = file.read().decode(errors='replace').splitlines()
        return [line.strip() for line in lines if line.strip()]
    return []
