"""Derives the schedule of saves from MMEngine's train loop and CheckpointHook. Runs on: all ranks."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import CheckpointHook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from xhf_hooks.errors import OptionError
from xhf_hooks.hooks.schedule import Schedule
from xhf_hooks.telemetry.log import RunLog


def counts_epochs(runner: Any) -> bool:
    """Whether training counts epochs. In IterBasedTrainLoop and XTuner's TrainLoop, the whole training is one epoch."""
    if isinstance(runner.train_loop, (EpochBasedTrainLoop, IterBasedTrainLoop)):
        return isinstance(runner.train_loop, EpochBasedTrainLoop)
    own = _checkpoint_hook(runner)  # an unknown loop: do as the run's CheckpointHook does
    return own is None or own.by_epoch


def resolve_schedule(runner: Any, interval: int | None, by_epoch: bool | None, save_begin: int) -> Schedule:
    """The schedule that the hook's options set, or else that of the run's CheckpointHook."""
    own = _checkpoint_hook(runner)
    if interval is None and own is not None:
        return Schedule(own.interval, own.by_epoch, save_begin or own.save_begin)
    unit = counts_epochs(runner) if by_epoch is None else by_epoch
    return Schedule(-1 if interval is None else interval, unit, save_begin)


def check_schedule(runner: Any, schedule: Schedule, log: RunLog, *, saves_anyway: bool) -> None:
    """Warn before training if the schedule makes no save.

    Args:
        saves_anyway: Whether there are other saves, such as at the end or of the best score.

    Raises:
        OptionError: The schedule makes no save, and there are no other saves.
    """
    last, done = (runner.max_epochs, runner.epoch) if schedule.by_epoch else (runner.max_iters, runner.iter)
    unit = 'epochs' if schedule.by_epoch else 'iterations'
    first = schedule.next_due(0)
    if first is None and not saves_anyway:
        raise OptionError(
            'interval', 'a positive number, or save_last or save_best: otherwise nothing is ever saved', None
        )
    if first is None or not last:  # never due, or the length of training is unknown
        return
    end = f'training ends after {last} {unit}'
    if schedule.by_epoch and not counts_epochs(runner):
        end = 'this train loop counts iterations, and the whole training is one epoch'
        log.warning(f'interval: {schedule}, but {end}; set by_epoch=False to save before it ends')
    if first > last and not saves_anyway:
        raise OptionError('interval', f'a smaller one, or save_last: {end}, so nothing is ever saved', str(schedule))
    if first > last:
        log.warning(f'interval: {schedule}, but {end}; set a smaller one')
    elif done < last and schedule.next_due(done) > last:
        log.info(f'interval: {schedule}, so no save is due in the remaining {unit} {done + 1} to {last}')


def _checkpoint_hook(runner: Any) -> CheckpointHook | None:
    return next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
