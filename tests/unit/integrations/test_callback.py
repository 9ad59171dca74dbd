"""HFCheckpointCallback among other callbacks, in the order that the user has given."""

from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.integrations import integration_utils

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.checks.stored import runs_in
from tests.helpers.runs import frontends as doors
from xhf_hooks import HFCheckpointCallback, save_hf
from xhf_hooks.compat.transformers import converts_weights
from xhf_hooks.errors import XhfError
from xhf_hooks.files.manifest import read_manifest
from xhf_hooks.places.store import read_pointer
from xhf_hooks.runs.ends import save_requests

#: Trainer compares a score each second step, and saves.
BY_SCORE = dict(eval_strategy='steps', eval_steps=2, save_strategy='steps', save_steps=2, max_steps=6)
BY_SCORE |= dict(load_best_model_at_end=True, metric_for_best_model='score', greater_is_better=True)


def train_by_score(folder: Path, scores: dict[int, float], *callbacks: Any, **arguments: Any) -> Any:
    """Train, and let Trainer save the weights that the model has at the end to ``theirs``.

    Args:
        scores: Iteration to score; of others it is 0.
    """
    with doors.fresh_accelerate():
        trainer: Any = doors.make_trainer(folder, None, *callbacks, ddp_backend=None, **{**BY_SCORE, **arguments})
        trainer.compute_metrics = lambda found: {'score': float(scores.get(trainer.state.global_step, 0))}
        trainer.train()
        trainer.save_model(str(folder / 'theirs'))
    return trainer


def saved_at(trainer: Any) -> list[int]:
    """The steps of saves, as Trainer's log has them."""
    return [line['step'] for line in trainer.state.log_history if 'hf_checkpoint/seconds' in line]


class Outer(TrainerCallback):
    """Passes what it is told on."""

    def __init__(self) -> None:
        inner = HFCheckpointCallback()
        for event in ('on_train_begin', 'on_step_end', 'on_save', 'on_train_end'):
            setattr(self, event, getattr(inner, event))


def test_it_saves_inside_another_callback(tmp_path):
    with doors.fresh_accelerate():
        trainer: Any = doors.make_trainer(tmp_path, None, Outer(), ddp_backend=None)
        trainer.train()
    assert assert_whole(tmp_path / 'hf_model') == 4
    assert saved_at(trainer) == [4]
    assert 'train_loss' in trainer.state.log_history[-1]


@pytest.mark.parametrize('save_strategy', ['no', 'steps'])
@pytest.mark.parametrize('is_first', [True, False])
def test_the_order_of_callbacks_decides_which_weights_are_saved(tmp_path, save_strategy, is_first):
    """Whether the last step was saved before training ended or not."""
    callbacks: list[Any] = [doors.Doubling(), HFCheckpointCallback(save_last=True)]
    callbacks = callbacks[::-1] if is_first else callbacks
    with doors.fresh_accelerate():
        trainer: Any = doors.make_trainer(tmp_path, None, *callbacks, ddp_backend=None, save_strategy=save_strategy)
        trainer.train()
        order = [callback for callback in trainer.callback_handler.callbacks if callback in callbacks]
        assert order == callbacks
        if is_first:
            for parameter in trainer.model.parameters():
                parameter.data.div_(2)
        trainer.save_model(str(tmp_path / 'theirs'))
    assert_same_folder_tensors(tmp_path / 'hf_model', tmp_path / 'theirs')


class MinutePerStep(TrainerCallback):
    """With each step a minute passes on the clock that requests saves."""

    minutes = 0

    def monotonic(self) -> float:
        return 60.0 * self.minutes

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.minutes += 1


def test_saves_by_the_clock_and_some_for_good(tmp_path, monkeypatch):
    """The clock is due after each second step, and is looked at when a step ends: the save is made after the next."""
    clock = MinutePerStep()
    monkeypatch.setattr(save_requests, 'time', clock)
    options = dict(save_strategy='no', interval_minutes=2, keep_every=4)
    with doors.fresh_accelerate():
        trainer = doors.make_trainer(tmp_path, options, clock, ddp_backend=None, max_steps=10)
        trainer.train()
    assert saved_at(trainer) == [3, 6, 9, 10]
    found = {path.name: assert_whole(path) for path in tmp_path.glob('hf_model*')}
    assert found == {'hf_model': 10, 'hf_model_iter_6': 6, 'hf_model_iter_9': 9}


class InterruptAt(TrainerCallback):
    """Ctrl-C."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise KeyboardInterrupt


class Probe(TrainerCallback):
    """Trains another model when two steps are done."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options, self.error = folder, options, None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            inner = doors.make_trainer(self.folder, self.options, ddp_backend=None)
            try:
                inner.train()
            except XhfError as error:
                self.error = error


