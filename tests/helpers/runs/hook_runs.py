"""Whole MMEngine runs with the hook, and what they leave."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.ranks.scenarios import check, error_of
from tests.helpers.runs.toy_run import ToyLM, run_config, train

#: MMEngine reads its own checkpoints with torch.load, which by default refuses them.
READS_OWN_CHECKPOINTS = {'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD': '1'}


def run(options: dict[str, Any], work_dir: Path) -> str:
    return train(run_config(work_dir, **options)).log_dir


def refusal_of(train: Callable[[], Any]) -> str:
    """The error of a run that must not start. Runs on: all ranks."""
    with mock.patch.object(ToyLM, 'forward', side_effect=AssertionError('training began')):
        return error_of(train)


def log_dir_of(finished: Any, name: str) -> Path:
    values = check(finished, name)
    assert len(set(values)) == 1
    return Path(values[0])


def saves(log_dir: Path) -> dict[str, int]:
    """Name of each committed folder, to the iteration that it was saved at."""
    manifests = log_dir.glob('hf_model*/xhf_manifest.json')
    return {path.parent.name: json.loads(path.read_text())['iteration'] for path in manifests}


def log_of(log_dir: str | Path) -> str:
    return (Path(log_dir) / f'{Path(log_dir).name}.log').read_text()
