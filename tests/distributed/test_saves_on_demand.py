"""Saves that a signal asks for, in real runs: all ranks save at the same iteration, the weights of it."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.test_async import files_of
from tests.distributed.test_hook_runs import run, saves
from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.ranks.launch import run_ranks
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.frontends import trainer_run
from tests.helpers.runs.requesting_run import RandomSignals
from tests.helpers.runs.zero_config import zero_config

N_SIGNALS = 5
#: Of a run that is asked once: long enough for the ranks to agree on a busy machine.
LAST = 40
NEVER_DUE = dict(interval=-1, by_epoch=False, max_keep_ckpts=-1, save_on_signal='SIGUSR2')
#: Training checkpoints would take most of the time.
NO_CHECKPOINTS = dict(type='CheckpointHook', interval=-1, by_epoch=False)


def random_signals(work_dir: Path) -> Any:
    """Runs on: all ranks."""
    signals = dict(type='RandomSignals', n_signals=N_SIGNALS, seed=1)
    hook = dict(NEVER_DUE, async_save=True)
    log_dir = run(dict(hook=hook, stage=3, max_iters=10_000, checkpoint=NO_CHECKPOINTS, hooks=[signals]), work_dir)
    asked = RandomSignals.newest
    return log_dir, asked.saved, asked.sent


def every_iteration(work_dir: Path) -> str:
    hook = dict(interval=1, by_epoch=False, max_keep_ckpts=-1)
    return run(dict(hook=hook, stage=3, max_iters=12, checkpoint=NO_CHECKPOINTS), work_dir)


def asked(options: dict[str, Any], ask: dict[str, Any], work_dir: Path, **more: Any) -> str:
    """Training goes on after the save. Runs on: all ranks."""
    hooks = [dict(type='AtIteration', **ask)]
    how = dict(stage=None, ddp=True, max_iters=LAST, checkpoint=NO_CHECKPOINTS, hooks=hooks)
    return run({**how, 'hook': {**NEVER_DUE, **options}, **more}, work_dir)


def with_handler(work_dir: Path) -> list[int]:
    """SIGTERM to all ranks, in a program whose handler lets training go on. Runs on: all ranks.

    Returns:
        How many saves there are when the handler is called.
    """
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(len([*work_dir.glob('*/hf_model')])))
    try:
        asked(dict(save_on_signal=['SIGTERM'], async_save=True), dict(iteration=5, ask='SIGTERM'), work_dir)
    finally:
        signal.signal(signal.SIGTERM, before)
    return called


def callback(work_dir: Path) -> list[str]:
    """Rank 1 gets a signal when training begins. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks.integrations.transformers import HFCheckpointCallback

    begin = HFCheckpointCallback.on_train_begin

    def on_train_begin(*args: Any, **named: Any) -> None:
        begin(*args, **named)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR2)

    options = dict(save_strategy='no', save_on_signal='SIGUSR2', max_keep_ckpts=-1)
    with mock.patch.object(HFCheckpointCallback, 'on_train_begin', on_train_begin):
        return trainer_run(options, dict(max_steps=LAST), zero_config(2), work_dir)


SCENARIOS: dict[str, Any] = {
    'random': random_signals,
    'every': every_iteration,
    'validation': partial(
        asked,
        dict(async_save=True),
        dict(iteration=4, ask='SIGUSR2', in_validation_of_rank=2),
        scores=[0.5] * 6,
        max_iters=8,
    ),
    'goes_on': with_handler,
    'callback': callback,
}


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    """Folder of the runs, and what gives the outcome of one."""
    root = tmp_path_factory.mktemp('on_demand')
    results = run_scenarios({name: partial(scenario, root / name) for name, scenario in SCENARIOS.items()}, 3)
    return root, partial(check, results)


def only_log_dir(root: Path, name: str) -> Path:
    (newest,) = (root / name).glob('*/hf_model')
    return newest.parent


def test_every_random_signal_is_a_save_of_one_step_of_all_ranks(finished):
    _, outcome = finished
    ranks = outcome('random')
    log_dir, saved, _ = ranks[0]
    assert all(rank[:2] == (log_dir, saved) for rank in ranks)
    assert len(saved) == N_SIGNALS and saved == sorted(saved)
    sent = {number: iteration for *_, own in ranks for number, iteration in own.items()}
    assert sorted(sent) == list(range(N_SIGNALS))
    for number, iteration in sent.items():
        assert iteration <= saved[number] <= iteration + 5, 'saved before it was asked for, or much later'
    found = {iteration: folder for folder, iteration in saves(Path(log_dir)).items()}
    assert set(saved) <= set(found)
    for folder in found.values():
        assert_whole(Path(log_dir, folder))


def test_the_weights_are_those_of_the_step(finished):
    _, outcome = finished
    log_dir = outcome('random')[0][0]
    other = Path(outcome('every')[0])
    expected = {iteration: folder for folder, iteration in saves(other).items()}
    compared = 0
    for folder, iteration in saves(Path(log_dir)).items():
        if iteration in expected:
            assert files_of(Path(log_dir, folder)) == files_of(other / expected[iteration]), iteration
            compared += 1
    assert compared, 'all saves are of later iterations than the other run has'


def test_one_save_then_training_goes_on(finished):
    """Where the program's own handler of SIGTERM, which is called after the save, lets it."""
    root, outcome = finished
    assert outcome('goes_on') == [[1]] * 3
    asked_for, last = sorted(saves(only_log_dir(root, 'goes_on')).values())
    assert 5 < asked_for < LAST == last


def test_in_a_validation_it_is_the_step_before(finished):
    root, outcome = finished
    outcome('validation')
    assert sorted(saves(only_log_dir(root, 'validation')).values()) == [4, 8]


def preempted_by_default(work_dir: Path) -> None:
    options = dict(save_on_signal='SIGTERM', async_save=True)
    asked(options, dict(iteration=5, ask='SIGTERM'), work_dir, stage=3, ddp=False)


def test_sigterm_kills_after_the_save_where_nothing_handles_it(tmp_path):
    assert run_ranks(preempted_by_default, 2, tmp_path / 'run', expected_deaths=(0, 1)) == [None, None]
    log_dir = only_log_dir(tmp_path, 'run')
    assert list(saves(log_dir)) == ['hf_model']
    assert 5 < saves(log_dir)['hf_model'] < LAST
    assert_whole(log_dir / 'hf_model')


def test_trainer_saves_on_a_signal(finished):
    root, outcome = finished
    found = outcome('callback')[0]
    assert found[0] == 'hf_model' and len(found) == 2, found
    manifest = json.loads((root / 'callback' / found[1] / 'xhf_manifest.json').read_text())
    assert 0 < manifest['iteration'] < LAST
