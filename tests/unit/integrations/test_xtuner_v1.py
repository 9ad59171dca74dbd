"""HFCheckpoint in a Trainer of XTuner V1: V1 decides when and where; a folder that it is given is whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import folder_tensors
from tests.helpers.models import xtuner_v1, zoo
from xhf_hooks.errors import AgreedError, ModelError, OptionError
from xhf_hooks.integrations.xtuner_v1 import HFCheckpoint


class Trainer:
    """V1's, as far as it saves: saves at every step, and lists what it then counts as saved."""

    rank, _hf_interval = 0, 1

    def __init__(self, model: Any, exp_dir: Path, hook: HFCheckpoint, is_async: bool = False) -> None:
        self.exp_dir, self.cur_step, self.tokenizer = exp_dir, 0, Tokenizer()
        self._engine = SimpleNamespace(model=model)
        self._async_hf_export = is_async
        self.hf_checkpoint_list: list[Path] = []
        hook.connect_trainer(self)

    def step(self, value: float) -> None:
        for parameter in self._engine.model.parameters():
            parameter.data.fill_(value)
        self.cur_step += 1
        self._maybe_save_hf()

    def _maybe_save_hf(self) -> None:
        path = self.exp_dir / f'hf-{self.cur_step}'
        if not self._async_hf_export:
            self._engine.save_hf(str(path))
            self.hf_checkpoint_list.append(path)
            return
        self.future = self._engine.async_save_hf(hf_dir=str(path))
        self.future.add_done_callback(lambda done: self.hf_checkpoint_list.append(done.result()))


class Tokenizer:
    is_it = True


@pytest.fixture
def model(tmp_path):
    zoo.build('qwen3').to(torch.bfloat16).save_pretrained(tmp_path / 'base')
    with xtuner_v1.imported():
        yield xtuner_v1.of_folder(tmp_path / 'base')


@pytest.mark.parametrize('is_async', [False, True], ids=['foreground', 'background'])
def test_v1_gets_whole_folders(tmp_path, model, is_async):
    hook = HFCheckpoint()
    trainer = Trainer(model, tmp_path / 'run', hook, is_async)
    for step in (1, 2):
        trainer.step(float(step))
        if is_async:
            trainer._engine.model.norm.weight.data.fill_(9)  # training goes on
            trainer.future.result(60)
    assert trainer.hf_checkpoint_list == [tmp_path / 'run' / 'hf-1', tmp_path / 'run' / 'hf-2']
    for step, folder in enumerate(trainer.hf_checkpoint_list, start=1):
        assert assert_whole(folder) == step
        assert all(torch.all(tensor == step) for tensor in folder_tensors(folder).values())
    hook.close()
    assert sorted(path.name for path in (tmp_path / 'run').iterdir()) == ['hf-1', 'hf-2']
    # V1 saves a tokenizer of transformers into a finished folder; it must not take this one for such
    assert type(trainer.tokenizer) is not Tokenizer and trainer.tokenizer.is_it


@pytest.mark.parametrize('is_async', [False, True], ids=['foreground', 'background'])
@pytest.mark.parametrize('on_error', ['continue', 'raise'])
def test_a_save_that_fails_is_none_for_v1(tmp_path, model, caplog, is_async, on_error):
    hook = HFCheckpoint(on_error=on_error)
    trainer = Trainer(model, tmp_path / 'run', hook, is_async)
    foreign = tmp_path / 'run' / 'hf-1' / 'notes.txt'
    foreign.parent.mkdir()
    foreign.touch()
    if on_error == 'raise':
        with pytest.raises(AgreedError, match='holds files that this package did not write'):
            trainer.step(1.0)
    else:
        trainer.step(1.0)
        assert 'the save to hf-1 failed and training goes on' in caplog.text
    assert trainer.hf_checkpoint_list == [] and [*foreign.parent.iterdir()] == [foreign]
    trainer.step(2.0)
    if is_async:
        trainer.future.result(60)
    assert trainer.hf_checkpoint_list == [tmp_path / 'run' / 'hf-2']
    hook.close()


def test_a_step_that_is_saved_again_replaces_its_save(tmp_path, model):
    for value in (1.0, 2.0):  # the second time after a resume
        hook = HFCheckpoint()
        Trainer(model, tmp_path / 'run', hook).step(value)
        hook.close()
    assert torch.all(folder_tensors(tmp_path / 'run' / 'hf-1')['model.norm.weight'] == 2)
    assert [path.name for path in (tmp_path / 'run').iterdir()] == ['hf-1']


def test_what_it_cannot_do_is_refused(tmp_path, model):
    with pytest.raises(OptionError, match='writer'):
        HFCheckpoint(writer='none')  # type: ignore[arg-type]
    with pytest.raises(ModelError, match='reinforcement learning'):
        HFCheckpoint().connect_trainer(SimpleNamespace(_engine=None))
    hook = HFCheckpoint()
    trainer = Trainer(model, tmp_path / 'run', hook)
    with pytest.raises(OptionError, match='save_dtype'):
        trainer._engine.save_hf(str(tmp_path / 'run' / 'hf-1'), torch.float8_e4m3fn)
    hook.close()


def test_without_a_schedule_of_v1_nothing_is_saved(tmp_path, model, caplog, monkeypatch):
    monkeypatch.setattr(Trainer, '_hf_interval', None)
    Trainer(model, tmp_path / 'run', HFCheckpoint())
    assert 'saves no Hugging Face folders here' in caplog.text
    assert not (tmp_path / 'run').exists()
