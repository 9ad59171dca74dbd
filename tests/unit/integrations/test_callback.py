"""HFCheckpointCallback inside another callback, which Trainer knows in its place."""

from typing import Any

from transformers import TrainerCallback

from tests.helpers.checks.assert_intact import assert_whole
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
