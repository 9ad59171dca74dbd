"""All saves of one live model: planned from metadata alone, and made one after another."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.background.save_in_flight import SaveInFlight, SavesInBackground
from xhf_hooks.collective import Collective
from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.base import Exporter
from xhf_hooks.options import SaveOptions, parse_size
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.planner import describe_plan, make_plan
from xhf_hooks.planning.types import CommittedCheckpoint, ExportEntry, Step, TensorSpec
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.saves.save import Save
from xhf_hooks.saves.telemetry import RunLog, SaveClock, warn_of_left_out
from xhf_hooks.saves.unwrap import Unwrapped
from xhf_hooks.sources import source_for
from xhf_hooks.sources.host_memory import SnapshotMemory
from xhf_hooks.sources.master_fragments import refuse_unreadable_fp32_masters
from xhf_hooks.sources.send import Snapshot
from xhf_hooks.system.files import allow_open_files, naming
from xhf_hooks.writers.writer import Writer

#: Memory for writing slices: parts on their way to the disk, and a buffer for direct I/O (sources/, writers/).
_SLICES_NBYTES = 32 * 10**6


@dataclass(frozen=True)
class Planned:
    """The plan of a model's saves, and what it was made from.

    Attributes:
        specs: The model's tensors. A save whose tensors are others plans again.
        expected_extra_nbytes: Estimated memory of a save on the busiest rank.
    """

    exporter: Exporter
    specs: list[TensorSpec]
    plan: SavePlan
    expected_extra_nbytes: int


class Saver:
    """Saves one live model, any number of times. Runs on: all ranks, every method.

    Args:
        unwrapped: The trained model (unwrap.py).
        log: Gets what is trained and not saved, and the progress of long saves.
        strategy: Who writes what, as chosen for the option ``writer`` (places/claim.py).
        in_background: Whether :meth:`start` will be used.
        after_commit: Called on all ranks after each commit, in the thread that saves. Begins with an agreement if it
            communicates.

    Attributes:
        source: Renewed at each save.
        planned: Renewed when the model's tensors change.
        strategy: Who writes what.
        tokenizer: Written beside the weights. Set it on rank 0.
        eos_token_ids: Added to generation_config.json. Set them on rank 0.
        background: Makes what :meth:`start` begins; None if it will not be used.

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
        strategy: WriteStrategy = WriteStrategy.STREAM,
        in_background: bool = False,
        after_commit: Callable[[CheckpointFolder, Step, Collective], None] = lambda target, step, collective: None,
    ) -> None:
        self._unwrapped = unwrapped
        self.options = options
        self.collective = collective
        self.log = log
        self.strategy = strategy
        self.in_background = in_background
        self.after_commit = after_commit
        self.tokenizer: Any | None = None
        self.eos_token_ids: Sequence[int] = ()
        self._memory = SnapshotMemory()
        self._half_bucket_nbytes = max(1, parse_size(options.bucket_size) // 2)  # gathered while as much is written
        with collective.stage('plan'):
            self.writer = Writer(self._half_bucket_nbytes, beside_training=in_background)
            weakref.finalize(self, self.writer.close).atexit = False
            self.background = SavesInBackground() if in_background else None
            self.source = source_for(unwrapped.root)
            self.planned = self._plan()
        # A separate group: training and the first stages of the next save use the other one meanwhile
        self._beside = Collective() if in_background else None

    @property
    def plan(self) -> SavePlan:
        """The plan of a save."""
        return self.planned.plan

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
        """Run a trial snapshot, so that memory shortages surface before training; returns its bytes on this rank."""
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
        self,
        target: CheckpointFolder,
        step: Step,
        facts: Mapping[str, Any] | None = None,
        tell: Callable[[CommittedCheckpoint | None, BaseException | None], None] = lambda committed, error: None,
    ) -> Future[CommittedCheckpoint]:
        """Copy what is to be saved, and write and commit it in the background. Training must pause only meanwhile.

        The previous save must have ended.

        Args:
            tell: Called in the background thread with what was committed, or the error.

        Returns:
            Its outcome, the same on every rank. It is done once it was told.

        Raises:
            SharedError: A rank failed while copying, or ranks hold different models; nothing runs in the background.
        """
        with self.collective.stage('save'):
            if self._beside is None or self.background is None:
                raise ValueError('expected a Saver that was made with in_background=True')
            save = self._begin(target, step, facts or {})
            save.copy(self._memory, self._beside)
            in_flight = SaveInFlight(step, save.write_and_commit, tell)
        self.background.add(in_flight)
        return in_flight.outcome

    def close(self) -> None:
        """End threads, destroy the process group of background saves. No save may be in flight."""
        self.writer.close()
        if self.background is not None:
            self.background.close()
        if self._beside is not None:
            self._beside.close()

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

    def _plan(self) -> Planned:
        """Plan saves from metadata alone, and compare the plan across ranks."""
        source, collective = self.source, self.collective
        with collective.stage('plan'):
            exporter = exporter_for(
                self._unwrapped.model,
                self.options.module,
                lora=self.options.lora,
                llava_format=self.options.llava_format,
                reward_token_id=self._unwrapped.reward_token_id,
            )
            specs = source.specs()
            entries = exporter.entries(specs, self.options.dtype)
            read = self._with_masters(specs, entries)
        with collective.stage('plan'):  # ranks may exchange what they have
            spread = source.spread(read, collective)
        with collective.stage('plan'):
            if any(spec.from_master for spec in read):
                refuse_unreadable_fp32_masters(self._unwrapped.engine)
            source.require_readable({name for entry in entries for name in entry.reads})
            round_nbytes = max(1, self._half_bucket_nbytes // 2)  # an owner receives one while two wait for its disk
            plan = make_plan(
                entries,
                read,
                max_shard_nbytes=parse_size(self.options.max_shard_size),
                bucket_nbytes=self._half_bucket_nbytes,
                n_parameters=exporter.n_parameters,
                strategy=self.strategy,
                world_size=collective.world_size,
                spread=spread,
                share_copies=self.in_background,
                round_nbytes=round_nbytes,
            )
            allow_open_files(len(plan.files), f'{len(plan.files)} files of weights')
        collective.require_same('the save plan', plan.digest, lambda: describe_plan(plan))
        with collective.stage('rehearsal'):  # before the first step, and in the thread that trains
            notes = exporter.rehearse(plan.placements) if collective.rank == 0 else []
            for note in notes:
                self.log.info(note)
            warn_of_left_out(self.log, exporter, self._unwrapped.root)
            gathered_nbytes = source.memory_factor * plan.largest_bucket_nbytes + exporter.combine_nbytes
            received_nbytes = self._half_bucket_nbytes + 3 * round_nbytes if plan.rounds else 0
            extra_nbytes = max(gathered_nbytes, received_nbytes) + (_SLICES_NBYTES if plan.sliced else 0)
            planned = Planned(exporter, specs, plan, extra_nbytes)
        return planned

    def _with_masters(self, specs: list[TensorSpec], entries: Sequence[ExportEntry]) -> list[TensorSpec]:
        """The specs with masters in place of 16-bit weights for outputs that the option ``dtype`` makes fp32."""
        if self.options.dtype is None:
            return specs
        wide = {name for entry in entries if entry.dtype == 'F32' for name in entry.reads}
        return [spec.of_master() if spec.has_master and spec.name in wide else spec for spec in specs]
