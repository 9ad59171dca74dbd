"""After an exception on all ranks the weights are saved under a name of their own; after one on some, nothing is."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.test_frontends import trainer_run
from tests.distributed.test_hook_runs import saves
from tests.helpers.compare import folder_tensors
from tests.helpers.frontends import verify_folder
from tests.helpers.ranks import run_ranks
from tests.helpers.scenarios import check, run_scenarios
from tests.helpers.torchrun import run_by_torchrun

EVERY = dict(interval=1, max_keep_ckpts=-1, save_on_exception=False)


def ended(hook: dict[str, Any], raising: dict[str, Any], work_dir: Path, **options: Any) -> list[str]:
    """A run that ends by an exception; returns those that Python then reports. Runs on: all ranks."""
    from tests.helpers.raising_run import raising_config
    from tests.helpers.toy_run import train

    reported: list[str] = []
    before = sys.excepthook
    sys.excepthook = lambda kind, error, where: reported.append(f'{kind.__name__}: {error}')
    try:
        train(raising_config(work_dir, hook, raising, **options))
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.excepthook = before
    _close(work_dir)
    return reported


def _close(work_dir: Path) -> None:
    """What the end of the process does."""
    from xhf_hooks.manager import CheckpointManager

    for manager in list(CheckpointManager._open):
        if work_dir in manager.newest.final.parents:
            manager.close()


def all_iterations(stage: int, work_dir: Path) -> None:
    ended(EVERY, dict(where='before_iter', ranks=[-1]), work_dir, stage=stage, max_iters=4)


def one_rank(work_dir: Path) -> list[str]:
    """It waits for the others, which wait for it in a collective, and lets them go when it leaves."""
    import torch.distributed as dist

    with mock.patch('xhf_hooks.on_demand.exceptions.WAIT_SECS', 1.0):
        reported = ended({}, dict(ranks=[1]), work_dir)
    if dist.get_rank() == 1:
        (work_dir / 'reported').write_text(json.dumps(reported))
        os._exit(1)
    return reported


def callback(work_dir: Path) -> list[str]:
    from transformers import Trainer

    step = Trainer.training_step
    steps: list[int] = []

    def raising_step(self: Trainer, *args: Any, **named: Any) -> Any:
        steps.append(self.state.global_step)
        if self.state.global_step == 3:
            raise RuntimeError('CUDA out of memory')
        return step(self, *args, **named)

    options = dict(save_strategy='steps', save_steps=2, save_on_exception=True)
    with mock.patch.object(Trainer, 'training_step', raising_step), mock.patch.object(sys, 'excepthook', print):
        try:
            trainer_run(options, dict(save_strategy='no', max_steps=8), 3, False, work_dir)
        except RuntimeError as error:
            sys.excepthook(type(error), error, error.__traceback__)
    _close(work_dir)
    return sorted(path.name for path in work_dir.iterdir())


SCENARIOS: dict[str, Any] = {
    **{f'all{stage}': partial(all_iterations, stage) for stage in (2, 3)},
    'before_iter': partial(ended, {}, dict(where='before_iter')),
    'iter': partial(ended, {}, dict(where='iter')),
    'forward': partial(ended, {}, dict(where='forward')),
    'forward_stream': partial(ended, dict(writer='stream'), dict(where='forward')),
    'zero2': partial(ended, {}, dict(where='forward'), stage=2),
    'async': partial(ended, dict(async_save=True, interval=3), dict(where='forward')),
    'val': partial(ended, dict(interval=-1), dict(where='val'), scores=[0.5] * 5),
    'ctrl_c': partial(ended, {}, dict(error='KeyboardInterrupt')),
    'off': partial(ended, dict(save_on_exception=False), {}),
}


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('exceptions')
    return root, run_scenarios({name: partial(scenario, root / name) for name, scenario in SCENARIOS.items()}, 2)


def log_dir_of(root: Path) -> Path:
    (log,) = root.glob('*/*.log')
    return log.parent


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob('*.safetensors')}


@pytest.mark.parametrize(
    ('name', 'newest', 'weights'),
    [
        ('before_iter', 2, 3),
        ('iter', 4, 4),
        ('forward', 2, 3),
        ('forward_stream', 2, 3),
        ('zero2', 2, 3),
        ('async', 3, 3),
    ],
)
def test_the_weights_are_those_in_memory(finished, name, newest, weights):
    root, outcomes = finished
    assert check(outcomes, name) == [['Boom: what users see']] * 2
    log_dir = log_dir_of(root / name)
    assert saves(log_dir) == {'hf_model': newest, 'hf_model_exception': weights}
    every = log_dir_of(root / ('all2' if name == 'zero2' else 'all3'))
    check(outcomes, every.parent.name)
    folders = {iteration: every / folder for folder, iteration in saves(every).items()}
    for folder, iteration in (('hf_model', newest), ('hf_model_exception', weights)):
        verify_folder(log_dir / folder)
        assert bytes_of(log_dir / folder) == bytes_of(folders[iteration]), folder
    manifest = json.loads((log_dir / 'hf_model_exception' / 'xhf_manifest.json').read_text())
    assert manifest['exception'] == 'Boom: what users see'


def test_in_a_validation(finished):
    root, outcomes = finished
    assert check(outcomes, 'val') == [['Boom: in a validation']] * 2
    assert saves(log_dir_of(root / 'val')) == {'hf_model_exception': 4}


@pytest.mark.parametrize(('name', 'error'), [('ctrl_c', 'KeyboardInterrupt'), ('off', 'Boom')])
def test_otherwise_nothing_is_saved(finished, name, error):
    root, outcomes = finished
    assert check(outcomes, name) == [[f'{error}: what users see']] * 2
    assert saves(log_dir_of(root / name)) == {'hf_model': 4}


def test_one_rank_alone_cannot_save(tmp_path):
    lost, _ = run_ranks(one_rank, 2, tmp_path / 'run', expected_deaths=(1,))
    assert json.loads((tmp_path / 'run' / 'reported').read_text()) == ['Boom: what users see']
    assert len(lost) == 1 and 'Boom' not in lost[0], 'it lost its connection to the other'
    log_dir = log_dir_of(tmp_path / 'run')
    assert saves(log_dir) == {'hf_model': 4}
    verify_folder(log_dir / 'hf_model')
    assert list(log_dir.glob('.hf_model*')) == []


@pytest.mark.modern_only  # how a program ends does not depend on the stack
def test_a_program_that_ends_by_it(tmp_path):
    done = run_by_torchrun('raising_run', str(tmp_path / 'run'))
    output = done.stdout
    assert done.returncode != 0 and output.count('Boom: what users see') >= 2, output[-5000:]
    log_dir = log_dir_of(tmp_path / 'run')
    assert saves(log_dir) == {'hf_model': 4, 'hf_model_exception': 4}, output[-5000:]
    verify_folder(log_dir / 'hf_model_exception')
    assert (tmp_path / 'run' / 'stored' / 'hf_model_exception.json').is_file(), output[-5000:]
    text = next(log_dir.glob('*.log')).read_text()
    assert 'on_saved for hf_model_exception, iter_4 was skipped: training has ended' in text, output[-5000:]
    assert not (log_dir / 'hf_model_exception_on_saved').exists()
    assert [path.name for path in log_dir.iterdir() if 'kept' in path.name] == []


@pytest.mark.modern_only
def test_in_trainer(tmp_path):
    names = check(run_scenarios({'callback': partial(callback, tmp_path / 'run')}, 2), 'callback')[0]
    assert names == ['hf_model', 'hf_model_exception'], names
    manifest = json.loads((tmp_path / 'run' / 'hf_model_exception' / 'xhf_manifest.json').read_text())
    assert manifest['iteration'] == 3 and manifest['exception'] == 'RuntimeError: CUDA out of memory'
    assert folder_tensors(tmp_path / 'run' / 'hf_model_exception')
