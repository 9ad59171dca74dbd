"""Saves that a signal asks for, in real runs: all ranks save at the same iteration, the weights of it."""

import json
import os
import random
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.converted import assert_same_files
from tests.helpers.checks.stored import runs_in
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.frontends import trainer_run
from tests.helpers.runs.hook_runs import run, saves
from tests.helpers.runs.toy_run import run_config, train
from tests.helpers.runs.zero_config import zero_config
from xhf_hooks.integrations.transformers import HFCheckpointCallback
from xhf_hooks.places.store import read_pointer
from xhf_hooks.runs.ends import save_requests

N_SIGNALS = 5
#: Of a run that is asked once: long enough for the ranks to agree on a busy machine.
LAST = 40
NEVER_DUE = dict(interval=-1, by_epoch=False, max_keep_ckpts=-1, save_on_signal='SIGUSR2', save_last=False)
#: Training checkpoints would take most of the time.
NO_CHECKPOINTS = dict(type='CheckpointHook', interval=-1, by_epoch=False)


@HOOKS.register_module()
class RandomSignals(Hook):
    """Sends signals to a random rank, each at a random instant after the save that the one before asked for.

    Attributes:
        sent: Iterations done at each signal that this rank has got, by number.
    """

    def __init__(self) -> None:
        self._random, self._n_asked = random.Random(1), 0
        self.sent: dict[int, int] = {}

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        n_saved = [len(saves(Path(runner.log_dir)))]
        dist.broadcast_object_list(n_saved)
        if n_saved == [N_SIGNALS]:
            runner.train_loop.stop_training = True
        elif n_saved == [self._n_asked]:
            number, self._n_asked = self._n_asked, self._n_asked + 1
            rank, delay = self._random.randrange(dist.get_world_size()), self._random.random() * 0.06
            if dist.get_rank() == rank:
                threading.Timer(delay, self._send, (runner, number)).start()

    def _send(self, runner: Any, number: int) -> None:
        self.sent[number] = runner.iter  # one less if the end of the iteration was not counted yet
        os.kill(os.getpid(), signal.SIGUSR2)


@HOOKS.register_module()
class AtIteration(Hook):
    """Sends a signal to all ranks, one after another, at an iteration; or to one rank, in the validation after it."""

    def __init__(self, iteration: int, ask: str, in_validation_of_rank: int | None = None) -> None:
        self._iteration, self._ask, self._rank = iteration, ask, in_validation_of_rank

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        time.sleep(0.01)
        if self._rank is None and runner.iter == self._iteration:
            time.sleep(0.05 * runner.rank)
            os.kill(os.getpid(), getattr(signal, self._ask))

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if self._rank is not None and runner.iter == self._iteration:
            time.sleep(0.05)
            if batch_idx == 0 and runner.rank == self._rank:
                os.kill(os.getpid(), getattr(signal, self._ask))


@HOOKS.register_module()
class MinutePerIteration(Hook):
    """With each iteration a minute passes on the clock of rank 0, and an hour on those of other ranks."""

    priority = 'VERY_HIGH'
    minutes = 0

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        MinutePerIteration.minutes += 1 if runner.rank == 0 else 60


def random_signals(work_dir: Path) -> tuple[str, dict[int, int]]:
    how = dict(hook=dict(NEVER_DUE, async_save=True), checkpoint=NO_CHECKPOINTS, hooks=[dict(type='RandomSignals')])
    runner = train(run_config(work_dir, stage=3, max_iters=10_000, **how))
    return runner.log_dir, next(hook.sent for hook in runner.hooks if isinstance(hook, RandomSignals))


def every_iteration(work_dir: Path) -> str:
    hook = dict(interval=1, by_epoch=False, max_keep_ckpts=-1)
    return run(dict(hook=hook, stage=3, max_iters=20, checkpoint=NO_CHECKPOINTS), work_dir)


def asked(options: dict[str, Any], ask: dict[str, Any], work_dir: Path, **more: Any) -> str:
    """Training goes on after the save. Runs on: all ranks."""
    hooks = [dict(type='AtIteration', **ask)]
    how = dict(stage=None, ddp=True, max_iters=LAST, checkpoint=NO_CHECKPOINTS, hooks=hooks)
    return run({**how, 'hook': {**NEVER_DUE, **options}, **more}, work_dir)


def with_handler(work_dir: Path) -> list[int]:
    """SIGTERM to all ranks, and a handler that lets training go on: how many saves it finds. Runs on: all ranks."""
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(len([*work_dir.glob('*/hf_model')])))
    try:
        asked(dict(save_on_signal=['SIGTERM'], async_save=True), dict(iteration=5, ask='SIGTERM'), work_dir)
    finally:
        signal.signal(signal.SIGTERM, before)
    return called


