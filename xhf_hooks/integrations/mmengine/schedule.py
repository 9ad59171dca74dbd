"""When the hook saves: its own schedule or CheckpointHook's, in epochs or iterations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmengine.hooks import CheckpointHook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from xhf_hooks.errors import OptionError
from xhf_hooks.runs.telemetry import RunLog


@dataclass(frozen=True)
class Schedule:
    """A save every ``interval`` epochs or iterations from ``save_begin`` on; -1 means never."""

    interval: int
    by_epoch: bool
    save_begin: int = 0

    def __str__(self) -> str:
        unit = 'epoch' if self.by_epoch else 'iteration'
        begin = f' from {self.save_begin} on' if self.save_begin else ''
        return f'every {unit}{begin}' if self.interval == 1 else f'every {self.interval:,} {unit}s{begin}'


def counts_epochs(runner: Any) -> bool:
    """Whether training counts epochs. In IterBasedTrainLoop and its subclasses, the whole training is one epoch."""
    if isinstance(runner.train_loop, (EpochBasedTrainLoop, IterBasedTrainLoop)):
        return isinstance(runner.train_loop, EpochBasedTrainLoop)
    checkpoint_hook = _checkpoint_hook(runner)  # an unknown loop: do as the run's CheckpointHook does
    return checkpoint_hook is None or checkpoint_hook.by_epoch


def resolve_schedule(runner: Any, interval: int | None, by_epoch: bool | None) -> Schedule:
    """The schedule that the hook's options set, or else that of the run's CheckpointHook."""
    checkpoint_hook = _checkpoint_hook(runner)
    if interval is None and checkpoint_hook is not None:
        return Schedule(checkpoint_hook.interval, checkpoint_hook.by_epoch, checkpoint_hook.save_begin)
    return Schedule(interval or -1, counts_epochs(runner) if by_epoch is None else by_epoch)


def validates(runner: Any) -> bool:
    """Whether the run validates while it trains; only then are there scores."""
    last = runner.max_epochs if counts_epochs(runner) else runner.max_iters
    return runner.val_loop is not None and (not last or getattr(runner.train_loop, 'val_begin', 0) <= last)


def check_schedule(
    runner: Any, schedule: Schedule, log: RunLog, has_other_saves: bool, *, will_miss_scores: bool = False
) -> None:
    """Warn before training if the schedule makes no save, or ``save_best`` does not.

    Args:
        has_other_saves: Whether there are saves besides those of the schedule, such as at the end or of the best score.
        will_miss_scores: Whether ``save_best`` is set, and no validation during training will give a score.

    Raises:
        OptionError: There are no saves at all.
    """
    last = runner.max_epochs if schedule.by_epoch else runner.max_iters
    is_never = schedule.interval <= 0
    is_late = bool(last) and (schedule.save_begin or schedule.interval) > last
    is_one_epoch = schedule.by_epoch and not counts_epochs(runner)
    found = f'{schedule}, but training ends after {last} {"epochs" if schedule.by_epoch else "iterations"}'
    if is_one_epoch:
        found = f'{schedule}, but this train loop counts iterations: its one epoch is all of training'
    if (is_never or is_late) and not has_other_saves:
        expected = 'an interval' if is_never else 'a smaller interval'
        expected += ', or save_last=True, or ' + ('a validation for save_best' if will_miss_scores else 'save_best')
        expected += ': nothing would ever be saved'
        raise OptionError('interval', expected, schedule.interval if is_never else found)
    if not is_never and (is_late or is_one_epoch):
        log.warning(f'interval: {found}; set a smaller one, or by_epoch=False')
    if will_miss_scores:
        log.warning('save_best: no validation during training gives a score, so no best model is saved')


def _checkpoint_hook(runner: Any) -> CheckpointHook | None:
    return next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
