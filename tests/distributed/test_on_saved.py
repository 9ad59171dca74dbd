"""What is done after each save, in real runs."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.test_hook_runs import log_dir_of, log_of, run, saves, scalars
from tests.helpers import on_saved_program
from tests.helpers.assert_intact import assert_whole
from tests.helpers.frontends import trainer_run
from tests.helpers.scenarios import check, run_scenarios
from tests.helpers.zero_config import zero_config

#: The first save's command waits until the last one has taken its place, and loads it then.
PROGRAM = [
    *('sh', '-c', f'[ $2 = 2 ] && set -- "$@" 6 load; exec {sys.executable} {on_saved_program.__file__} "$@"', 'sh'),
    *('{path}', '{step}', '{output}'),
]
#: Prints how many files are in a folder, or at a ``file://`` URL, and the iteration.
LOOKS = [
    *(sys.executable, '-c'),
    'import json, sys; from pathlib import Path; files = list(Path(sys.argv[1].removeprefix("file://")).iterdir()); '
    'print(json.dumps({"files": len(files), "iteration": int(sys.argv[2]), "path": sys.argv[1]}))',
    *('{path}', '{step}'),
]


def callback(work_dir: Path, **more: Any) -> list[dict[str, Any]]:
    """Returns what is in Trainer's log of this. Runs on: all ranks."""
    from xhf_hooks.integrations.transformers import HFCheckpointCallback

    ended, log = HFCheckpointCallback.on_train_end, []

    def on_train_end(self: Any, args: Any, state: Any, *more: Any, **named: Any) -> None:
        ended(self, args, state, *more, **named)
        log.extend(line for line in state.log_history if any(name.startswith('on_saved/') for name in line))

    options = dict(save_strategy='steps', save_steps=2, on_saved=LOOKS, **more)
    with mock.patch.object(HFCheckpointCallback, 'on_train_end', on_train_end):
        trainer_run(options, {}, zero_config(3), work_dir)
    return log


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp('on_saved')
    hook = dict(interval=2, by_epoch=False, async_save=True, on_saved=PROGRAM)
    scenarios = {
        'program': partial(run, dict(hook=hook, stage=3, max_iters=6), root / 'program'),
        'folder': partial(callback, root / 'folder'),
        'store': partial(callback, root / 'store', out_dir=(root / 'stored').as_uri()),
    }
    return root, run_scenarios(scenarios, 2)


def test_a_program_loads_the_save_that_others_have_followed(finished):
    log_dir = log_dir_of(finished, 'program')
    assert [path.name for path in log_dir.glob('.hf_model*') if 'kept' in path.name] == []
    assert saves(log_dir) == {'hf_model': 6}
    assert_whole(log_dir / 'hf_model')
    found = scalars(log_dir, 'on_saved/hf_model/')
    assert min(found) == 2 and max(found) == 6
    for step, numbers in found.items():
        assert numbers['iteration'] == numbers['step'] == step and numbers['is_rank'] == 0 and numbers['nice'] >= 10
        output = log_dir / 'hf_model_on_saved' / f'iter_{step}'
        assert sorted(path.name for path in output.iterdir()) == ['output.log', 'own_file']
        log = (output / 'output.log').read_text()
        assert 'a line before' in log and 'a line of errors' in log
    assert found[2]['loaded/tensors'] == 21 and found[2]['loaded/missing'] == 0
    assert 'on_saved for hf_model, iter_6 took' in log_of(log_dir)


@pytest.mark.parametrize('name', ['folder', 'store'])
def test_the_log_of_trainer_has_the_numbers(finished, name):
    root, results = finished
    first, second = check(results, name)
    assert [(line['step'], line['on_saved/hf_model/iteration']) for line in first] == [(2, 2), (4, 4)]
    assert second == []
    assert all(line['on_saved/hf_model/files'] >= 3 for line in first)
    for step in (2, 4):
        output = root / name / 'hf_model_on_saved' / f'iter_{step}' / 'output.log'
        path = json.loads(output.read_text())['path']
        assert path.startswith((root / 'stored').as_uri()) == (name == 'store')
