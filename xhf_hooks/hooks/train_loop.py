"""What MMEngine's train loop counts, and the schedule of saves that follows from it. Runs on: all ranks."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import CheckpointHook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from xhf_hooks.errors import OptionError
from xhf_hooks.hooks.schedule import Schedule
from xhf_hooks.telemetry.log import RunLog


def counts_epochs(runner: Any) -> bool:
    """Whether training counts epochs. In IterBasedTrainLoop, and XTuner's TrainLoop, all of it is one epoch."""
    if isinstance(runner.train_loop, (EpochBasedTrainLoop, IterBasedTrainLoop)):
        return isinstance(runner.train_loop, EpochBasedTrainLoop)
    own = _checkpoint_hook(runner)  # another loop: as the run's CheckpointHook counts
    return own is None or own.by_epoch


def resolve_schedule(runner: Any, interval: int | None, by_epoch: bool | None, save_begin: int) -> Schedule:
    """The hook's own schedule, or the one of the run's CheckpointHook; the arguments are the hook's options."""
    own = _checkpoint_hook(runner)
    if interval is None and own is not None:
        return Schedule(own.interval, own.by_epoch, save_begin or own.save_begin)
    unit = counts_epochs(runner) if by_epoch is None else by_epoch
    return Schedule(-1 if interval is None else interval, unit, save_begin)


def check_schedule(runner: Any, schedule: Schedule, log: RunLog, *, saves_anyway: bool) -> None:
    """Report before training that no save will be due.

    Args:
        saves_anyway: There are other saves: at the end, or of the best score.

    Raises:
        OptionError: No save will be due, and there are no others.
    """
    last, done = (runner.max_epochs, runner.epoch) if schedule.by_epoch else (runner.max_iters, runner.iter)
    unit = 'epochs' if schedule.by_epoch else 'iterations'
    first = schedule.next_due(0)
    if first is None and not saves_anyway:
        raise OptionError('interval', 'a number, or save_last or save_best: otherwise nothing is ever saved', None)
    if first is None or not last:  # the loop does not know its end
        return
    end = f'training ends after {last} {unit}'
    if schedule.by_epoch and not counts_epochs(runner):
        end = 'to this train loop, which counts iterations, all of them are one epoch'
        log.warning(f'interval: {schedule}, and {end}: set by_epoch=False to save before its end')
    if first > last and not saves_anyway:
        raise OptionError('interval', f'a smaller one, or save_last: {end}, and nothing is ever saved', str(schedule))
    if first > last:
        log.warning(f'interval: {schedule} is never, for {end}; set a smaller one')
    elif done < last and schedule.next_due(done) > last:
        log.info(f'no save is due {schedule} in what is left, {unit} {done + 1} to {last}')


def _checkpoint_hook(runner: Any) -> CheckpointHook | None:
    return next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
