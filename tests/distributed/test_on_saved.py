"""What is done after each save, in real runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.test_hook_runs import run, saves
from tests.helpers import on_saved_family, on_saved_program
from tests.helpers.assert_intact import assert_whole
from tests.helpers.frontends import trainer_run
from tests.helpers.ranks import run_ranks
from tests.helpers.scenarios import check, run_scenarios
from tests.helpers.zero_config import zero_config
from tests.unit.background.test_on_saved import FAMILY, alive, members, until

EVERY_TWO = dict(interval=2, by_epoch=False)
NO_CHECKPOINTS = dict(type='CheckpointHook', interval=-1, by_epoch=False)


def program(step_to_wait_for: int, loads: bool) -> list[str]:
    """The first save's command waits until that of a later iteration has taken its place, and may load it then."""
    given = ['{path}', '{step}', '{output}']
    command = ' '.join([sys.executable, on_saved_program.__file__])
    waits = f'[ $2 = 2 ] && set -- "$@" {step_to_wait_for} {"load" if loads else ""}; exec {command} "$@"'
    return ['sh', '-c', waits, 'sh', *given]


def ended_run(hook: dict[str, Any], work_dir: Path, **options: Any) -> str:
    return run(
        dict(hook={**EVERY_TWO, **hook}, **{'stage': 3, 'checkpoint': NO_CHECKPOINTS, 'max_iters': 6, **options}),
        work_dir,
    )


#: Prints how many files are in a folder, or at a ``file://`` URL, and the iteration.
LOOKS = [
    *(sys.executable, '-c'),
    'import json, sys; from pathlib import Path; files = list(Path(sys.argv[1].removeprefix("file://")).iterdir()); '
    'print(json.dumps({"files": len(files), "iteration": int(sys.argv[2]), "path": sys.argv[1]}))',
    *('{path}', '{step}'),
]


def callback(work_dir: Path, **more: Any) -> list[dict[str, Any]]:
    """Returns what is in Trainer's log of this."""
    from xhf_hooks.integrations.transformers import HFCheckpointCallback

    ended, log = HFCheckpointCallback.on_train_end, []

    def on_train_end(self: Any, args: Any, state: Any, *more: Any, **named: Any) -> None:
        ended(self, args, state, *more, **named)
        log.extend(line for line in state.log_history if any(name.startswith('on_saved/') for name in line))

    options = dict(save_strategy='steps', save_steps=2, **more)
    with mock.patch.object(HFCheckpointCallback, 'on_train_end', on_train_end):
        trainer_run(options, {}, zero_config(3), work_dir)
    return log


SCENARIOS: dict[str, Any] = {
    'program': partial(ended_run, dict(on_saved=program(6, True))),
    'program_async': partial(ended_run, dict(on_saved=program(4, False), async_save=True), max_iters=5),
    'too_long': partial(ended_run, dict(on_saved=[*FAMILY, '{output}', '10000'], exit_wait_secs=3)),
}


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('on_saved')
    return run_scenarios({name: partial(scenario, root / name) for name, scenario in SCENARIOS.items()}, 2)


def only(outcomes: Any, name: str) -> Path:
    """The folder of the run, in which nothing hidden is left."""
    (log_dir,) = set(check(outcomes, name))
    assert [path.name for path in Path(log_dir).glob('.hf_model*') if 'kept' in path.name] == []
    return Path(log_dir)


def scalars(log_dir: Path, prefix: str = 'on_saved/hf_model/') -> dict[int, dict[str, float]]:
    """By the step that the visualizer was given."""
    lines = [json.loads(line) for line in (log_dir / 'vis_data' / 'scalars.json').read_text().splitlines()]
    found = [line for line in lines if any(name.startswith(prefix) for name in line)]
    return {line['step']: {k.removeprefix(prefix): v for k, v in line.items() if k != 'step'} for line in found}


def log_text(log_dir: Path) -> str:
    return next(log_dir.glob('*.log')).read_text()


