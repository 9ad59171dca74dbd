"""HFCheckpointCallback among other callbacks, in the order that the user has given."""

from typing import Any

import pytest
from transformers import TrainerCallback

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.compare import assert_same_folder_tensors
from tests.helpers.runs import frontends as doors
from xhf_hooks import HFCheckpointCallback


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
    assert [line['step'] for line in trainer.state.log_history if 'hf_checkpoint/seconds' in line] == [4]
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