@pytest.mark.parametrize('is_first', [True, False])
@pytest.mark.parametrize('options', [{}, {'async_save': True}])
def test_a_run_whose_callback_trains_another_goes_on(tmp_path, caplog, options, is_first):
    every = dict(save_strategy='steps', save_steps=1, save_total_limit=None)
    callbacks = [Probe(tmp_path / 'inner', **options), HFCheckpointCallback(**every, **options)]
    with doors.fresh_accelerate():
        trainer = doors.make_trainer(tmp_path / 'outer', None, *callbacks[:: 1 if is_first else -1], ddp_backend=None)
        trainer.train()
    assert assert_whole(tmp_path / 'inner' / 'hf_model') == 4
    assert assert_whole(tmp_path / 'outer' / 'hf_model') == 4
    assert [assert_whole(tmp_path / 'outer' / f'hf_model_iter_{step}') for step in (1, 2, 3)] == [1, 2, 3]
    assert 'was interrupted' not in caplog.text and 'failed' not in caplog.text


@pytest.mark.parametrize('options', [{}, {'save_on_signal': 'SIGUSR1'}])
def test_a_run_that_needs_the_folder_or_signals_of_the_one_that_calls_it_closes_that(tmp_path, caplog, options):
    """Nothing tells it from a run after an interrupted one. What was closed says so at each save."""
    inner = tmp_path / ('inner' if options else 'outer')
    probe, every = Probe(inner, **options), dict(save_strategy='steps', save_steps=1, **options)
    with doors.fresh_accelerate():
        doors.make_trainer(tmp_path / 'outer', every, probe, ddp_backend=None).train()
    assert probe.error is None and assert_whole(inner / 'hf_model') == 4
    assert caplog.text.count(f'{tmp_path}/outer/hf_model: an earlier run was interrupted and is now closed') == 1
    for step in (3, 4):
        assert (
            f'the save of iter_{step} failed and training goes on: {tmp_path}/outer/hf_model: this run was'
            in caplog.text
        )


def test_save_hf_after_training_was_interrupted_and_training_after_that(tmp_path, caplog):
    """The cells of a notebook, all with one folder."""
    with doors.fresh_accelerate():
        interrupted = doors.make_trainer(tmp_path, {}, InterruptAt(2), ddp_backend=None)
        with pytest.raises(KeyboardInterrupt):
            interrupted.train()
        save_hf(interrupted.model, tmp_path / 'hf_model', step=2)
        assert assert_whole(tmp_path / 'hf_model') == 2
        assert 'an earlier run was interrupted and is now closed' in caplog.text
        doors.make_trainer(tmp_path, {}, ddp_backend=None).train()
        save_hf(interrupted.model, tmp_path / 'hf_model', step=9)
    assert assert_whole(tmp_path / 'hf_model') == 9


@pytest.mark.parametrize('is_named', [True, False])
@pytest.mark.parametrize('has_out_dir', [True, False])
def test_each_trial_of_a_search_has_a_folder(tmp_path, monkeypatch, is_named, has_out_dir):
    """As Trainer's checkpoints, in hyperparameter_search, which calls train() so. No trial replaces another's."""
    monkeypatch.setattr(integration_utils, 'is_wandb_available', lambda: True)  # whose trials are dicts
    url = (tmp_path / 'store').as_uri()
    folder = tmp_path / 'models' / 'own' if has_out_dir else tmp_path / 'out' / 'hf_model'
    saves = HFCheckpointCallback(out_dir=folder if has_out_dir else None, upload_to=url)
    with doors.fresh_accelerate():
        trainer = doors.make_trainer(tmp_path / 'out', None, saves, ddp_backend=None)
        for number in range(3):
            if is_named:
                trainer.hp_name = lambda trial: f'lr-{trial["learning_rate"]}'
                trainer._trial = {'learning_rate': number}
            trainer.train(trial={'learning_rate': number})
            trainer.save_model(str(tmp_path / 'theirs' / str(number)))
    for number in range(3):
        name = f'lr-{number}' if is_named else f'run-{number}'
        assert_same_folder_tensors(folder.parent / name / folder.name, tmp_path / 'theirs' / str(number))
        (stored,) = runs_in(f'{url}/{name}')
        assert read_pointer(stored, folder.name).newest == f'{folder.name}_iter_4'
    assert not folder.exists()