@pytest.mark.parametrize(('name', 'last'), [('program', 6), ('program_async', 5)])
def test_a_program_loads_the_save_that_others_have_followed(finished, name, last):
    log_dir = only(finished, name)
    assert saves(log_dir) == {'hf_model': last}
    assert_whole(log_dir / 'hf_model')
    found = scalars(log_dir)
    assert min(found) == 2 and max(found) == last
    for step, numbers in found.items():
        assert numbers['iteration'] == numbers['step'] == step and numbers['is_rank'] == 0 and numbers['nice'] >= 10
        output = log_dir / 'hf_model_on_saved' / f'iter_{step}'
        assert sorted(path.name for path in output.iterdir()) == ['output.log', 'own_file']
        log = (output / 'output.log').read_text()
        assert 'a line before' in log and 'a line of errors' in log
    if name == 'program':
        assert found[2]['loaded/tensors'] == 21 and found[2]['loaded/missing'] == 0
    assert f'on_saved for hf_model, iter_{last} took' in log_text(log_dir)


def test_nothing_of_a_program_is_left_after_the_run(finished):
    log_dir = only(finished, 'too_long')
    assert 'on_saved: not finished within exit_wait_secs=3 s' in log_text(log_dir)
    (output,) = (log_dir / 'hf_model_on_saved').iterdir()
    assert output.name == 'iter_2' and members(output) and alive(members(output)) == []


def killed(work_dir: Path) -> None:
    """All ranks are killed while a command is running. Runs on: all ranks."""
    from mmengine.hooks import Hook
    from mmengine.registry import HOOKS

    class KillHook(Hook):
        priority = 99

        def after_train_iter(self, runner: Any, *more: Any, **named: Any) -> None:
            if runner.iter == 3:
                output = Path(runner.log_dir, 'hf_model_on_saved', 'iter_2')
                until(lambda: len(members(output)) == on_saved_family.MEMBERS)
                os.kill(os.getpid(), signal.SIGKILL)

    HOOKS.register_module(module=KillHook, force=True)
    ended_run(dict(on_saved=[*FAMILY, '{output}', '10000']), work_dir, hooks=[dict(type='KillHook')])


def test_a_killed_run_leaves_a_save_and_no_process(tmp_path):
    from xhf_hooks.places.checkpoint_folder import CheckpointFolder

    run_ranks(killed, 2, tmp_path / 'run', expected_deaths=(0, 1))
    ((log_dir),) = (path.parent for path in (tmp_path / 'run').glob('*/hf_model'))
    until(lambda: alive(members(log_dir / 'hf_model_on_saved' / 'iter_2')) == [])
    assert_whole(log_dir / 'hf_model')
    assert len(list(log_dir.glob('.hf_model.kept-*'))) == 2, 'what was read, and what waited'
    folder = CheckpointFolder(log_dir / 'hf_model', max_keep=1)
    folder.claim()  # as the next run does
    folder.release()
    assert list(log_dir.glob('.hf_model.kept-*')) == []


def test_the_log_of_trainer_has_the_numbers(tmp_path):
    stored = dict(out_dir=(tmp_path / 'stored').as_uri())
    scenarios = {
        'folder': partial(callback, tmp_path / 'run', on_saved=LOOKS),
        'store': partial(callback, tmp_path / 'run_to_store', on_saved=LOOKS, **stored),
    }
    results = run_scenarios(scenarios, 2)
    for name in ('folder', 'store'):
        logs = check(results, name)
        assert [(line['step'], line['on_saved/hf_model/iteration']) for line in logs[0]] == [(2, 2), (4, 4)]
        assert logs[1] == []
        assert all(line['on_saved/hf_model/files'] >= 3 for line in logs[0])
    for step in (2, 4):
        output = tmp_path / 'run_to_store' / 'hf_model_on_saved' / f'iter_{step}' / 'output.log'
        assert json.loads(output.read_text())['path'].startswith(stored['out_dir'])
