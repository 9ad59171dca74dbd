"""Launches `xtuner train`, each run once, and finds what it left."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.helpers.ranks import RankFailures, python_path, run_ranks

HERE = Path(__file__).parent
TIMEOUT_SECS = 1800  # a run takes half a minute; what takes so long on a busy machine hangs
OUTPUT_TAIL = 6000
#: The DeepSpeed config that :func:`partitioning_config` makes.
PARTITIONED = 'partitioned.json'
TORCHRUN = [
    *(sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2'),
    *('-m', 'xtuner.tools.train'),
]
#: The run that torchrun itself starts.
WITH_TORCHRUN = 'llama3_8b_instruct_full_alpaca_zero3'


@dataclass(frozen=True)
class Launch:
    """One `xtuner train`.

    Attributes:
        deepspeed: What `--deepspeed` is given, with two processes; None is one process without DeepSpeed.
        settings: Name to value in PART 1 of the config.
        config: File in this folder.
        data: File in the root.
        resumes: Goes on, by the config that it dumped, from an iteration of another launch; all else is ignored.
    """

    family: str
    deepspeed: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    config: str = 'config.py'
    data: str = 'data.json'
    resumes: tuple[str, int] | None = None


class Runs:
    """Launches each run once, when its result is first asked for.

    Args:
        root: Has a folder with the base model of each family, and the data.
    """

    def __init__(self, root: Path, launches: dict[str, Launch]) -> None:
        self._root, self._launches = root, launches
        self._outcomes: dict[str, tuple[int | None, str]] = {}

    def work_dir(self, name: str) -> Path:
        """The folder of a finished run.

        Raises:
            AssertionError: It failed; the end of its output is in the message.
        """
        if name not in self._outcomes:
            launch = self._launches[name]
            command = self._resume(*launch.resumes) if launch.resumes else self._train(launch, name)
            self._outcomes[name] = run([*command, '--work-dir', str(self._root / name)], self._root, name)
        assert_ran(self._outcomes[name], name)
        return self._root / name

    def _train(self, launch: Launch, name: str) -> list[str]:
        base, data = str(self._root / launch.family), str(self._root / launch.data)
        config = self._root / f'{name}.py'
        config.write_text(
            filled_in(launch.config, pretrained_model_name_or_path=base, data_path=data, **launch.settings)
        )
        if launch.deepspeed is None:
            return [sys.executable, '-m', 'xtuner.tools.train', str(config)]
        return [*TORCHRUN, str(config), '--launcher', 'pytorch', '--deepspeed', launch.deepspeed]

    def _resume(self, name: str, iteration: int) -> list[str]:
        started = self.work_dir(name)
        dumped, checkpoint = started / f'{name}.py', started / f'iter_{iteration}.pth'
        return [*TORCHRUN, str(dumped), '--launcher', 'pytorch', '--resume', str(checkpoint)]


def run(command: list[str], folder: Path, name: str) -> tuple[int | None, str]:
    """Exit status (None after a time-out) and output of a command that finds its inputs in `folder`.

    What torchrun would start is forked from a process that has its imports done, but for :data:`WITH_TORCHRUN`.
    """
    if command[: len(TORCHRUN)] == TORCHRUN and name != WITH_TORCHRUN:
        return _run_forked(command[len(TORCHRUN) :], folder, name)
    file = folder / f'{name}.output'
    with file.open('wb') as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(folder), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(TIMEOUT_SECS)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            process.terminate()  # torchrun then ends its processes, too
            process.wait()
    return status, file.read_text(errors='replace')


def _run_forked(arguments: list[str], folder: Path, name: str) -> tuple[int, str]:
    file = folder / f'{name}.output'
    file.touch()
    try:
        run_ranks(_train_on_rank, 2, arguments, folder, file, init=None, timeout_secs=TIMEOUT_SECS)
    except RankFailures as failures:
        return 1, f'{file.read_text(errors="replace")}\n{failures}'
    return 0, file.read_text(errors='replace')


def _train_on_rank(arguments: list[str], folder: Path, output: Path) -> None:
    """`python -m xtuner.tools.train ARGUMENTS` on one of torchrun's processes."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    os.environ.update(environment(folder))
    sys.argv = ['xtuner.tools.train', *arguments]
    runpy.run_module('xtuner.tools.train', run_name='__main__', alter_sys=True)


def assert_ran(outcome: tuple[int | None, str], name: str) -> None:
    """Else the end of its output is in the message."""
    status, output = outcome
    assert status == 0, f'{name}: exit status {status} (None: more than {TIMEOUT_SECS} s)\n{output[-OUTPUT_TAIL:]}'


def filled_in(config: str, **settings: Any) -> str:
    """The text of a config, with what all have in common, and with other values of its settings."""
    text = f'{(HERE / config).read_text()}\n{(HERE / "runtime.py").read_text()}'
    for name, value in settings.items():
        text, count = re.subn(rf'^{name} = .*$', f'{name} = {value!r}', text, flags=re.MULTILINE)
        assert count == 1, f'{config} sets {name} {count} times'
    return text


def partitioning_config() -> dict[str, Any]:
    """XTuner's deepspeed_zero3, but tiny parameters, too, are partitioned and not kept whole on every rank."""
    (xtuner,) = find_spec('xtuner').submodule_search_locations
    config = json.loads(Path(xtuner, 'configs', 'deepspeed', 'deepspeed_zero3.json').read_text())
    config['zero_optimization']['stage3_param_persistence_threshold'] = 0
    return config


def environment(cache: Path) -> dict[str, str]:
    return os.environ | {
        'PYTHONPATH': os.pathsep.join([str(HERE), python_path()]),
        'DS_ACCELERATOR': 'cpu',
        'CUDA_VISIBLE_DEVICES': '',
        'OMP_NUM_THREADS': '1',
        'HF_HOME': str(cache / 'hf_home'),
        'HF_HUB_OFFLINE': '1',
        'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '1',  # XTuner 0.2.0 reads the seed of what it resumes as torch 2.5 did
    }


def export_of(work_dir: Path) -> Path:
    """The one export of a run: work_dir/<timestamp>/hf_model."""
    (folder,) = work_dir.glob('*/hf_model')
    return folder


def log_of(work_dir: Path) -> str:
    log_dir = export_of(work_dir).parent
    return (log_dir / f'{log_dir.name}.log').read_text()


def saves_in(log: str) -> list[str]:
    return re.findall(r'HFCheckpointHook: saved (\w+) to', log)
