"""Log lines, progress, warnings of stalls, and the stages of a save with their times."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xhf_hooks.collective import rank_and_world_size
from xhf_hooks.format.text import counted, some
from xhf_hooks.host_memory import MemoryMeter
from xhf_hooks.planning.types import CommittedCheckpoint, SavePlan


class SaveClock:
    """Times one save, stage by stage, and meters its memory. Runs on: all ranks, one thread at a time.

    Args:
        prepare_secs: Time that the save took before this object was created.

    Attributes:
        stage_secs: Seconds by stage, in the order in which they were entered.
    """

    def __init__(self, prepare_secs: float = 0.0) -> None:
        self.meter = MemoryMeter()
        self.stage_secs: dict[str, float] = {'prepare': prepare_secs} if prepare_secs else {}
        self._started = time.perf_counter() - prepare_secs
        self._stalled_secs: float | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stage_secs[name] = self.stage_secs.get(name, 0.0) + time.perf_counter() - started

    def training_goes_on(self) -> None:
        """Called when training goes on; later time does not count as a stall."""
        self._stalled_secs = self.seconds

    @property
    def seconds(self) -> float:
        """Time since the save began."""
        return time.perf_counter() - self._started

    @property
    def stalled_secs(self) -> float:
        """How long the save has stalled training."""
        return self.seconds if self._stalled_secs is None else self._stalled_secs


class RunLog(logging.LoggerAdapter):
    """A logger whose lines begin with a name.

    Args:
        only_errors: Drop everything but errors, as on all ranks but rank 0.
    """

    def __init__(self, logger: logging.Logger, name: str, *, only_errors: bool = False) -> None:
        super().__init__(logger, {})
        self._name, self._only_errors = name, only_errors

    @classmethod
    def of_this_rank(cls, name: str, logger: logging.Logger) -> RunLog:
        """A RunLog for a logger that every rank has. Ranks other than 0 log only errors."""
        return cls(logger, name, only_errors=rank_and_world_size()[0] != 0)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        return f'{self._name}: {msg}', kwargs

    def isEnabledFor(self, level: int) -> bool:
        return (level >= logging.ERROR or not self._only_errors) and super().isEnabledFor(level)


def log_preparations(
    log: RunLog,
    plan: SavePlan,
    extra_nbytes: int,
    *,
    when: str,
    writer: str,
    in_background: bool,
    final: Any,
    left_out: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Log what will be saved, where, when and how, and what is left out. Fits a terminal of 100 columns.

    Args:
        extra_nbytes: Estimated extra memory of a save on the busiest rank.
        in_background: Whether files are written while training goes on.
        left_out: Tensors that are not exported.
        notes: The exporter's notes.
    """
    n_tensors, n_files = len(plan.placements), len(plan.files)
    how = f'{writer} writer{", in the background" if in_background else ""}'
    rows = {
        'what': f'{counted(n_tensors, "tensor")}, {plan.nbytes / 1e6:.1f} MB in {counted(n_files, "file")}',
        'where': final,
        'when': when,
        'how': f'{how}; about {extra_nbytes / 1e6:.0f} MB of extra memory on the busiest rank',
    }
    log.info(_table('ready to save', rows))
    if left_out:
        log.info(f'not exported: {counted(len(left_out), "tensor")} ({some(left_out)})')
    for note in notes:
        log.info(note)


def log_save(log: RunLog, committed: CommittedCheckpoint) -> None:
    """Log the warnings and the cost of a save. Fits a terminal of 100 columns."""
    cost = committed.cost
    for warning in committed.warnings:
        log.warning(warning)
    free_before, free_after = cost.free_before_nbytes, cost.free_after_nbytes
    rows = {
        'cost': f'training stalled for {cost.stalled_secs:.2f} s; {cost.gbytes_per_sec:.2f} GB/s; '
        f'{cost.peak_extra_nbytes / 1e6:.0f} MB of extra memory on the busiest rank',
        'stages': ', '.join(f'{stage} {seconds:.2f} s' for stage, seconds in cost.stage_secs.items()),
    }
    if free_before is not None:
        rows['disk'] = f'{free_before / 1e9:.2f} GB free before, {free_after / 1e9:.2f} GB after'
    name = Path(committed.path).name
    title = f'saved {committed.step.label} to {name}, {cost.nbytes / 1e6:.1f} MB in {cost.seconds:.2f} s'
    log.info(_table(title, rows))


def _table(title: str, rows: Mapping[str, object]) -> str:
    """A message with one row per line."""
    return '\n'.join([title, *(f'    {name:<7}{value}' for name, value in rows.items())])


def scalars(committed: CommittedCheckpoint) -> dict[str, float]:
    """The cost of a save as named numbers, for a visualizer."""
    cost = committed.cost
    stages = {f'hf_checkpoint/{stage}_seconds': seconds for stage, seconds in cost.stage_secs.items()}
    free = {'before': cost.free_before_nbytes, 'after': cost.free_after_nbytes}
    return {
        'hf_checkpoint/seconds': cost.seconds,
        'hf_checkpoint/stalled_seconds': cost.stalled_secs,
        'hf_checkpoint/nbytes': cost.nbytes,
        'hf_checkpoint/gbytes_per_sec': cost.gbytes_per_sec,
        'hf_checkpoint/peak_extra_mb': cost.peak_extra_nbytes / 1e6,
        **stages,
        **{f'hf_checkpoint/free_gb_{when}': nbytes / 1e9 for when, nbytes in free.items() if nbytes is not None},
    }


class ProgressLog:
    """Logs the progress of a save every half minute. Called with the bytes written and the total."""

    interval_secs = 30.0

    def __init__(self, log: RunLog, label: str) -> None:
        self._log, self._label = log, label
        self._last = time.monotonic()

    def __call__(self, done_nbytes: int, total_nbytes: int) -> None:
        if time.monotonic() - self._last >= self.interval_secs:
            self._last = time.monotonic()
            self._log.info(f'saving {self._label}, {done_nbytes / 1e9:.2f} of {total_nbytes / 1e9:.2f} GB')


class StallWatch:
    """Warns once if saves stall training for too long."""

    most_of_time = 0.1

    def __init__(self, log: RunLog, *, in_background: bool, writer: str) -> None:
        self._log, self._warned = log, False
        self._in_background, self._writer = in_background, writer
        self._last_began: float | None = None

    def saved(self, began: float) -> None:
        """Called when training goes on after a scheduled save.

        Args:
            began: ``time.monotonic()`` when training stopped for it.
        """
        stalled, last, self._last_began = time.monotonic() - began, self._last_began, began
        if last is None or self._warned or stalled <= self.most_of_time * (began - last):
            return
        self._warned = True
        self._log.warning(
            f'training stalled for {stalled:.1f} s of the {began - last:.1f} s between two saves '
            f'({stalled / (began - last):.0%}); {self._advice()}'
        )

    def _advice(self) -> str:
        if not self._in_background:
            faster = ' or an out_dir that all ranks see, for the positional writer' if self._writer == 'stream' else ''
            return f'set async_save=True, or a larger interval{faster}'
        return 'set a larger interval'