def callback(work_dir: Path) -> list[str]:
    """Rank 1 gets a signal when training begins. Runs on: all ranks."""
    begin = HFCheckpointCallback.on_train_begin

    def on_train_begin(*args: Any, **named: Any) -> None:
        begin(*args, **named)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR2)

    options = dict(save_strategy='no', save_on_signal='SIGUSR2', save_total_limit=None)
    with mock.patch.object(HFCheckpointCallback, 'on_train_begin', on_train_begin):
        return trainer_run(options, dict(max_steps=LAST), zero_config(2), work_dir)


def by_the_clock(work_dir: Path) -> str:
    """After three minutes without a save, and every six iterations. Runs on: all ranks."""
    own = dict(interval=6, by_epoch=False, interval_minutes=3, keep_every=5, save_last=False)
    uploads = dict(upload_to=(work_dir / 'store').as_uri(), upload_keep=1)
    how = dict(stage=2, max_iters=17, checkpoint=NO_CHECKPOINTS, hooks=[dict(type='MinutePerIteration')])
    clock = SimpleNamespace(monotonic=lambda: 60 * MinutePerIteration.minutes)
    with mock.patch.object(save_requests, 'time', clock):
        return run({**how, 'hook': {**own, **uploads}}, work_dir)


IN_VALIDATION = dict(iteration=4, ask='SIGUSR2', in_validation_of_rank=2)
SCENARIOS: dict[str, Any] = {
    'random': random_signals,
    'every': every_iteration,
    'validation': partial(asked, dict(async_save=True), IN_VALIDATION, scores=[0.5] * 6, max_iters=8),
    'goes_on': with_handler,
    'callback': callback,
    'clock': by_the_clock,
}


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    """Folder of the runs, and what gives the outcome of one."""
    root = tmp_path_factory.mktemp('on_demand')
    results = run_scenarios({name: partial(scenario, root / name) for name, scenario in SCENARIOS.items()}, 3)
    return root, partial(check, results)


def only_saves(root: Path, name: str) -> list[int]:
    (newest,) = (root / name).glob('*/hf_model')
    return sorted(saves(newest.parent).values())


def test_every_random_signal_is_a_save_of_one_step_of_all_ranks(finished):
    _, outcome = finished
    (log_dir, _), *_ = ranks = outcome('random')
    found = saves(Path(log_dir))
    assert len(found) == N_SIGNALS
    sent = {number: at for _, own in ranks for number, at in own.items()}
    assert sorted(sent) == list(range(N_SIGNALS))
    for number, saved in enumerate(sorted(found.values())):
        most = sent[number] + save_requests._MOST_ITERATIONS + 5
        assert sent[number] <= saved <= most, 'saved before it was asked for, or much later'
    for folder in found:
        assert_whole(Path(log_dir, folder))


def test_the_weights_are_those_of_the_step(finished):
    _, outcome = finished
    log_dir, other = Path(outcome('random')[0][0]), Path(outcome('every')[0])
    expected = {at: folder for folder, at in saves(other).items()}
    both = [(folder, expected[at]) for folder, at in saves(log_dir).items() if at in expected]
    assert both, 'all saves are of later iterations than the other run has'
    for folder, of_every in both:
        assert_same_files(log_dir / folder, other / of_every)


def test_one_save_then_training_goes_on(finished):
    """Where the program's own handler of SIGTERM, which is called after the save, lets it."""
    root, outcome = finished
    assert outcome('goes_on') == [[1]] * 3
    (asked_for,) = only_saves(root, 'goes_on')
    assert 5 < asked_for < LAST


def test_in_a_validation_it_is_the_step_before(finished):
    root, outcome = finished
    outcome('validation')
    assert only_saves(root, 'validation') == [4]


def test_trainer_saves_on_a_signal(finished):
    root, outcome = finished
    found = outcome('callback')[0]
    assert found[0] == 'hf_model' and len(found) == 2, found
    manifest = json.loads((root / 'callback' / found[1] / 'xhf_manifest.json').read_text())
    assert 0 < manifest['iteration'] < LAST


def test_the_clock_of_rank_0_fills_gaps_between_saves_and_some_are_kept_for_good(finished):
    """Saves by the clock at 4, 10 and 16, one iteration after it is due, and by the interval at 6 and 12."""
    _, outcome = finished
    log_dir = Path(outcome('clock')[0])
    log = next(log_dir.glob('*.log')).read_text()
    assert re.findall(r'saved (iter_\d+) to', log) == [f'iter_{number}' for number in (4, 6, 10, 12, 16)]
    assert saves(log_dir) == {'hf_model_iter_6': 6, 'hf_model_iter_10': 10, 'hf_model': 16}
    (stored,) = runs_in((log_dir.parent / 'store').as_uri())
    pointer = read_pointer(stored, 'hf_model')
    assert pointer.saves == ('hf_model_iter_6', 'hf_model_iter_10', 'hf_model_iter_16')
    assert 'every 6 iterations, 3 minutes after the last save' in log
