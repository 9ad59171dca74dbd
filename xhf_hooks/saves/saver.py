"""All saves of one live model: planned once, and begun one after another."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from xhf_hooks.collective import Collective
from xhf_hooks.options import SaveOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import CommittedCheckpoint, SavePlan, Step
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.saves.planned import Planned, half_bucket_nbytes, plan_saves
from xhf_hooks.saves.save import Save
from xhf_hooks.saves.telemetry import RunLog, SaveClock, warn_of_left_out
from xhf_hooks.saves.unwrap import Unwrapped
from xhf_hooks.sources import source_for
from xhf_hooks.sources.host_memory import SnapshotMemory
from xhf_hooks.sources.send import Snapshot
from xhf_hooks.system.calls import naming
from xhf_hooks.system.threads import Background, BackgroundThread
from xhf_hooks.writers.writer import Writer


class Saver:
    """Saves one live model, any number of times. Runs on: all ranks, every method.

    Args:
        unwrapped: The trained model (unwrap.py).
        log: Gets what is trained and not saved, and the progress of long saves.
        writer: The writer chosen for the option ``writer`` (places/claim.py).
        in_background: Whether :meth:`start` will be used.
        after_commit: Called on all ranks after each commit, in the thread that saves. Begins with an agreement if it
            communicates.
        tell: Called with the step of a background save, and what it made or its error, in its thread.

    Attributes:
        source: Renewed at each save.
        planned: Renewed when the model's tensors change.
        strategy: Who writes what.
        tokenizer: Written beside the weights. Set it on rank 0.
        eos_token_ids: Added to generation_config.json. Set them on rank 0.
        in_flight: The save that :meth:`start` began; its outcome is the same on every rank.

    Raises:
        AgreedError: The model cannot be exported; the message has the reason.
        RanksDifferError: Ranks hold different models.
    """

    def __init__(
        self,
        unwrapped: Unwrapped,
        options: SaveOptions,
        collective: Collective,
        log: RunLog,
        *,
        writer: str = 'stream',
        in_background: bool = False,
        after_commit: Callable[[CheckpointFolder, Step, Collective], None] = lambda target, step, collective: None,
        tell: Callable[[Step, CommittedCheckpoint | None, BaseException | None], None] = lambda step, made, error: None,
    ) -> None:
        self._unwrapped = unwrapped
        self.options = options
        self.collective = collective
        self.log = log
        self.strategy = WriteStrategy(writer)
        self.after_commit = after_commit
        self._tell = tell
        self.tokenizer: Any | None = None
        self.eos_token_ids: Sequence[int] = ()
        self.in_flight: Background[CommittedCheckpoint] | None = None
        self._memory = SnapshotMemory()
        with collective.stage('plan'):
            self.writer = Writer(half_bucket_nbytes(options), beside_training=in_background)
            weakref.finalize(self, self.writer.close).atexit = False
            self._thread = BackgroundThread('xhf-save') if in_background else None
            self.source = source_for(unwrapped.root)
            self.planned = self._plan()
        # A separate group: training and the first stages of the next save use the other one meanwhile
        self._beside = Collective() if in_background else None

    @property
    def plan(self) -> SavePlan:
        """The plan of a save."""
        return self.planned.plan

    @property
    def in_background(self) -> bool:
        """Whether :meth:`start` can be used."""
        return self._thread is not None

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of the manifest."""
        return {
            'world_size': self.collective.world_size,
            'writer': self.strategy.value,
            'dtype': self.options.dtype or 'as trained',
            'weights': 'live',
            **self._unwrapped.facts,
        }

    def rehearse(self, target: CheckpointFolder) -> list[str]:
        """Write the HF assets where saves will go, and remove them. Runs on: rank 0.

        Returns:
            Warnings for the log.
        """
        try:
            with naming(target.path):
                return self.write_hf_assets(target.open_staging())
        finally:
            target.abort()

    def write_hf_assets(self, folder: Path) -> list[str]:
        """Write all files except the weights; returns warnings for the log. Runs on: rank 0."""
        return self.planned.exporter.write_hf_assets(folder, self.tokenizer, self.eos_token_ids)

    def reserve_snapshot(self) -> int:
        """Run a trial snapshot, so that memory shortages surface before training.

        Returns:
            Size of a snapshot on this rank, in bytes.
        """
        Snapshot(self.plan, self.source, self._memory, self.collective)
        return self._memory.nbytes

    def save(self, target: CheckpointFolder, step: Step, facts: Mapping[str, Any] | None = None) -> CommittedCheckpoint:
        """Write and commit one checkpoint.

        Args:
            facts: Fields of the manifest for this save only.

        Raises:
            SharedError: A rank failed, in the stage that an AgreedError names, or ranks hold different models; the
                previous checkpoint is untouched.
        """
        with self.collective.stage('save'):
            save = self._begin(target, step, facts or {})
        return save.write_and_commit()

    def start(
        self, target: CheckpointFolder, step: Step, facts: Mapping[str, Any] | None = None
    ) -> Background[CommittedCheckpoint]:
        """Copy what is to be saved, and write and commit it in the background, as :attr:`in_flight`.

        Training must pause only during this call. The :meth:`outcome` of the previous save must have been collected.

        Raises:
            SharedError: A rank failed while copying, or ranks hold different models; nothing runs in the background.
        """
        with self.collective.stage('save'):
            if self._beside is None or self._thread is None:
                raise ValueError('expected a Saver that was made with in_background=True')
            save = self._begin(target, step, facts or {})
            save.copy(self._memory, self._beside)
            in_flight = Background(save.write_and_commit, partial(self._tell, step))
            works = self._thread.works
        self.in_flight = in_flight
        works.put(in_flight)
        return in_flight

    def outcome(self) -> CommittedCheckpoint | None:
        """Wait for the save that :meth:`start` began; None if there is none, or its outcome has been collected.

        Raises:
            SharedError: As :meth:`save`.
        """
        if self.in_flight is None:
            return None
        self.in_flight.wait()
        ended, self.in_flight = self.in_flight, None
        return ended.outcome()

    def close(self) -> None:
        """End threads, destroy the process group of background saves. No save may be in flight."""
        self.writer.close()
        if self._thread is not None:
            self._thread.close()
        if self._beside is not None:
            self._beside.close()

    def _plan(self) -> Planned:
        return plan_saves(
            self._unwrapped,
            self.source,
            self.options,
            self.strategy,
            self.collective,
            self.log,
            beside_training=self.in_background,
        )

    def _begin(self, target: CheckpointFolder, step: Step, facts: Mapping[str, Any]) -> Save:
        """Start the clock, plan again where tensors were frozen, unfrozen, resized or replaced, and compare copies."""
        self.source.synchronize()  # what training has queued is not a cost of the save
        clock = SaveClock()
        self.source = source_for(self._unwrapped.root)
        warn_of_left_out(self.log, self.planned.exporter, self._unwrapped.root)
        if self.collective.any(self.source.specs() != self.planned.specs, 'plan'):
            self.planned = self._plan()
        save = Save(self, target, step, facts, clock)
        save.compare()
        return save
