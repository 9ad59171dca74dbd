"""Several trainings into one folder: each keeps its own saves for good (``keep_every``), and a resumed one goes on."""

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from transformers import TrainerCallback

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.ranks.launch import start_process
from tests.helpers.runs import frontends as doors
from tests.helpers.runs.toy_run import run_config, train
from xhf_hooks import save_hf

#: Iterations at which to save. The run is killed at another one, and resumed from a checkpoint of iteration 30.
SAVE_AT = [1, 2, 4, 8, 16, 32, 64]
KILLED_AT = 37


@pytest.fixture(autouse=True)
def reads_own_checkpoints(monkeypatch):
    """torch.load's default keeps Trainer and MMEngine from reading the random states in their own checkpoints."""
    load = torch.load
    monkeypatch.setattr(torch, 'load', lambda *args, **how: load(*args, **{**how, 'weights_only': False}))


def by_trainer(root: Path, every: int, until: int, *, resume: bool) -> None:
    saves = dict(out_dir=root / 'out' / 'hf_model', save_strategy='steps', save_steps=every, keep_every=4)
    with doors.fresh_accelerate():
        own = dict(save_strategy='steps', save_steps=2, max_steps=until)
        trainer = doors.make_trainer(root / 'work', saves, ddp_backend=None, **own)
        trainer.train(resume_from_checkpoint=resume or None)


def by_mmengine(root: Path, every: int, until: int, *, resume: bool) -> None:
    saves = dict(out_dir=str(root / 'out' / 'hf_model'), interval=every, by_epoch=False, keep_every=4)
    train(run_config(root / 'work', hook=saves, stage=None, max_iters=until, resume=resume))


def by_own_loop(root: Path, every: int, until: int, *, resume: bool) -> None:
    """A loop that does not say whether it was resumed."""
    first = 7 if resume else 1
    for step in range(first, until + 1):
        if step % every == 0 or step == until:
            save_hf(odd_llama(), root / 'out' / 'hf_model', step=step, keep_every=4)


@pytest.mark.parametrize('frontend', [by_trainer, by_mmengine, by_own_loop], ids=lambda one: one.__name__)
def test_each_training_keeps_its_own_saves_for_good(tmp_path, frontend: Callable[..., None]):
    """One of 6 steps, which goes on to step 9, and another one of 8. Saves at 5 and 9, at 3, 6 and 8."""
    frontend(tmp_path, 5, 6, resume=False)
    frontend(tmp_path, 5, 9, resume=True)
    frontend(tmp_path, 3, 8, resume=False)
    folders = [*(tmp_path / 'out').glob('hf_model*')]
    kept = {f'hf_model_iter_{number}': number for number in (5, 6, 9)}
    assert {path.name: assert_whole(path) for path in folders} == {'hf_model': 8, **kept}
    runs = Counter(json.loads((path / 'xhf_manifest.json').read_text())['commit']['run'] for path in folders)
    assert sorted(runs.values()) == [2, 2]


class KillTrainer(TrainerCallback):
    """Kills the process when ``KILLED_AT`` steps are done."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED_AT:
            os.kill(os.getpid(), SIGKILL)


@HOOKS.register_module()
class KillRunner(Hook):
    """The same in MMEngine's runs."""

    def after_train_iter(self, runner: Any, *others: Any, **more: Any) -> None:
        if runner.iter + 1 == KILLED_AT:
            os.kill(os.getpid(), SIGKILL)


def save_at_by_trainer(root: Path, *, resume: bool) -> None:
    saves = dict(save_strategy='no', save_at=SAVE_AT, save_total_limit=None, save_last=False, on_error='raise')
    with doors.fresh_accelerate():
        own = dict(save_strategy='steps', save_steps=10, max_steps=70, ddp_backend=None)
        trainer = doors.make_trainer(root, saves, *([] if resume else [KillTrainer()]), **own)
        trainer.train(resume_from_checkpoint=resume or None)


def save_at_by_mmengine(root: Path, *, resume: bool) -> None:
    saves = dict(interval=-1, save_at=SAVE_AT, max_keep_ckpts=-1, save_last=False, on_error='raise')
    saves['out_dir'] = str(root / 'hf_model')
    checkpoint = dict(type='CheckpointHook', interval=10, by_epoch=False)
    hooks = [] if resume else [dict(type='KillRunner')]
    how: dict[str, Any] = dict(hook=saves, checkpoint=checkpoint, hooks=hooks, stage=None, max_iters=70, resume=resume)
    train(run_config(root / 'work', **how))


@pytest.mark.parametrize('frontend', [save_at_by_trainer, save_at_by_mmengine], ids=lambda one: one.__name__)
def test_iterations_of_save_at_are_there_after_a_kill_and_a_resume(tmp_path, frontend):
    """The resumed run counts on, and the iteration that both have saved is there as the resumed run saved it."""
    killed = start_process(partial(frontend, resume=False), tmp_path)
    killed.join()
    assert killed.exitcode == -SIGKILL
    assert sorted(map(assert_whole, tmp_path.glob('hf_model*'))) == [1, 2, 4, 8, 16, 32]
    frontend(tmp_path, resume=True)
    found = {path.name: assert_whole(path) for path in tmp_path.glob('hf_model*')}
    assert found == {'hf_model': 64, **{f'hf_model_iter_{number}': number for number in SAVE_AT[:-1]}}