@pytest.mark.parametrize('own_steps', [None, 3])
@pytest.mark.parametrize(('best', 'last'), [(2, 6), (2, 4), (6, 6)])
def test_a_save_is_named_after_its_weights(tmp_path, own_steps, best, last):
    """load_best_model_at_end, also after early stopping. What was saved of the last step stays."""
    own = {} if own_steps is None else dict(save_strategy='steps', save_steps=own_steps)
    saves = HFCheckpointCallback(save_total_limit=None, **own)
    stops = [EarlyStoppingCallback(early_stopping_patience=1)] if last == 4 else []
    trainer = train_by_score(tmp_path, {best: 1}, saves, *stops)
    assert trainer.state.global_step == last
    assert_same_folder_tensors(tmp_path / 'hf_model', tmp_path / 'theirs')
    found = {path.name: read_manifest(path).step.iteration for path in tmp_path.glob('hf_model*')}
    every = {step for step in range(1, last + 1) if step % (own_steps or 2) == 0}
    older = every - {best} if best == last else every
    assert found == {'hf_model': best, **{f'hf_model_iter_{step}': step for step in older}}
    for step in older & {2, 4, 6}:
        assert_same_folder_tensors(tmp_path / f'hf_model_iter_{step}', tmp_path / f'checkpoint-{step}')
    assert 'train_loss' in trainer.state.log_history[-1]


class AskForSave(TrainerCallback):
    """Lets Trainer save after step 3, whatever the score."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step == 3


@pytest.mark.parametrize('save_last', [True, False])
@pytest.mark.parametrize('loads_best', [True, False])
def test_what_trainer_saves_as_the_best_stays(tmp_path, loads_best, save_last):
    """save_strategy='best'. What another callback asks for, and the last save, do not replace it."""
    scores = {2: 0.1, 4: 0.9, 6: 0.2, 8: 0.3}
    saves = HFCheckpointCallback(save_last=save_last, async_save=True)
    own = dict(save_strategy='best', max_steps=8, load_best_model_at_end=loads_best)
    trainer = train_by_score(tmp_path, scores, saves, AskForSave(), **own)
    is_reloaded = loads_best and trainer.state.best_model_checkpoint is not None
    assert is_reloaded == loads_best or not converts_weights(), 'only Trainer of transformers 4 may not load the best'
    newest = 3 if not save_last else 4 if is_reloaded else 8
    found = {path.name: read_manifest(path).step.iteration for path in tmp_path.glob('hf_model*')}
    assert found == {'hf_model': newest, 'hf_model_best': 4}
    assert_same_folder_tensors(tmp_path / 'hf_model_best', tmp_path / 'checkpoint-4')
    assert_same_folder_tensors(tmp_path / 'hf_model', tmp_path / ('theirs' if save_last else 'checkpoint-3'))
    best = read_manifest(tmp_path / 'hf_model_best').manifest_fields['best']
    assert best == {'metric': 'score', 'score': 0.9, 'rule': 'greater'}
    assert saved_at(trainer)[:3] == [2, 3, 4]


def test_the_best_weights_are_saved_although_the_clock_requested_a_save_of_the_last_step(tmp_path, monkeypatch):
    """Trainer loads the weights of step 2 at the end, which are not those that were saved after the last step."""
    clock = MinutePerStep()
    monkeypatch.setattr(save_requests, 'time', clock)
    saves = HFCheckpointCallback(save_strategy='no', interval_minutes=5)
    trainer = train_by_score(tmp_path, {2: 1}, saves, clock)
    assert saved_at(trainer) == [6, 2]
    assert assert_whole(tmp_path / 'hf_model') == 2
    assert_same_folder_tensors(tmp_path / 'hf_model', tmp_path / 'theirs')


def test_a_save_of_the_last_weights_is_named_after_them_if_no_others_were_loaded(tmp_path, monkeypatch):
    """Trainer only warns if it does not find the files of the best checkpoint, as on another host."""
    monkeypatch.setattr(Trainer, '_load_best_model', lambda trainer: None)
    train_by_score(tmp_path, {2: 1}, HFCheckpointCallback())
    assert assert_whole(tmp_path / 'hf_model') == 6
    assert_same_folder_tensors(tmp_path / 'hf_model', tmp_path / 'checkpoint-6')


@pytest.mark.parametrize('is_inside', [True, False])
def test_saves_in_what_trainer_uploads_are_told(tmp_path, caplog, is_inside):
    saves = HFCheckpointCallback(out_dir=None if is_inside else tmp_path / 'other' / 'hf_model')
    with doors.fresh_accelerate():
        trainer = doors.make_trainer(tmp_path / 'out', None, saves, ddp_backend=None)
        trainer.args.push_to_hub = True  # after Trainer has asked the Hub for the repository
        trainer.train()
    out = tmp_path / 'out'
    told = (
        f'push_to_hub: Trainer uploads all of {out}, with {out}/hf_model and with files of saves that are being written'
    )
    assert (told in caplog.text) == is_inside
