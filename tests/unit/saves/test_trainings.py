"""Several trainings into one folder: each keeps its own saves for good (``keep_every``), and a resumed one goes on."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.models.zoo.llamas import odd_llama
from tests.helpers.runs import frontends as doors
from tests.helpers.runs.toy_run import run_config, train
from xhf_hooks import save_hf


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
def test_each_training_keeps_its_own_saves_for_good(tmp_path, monkeypatch, frontend: Callable[..., None]):
    """One of 6 steps, which goes on to step 9, and another one of 8. Saves at 5 and 9, at 3, 6 and 8."""
    # torch.load's default keeps Trainer and MMEngine from reading the random states in their own checkpoints
    monkeypatch.setattr(
        torch, 'load', lambda *args, load=torch.load, **how: load(*args, **{**how, 'weights_only': False})
    )
    frontend(tmp_path, 5, 6, resume=False)
    frontend(tmp_path, 5, 9, resume=True)
    frontend(tmp_path, 3, 8, resume=False)
    folders = [*(tmp_path / 'out').glob('hf_model*')]
    assert {path.name: assert_whole(path) for path in folders} == {
        'hf_model': 8,
        'hf_model_iter_5': 5,
        'hf_model_iter_6': 6,
        'hf_model_iter_9': 9,
    }
    runs = Counter(json.loads((path / 'xhf_manifest.json').read_text())['commit']['run'] for path in folders)
    assert sorted(runs.values()) == [2, 2]
