"""Decides when a save is due."""

from __future__ import annotations

from dataclasses import dataclass

from xhf_hooks.format.text import counted


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
