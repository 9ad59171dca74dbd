"""What the hook tells the log and the visualizer."""

from __future__ import annotations

import time
from typing import Any

from xhf_hooks.records import CommittedCheckpoint
from xhf_hooks.save import Saver


def log_preparations(runner: Any, saver: Saver, schedule: Any, writer: str, final: Any) -> None:
    """One line that says what will be saved, when, how and where; more where something is left out."""
    plan, exporter = saver.plan, saver.exporter
    runner.logger.info(
        f'HFCheckpointHook: {len(plan.placements)} tensors, {plan.nbytes / 1e6:.1f} MB in {len(plan.files)} '
        f'file(s), about {saver.expected_extra_nbytes / 1e6:.0f} MB of extra memory while saving, '
        f'{schedule}, by the {writer} writer, to {final}'
    )
    left_out = exporter.left_out
    if left_out:
        some = ', '.join(left_out[:3]) + (', ...' if len(left_out) > 3 else '')
        runner.logger.info(f'HFCheckpointHook: not exported: {len(left_out)} tensors ({some})')
    for note in exporter.notes:
        runner.logger.info(f'HFCheckpointHook: {note}')


def report_save(runner: Any, committed: CommittedCheckpoint, *, to_visualizer: bool) -> None:
    """Log what a save cost, and what it warns of."""
    cost = committed.cost
    for warning in committed.warnings:
        runner.logger.warning(f'HFCheckpointHook: {warning}')
    runner.logger.info(
        f'HFCheckpointHook: saved {committed.step.label} to {committed.path}: {cost.nbytes / 1e6:.1f} MB in '
        f'{cost.seconds:.2f} s, {cost.gbytes_per_sec:.2f} GB/s, training stalled for {cost.stalled_secs:.2f} s, '
        f'{cost.peak_extra_nbytes / 1e6:.0f} MB of extra memory on the busiest rank'
    )
    if to_visualizer:
        runner.visualizer.add_scalars(
            {
                'hf_checkpoint/seconds': cost.seconds,
                'hf_checkpoint/stalled_seconds': cost.stalled_secs,
                'hf_checkpoint/nbytes': cost.nbytes,
                'hf_checkpoint/gbytes_per_sec': cost.gbytes_per_sec,
                'hf_checkpoint/peak_extra_mb': cost.peak_extra_nbytes / 1e6,
            },
            step=committed.step.iteration,
        )


class ProgressLog:
    """A log line every half minute of a save. Called with bytes written and bytes in all."""

    interval_secs = 30.0

    def __init__(self, logger: Any, label: str) -> None:
        self._logger, self._label = logger, label
        self._last = time.monotonic()

    def __call__(self, done_nbytes: int, total_nbytes: int) -> None:
        if time.monotonic() - self._last >= self.interval_secs:
            self._last = time.monotonic()
            self._logger.info(
                f'HFCheckpointHook: saving {self._label}, {done_nbytes / 1e9:.2f} of {total_nbytes / 1e9:.2f} GB'
            )
