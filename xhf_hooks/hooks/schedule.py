"""When the hook saves: its own schedule or CheckpointHook's, in the units of the train loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmengine.hooks import CheckpointHook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from xhf_hooks.errors import OptionError
from xhf_hooks.format.text import counted
from xhf_hooks.telemetry import RunLog


@dataclass(frozen=True)
class Schedule:
    """A save every ``interval`` epochs or iterations from ``save_begin`` on, counted as MMEngine's CheckpointHook does.

    An ``interval`` of -1 means never.
    """

    interval: int
    by_epoch: bool
    save_begin: int

    def is_due_after_iter(self, iterations_done: int) -> bool:
        return not self.by_epoch and self._is_due(iterations_done)

    def is_due_after_epoch(self, epochs_done: int) -> bool:
        return self.by_epoch and self._is_due(epochs_done)

    def next_due(self, done: int) -> int | None:
        """The first count after ``done`` at which a save is due; None if there is none."""
        if self.interval <= 0:
            return None
        if done < self.save_begin:
            return self.save_begin
        return done + self.interval - (done - self.save_begin) % self.interval

    def _is_due(self, done: int) -> bool:
        since_begin = done - self.save_begin
        return self.interval > 0 and since_begin >= 0 and since_begin % self.interval == 0

    def __str__(self) -> str:
        if self.interval <= 0:
            return 'never'
        unit = 'epoch' if self.by_epoch else 'iteration'
        begin = f' from {self.save_begin} on' if self.save_begin else ''
        return f'every {unit if self.interval == 1 else counted(self.interval, unit)}{begin}'


def counts_epochs(runner: Any) -> bool:
    """Whether training counts epochs. In IterBasedTrainLoop and XTuner's TrainLoop, the whole training is one epoch."""
    if isinstance(runner.train_loop, (EpochBasedTrainLoop, IterBasedTrainLoop)):
        return isinstance(runner.train_loop, EpochBasedTrainLoop)
    own = _checkpoint_hook(runner)  # an unknown loop: do as the run's CheckpointHook does
    return own is None or own.by_epoch


def resolve_schedule(runner: Any, interval: int | None, by_epoch: bool | None) -> Schedule:
    """The schedule that the hook's options set, or else that of the run's CheckpointHook."""
    own = _checkpoint_hook(runner)
    if interval is None and own is not None:
        return Schedule(own.interval, own.by_epoch, own.save_begin)
    unit = counts_epochs(runner) if by_epoch is None else by_epoch
    return Schedule(-1 if interval is None else interval, unit, 0)


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
