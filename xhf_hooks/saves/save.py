"""The whole flow of a save, on one page.

Source.specs()      the tensors of the model          names and full shapes, no data
Exporter.entries()  the exported tensors              and their names
make_plan()         the place of each byte            digest compared across ranks
require_same()      checksums of copies               compared across ranks: one model, not several
live_chunks()       ranks write their own slices      with writer='positional', where possible
                    or send them to the owner         with 'stream' and 'parallel', where possible
                    the rest, a bucket at a time      under deepspeed.zero.GatheredParameters at ZeRO-3
Writer.write()      into a staging folder             while the next slice or bucket is read
upload()            each rank its own files           if out_dir is a store
commit()            staging gets the final name       then, and only then, older saves are deleted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xhf_hooks.collective import Collective
from xhf_hooks.exporters import exporter_for
from xhf_hooks.options import SaveOptions, parse_size
from xhf_hooks.places.target import SaveTarget
from xhf_hooks.places.who_writes import WhoWrites
from xhf_hooks.planning.planner import describe_plan, make_plan
from xhf_hooks.planning.types import (
    Chunk,
    CommittedCheckpoint,
    ExportEntry,
    SaveCost,
    SavePlan,
    Spread,
    Step,
    TensorSpec,
    WrittenSave,
)
from xhf_hooks.saves.telemetry import Progress, RunLog, SaveClock, warn_of_left_out
from xhf_hooks.saves.unwrap import Unwrapped
from xhf_hooks.sources import source_for
from xhf_hooks.sources.master_fragments import refuse_unreadable_fp32_masters
from xhf_hooks.sources.replicated import checksums_of, require_same
from xhf_hooks.sources.send import Snapshot, live_chunks
from xhf_hooks.system.calls import allow_open_files
from xhf_hooks.system.memory import SnapshotMemory
from xhf_hooks.system.threads import Background
from xhf_hooks.writers.output_file import FileIdentity
from xhf_hooks.writers.tally import Tally, warn_of_non_finite
from xhf_hooks.writers.writer import Writer

#: Memory for writing slices: parts on their way to the disk, and a buffer for direct I/O (sources/, writers/).
_SLICES_NBYTES = 32 * 10**6


@dataclass(frozen=True)
class _Begun:
    """A save that needs no more of the thread that trains, if its chunks are a copy.

    Attributes:
        facts: Fields of the manifest for this save only.
        collective: For the thread that writes.
        chunks: What this rank writes.
    """

    target: SaveTarget
    step: Step
    facts: Mapping[str, Any]
    collective: Collective
    clock: SaveClock
    chunks: AbstractContextManager[Iterator[Chunk]]
    writer: Writer


class Saver:
    """Saves one live model, any number of times. Runs on: all ranks, every method.

    Args:
        unwrapped: The trained model (unwrap.py).
        writer: The writer chosen for the option ``writer`` (places/who_writes.py).
        in_background: Whether :meth:`start` will be used.
        log: Gets the progress of long saves.
        after_commit: Called on all ranks after each commit, in the thread that saves.

    Attributes:
        writer: Who writes what.
        exporter: Set by :meth:`prepare`.
        plan: Set by :meth:`prepare`, renewed when the model's tensors change.
        tokenizer: Written beside the weights. Set it on rank 0.
        eos_token_ids: Added to generation_config.json. Set them on rank 0.
        in_flight: The save that :meth:`start` began; its outcome is the same on every rank.
        snapshot_memory: Where :meth:`start` copies to.
    """

    def __init__(
        self,
        unwrapped: Unwrapped,
        options: SaveOptions,
        collective: Collective,
        *,
        writer: str = 'stream',
        in_background: bool = False,
        log: RunLog | None = None,
        after_commit: Callable[[SaveTarget, Step, Collective], None] = lambda target, step, collective: None,
    ) -> None:
        self._unwrapped, self._options, self.writer = unwrapped, options, WhoWrites(writer)
        self._collective, self._log, self._after_commit = collective, log, after_commit
        self._half_bucket = max(1, parse_size(options.bucket_size) // 2)  # gathered while the other half is written
        self._round_nbytes = max(1, self._half_bucket // 2)  # an owner receives one while two more wait for its disk
        self._specs: list[TensorSpec] | None = None
        self.plan: SavePlan | None = None
        self.tokenizer: Any | None = None
        self.eos_token_ids: Sequence[int] = ()
        self.in_flight: Background[CommittedCheckpoint] | None = None
        self.snapshot_memory = SnapshotMemory()
        # A separate group: training and the first stages of the next save use the other one meanwhile
        self._in_background = Collective() if in_background else None

    def prepare(self) -> SavePlan:
        """Plan the save from metadata alone and compare the plan across ranks.

        Raises:
            AgreedError: The model cannot be exported; the message has the reason.
            PlanError: Ranks hold different models.
        """
        with self._collective.stage('plan'):
            self._source = source_for(self._unwrapped.root)
            self.exporter = exporter_for(
                self._unwrapped.model,
                self._options.module,
                lora=self._options.lora,
                llava_format=self._options.llava_format,
                reward_token_id=self._unwrapped.reward_token_id,
            )
            self._specs = self._source.specs()
            entries = self.exporter.entries(self._specs, self._options.dtype)
            specs = self._with_masters(self._specs, entries)
        with self._collective.stage('plan'):  # a separate stage: ranks may exchange what they have
            spread = self._source.spread({spec.name for spec in specs if spec.from_master}, self._collective)
        with self._collective.stage('plan'):
            if any(spec.from_master for spec in specs):
                refuse_unreadable_fp32_masters(self._unwrapped.engine)
            self._make_plan(entries, specs, spread)
            allow_open_files(len(self.plan.files), f'{len(self.plan.files)} files of weights')
        self._collective.require_same('the save plan', self.plan.digest, lambda: describe_plan(self.plan))
        with self._collective.stage('rehearsal'):  # before the first step, and in the thread that trains
            notes = self.exporter.rehearse(self.plan.placements) if self._collective.rank == 0 else []
        if self._log is not None:
            for note in notes:
                self._log.info(note)
            warn_of_left_out(self._log, self.exporter, self._unwrapped.root)
        return self.plan

    @property
    def expected_extra_nbytes(self) -> int:
        """Estimated memory of a save on the busiest rank."""
        gathered = self._source.memory_factor * self.plan.largest_bucket_nbytes + self.exporter.combine_nbytes
        received = self._half_bucket + 3 * self._round_nbytes if self.plan.rounds else 0
        return max(gathered, received) + _SLICES_NBYTES * bool(self.plan.sliced)

    def rehearse(self, target: SaveTarget) -> list[str]:
        """Write the HF assets where saves will go, and remove them. Runs on: rank 0.

        Returns:
            Warnings for the log.
        """
        try:
            return self.exporter.write_hf_assets(target.open_staging(), self.tokenizer, self.eos_token_ids)
        finally:
            target.end_save()

    def reserve_snapshot(self) -> int:
        """Run a trial snapshot, so that memory shortages surface before training.

        Returns:
            Size of a snapshot on this rank, in bytes.
        """
        self._take_snapshot()
        return self.snapshot_memory.nbytes

    def save(
        self,
        target: SaveTarget,
        step: Step,
        facts: Mapping[str, Any] | None = None,
    ) -> CommittedCheckpoint:
        """Write and commit one checkpoint.

        Args:
            facts: Fields of the manifest for this save only.

        Raises:
            AgreedError: A rank failed, in the stage it names; the previous checkpoint is untouched.
            PlanError: Ranks hold different models.
        """
        return self._write_and_commit(self._begin(target, step, facts or {}, in_background=False))

    def start(
        self,
        target: SaveTarget,
        step: Step,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy what is to be saved, and write and commit it in the background, as :attr:`in_flight`.

        Training must pause only during this call. The :meth:`outcome` of the previous save must have been collected.

        Raises:
            AgreedError: A rank failed while copying; nothing runs in the background.
            PlanError: Ranks hold different models.
        """
        begun = self._begin(target, step, facts or {}, in_background=True)
        begun.clock.training_goes_on()
        self.in_flight = Background(lambda: self._write_and_commit(begun), 'xhf-save')

    def outcome(self) -> CommittedCheckpoint:
        """Wait for the save that :meth:`start` began.

        Raises:
            AgreedError: As :meth:`save`.
        """
        self.in_flight.wait()
        ended, self.in_flight = self.in_flight, None
        return ended.outcome()

    def close(self) -> None:
        """Destroy the process group of background saves. No save may be in flight."""
        if self._in_background is not None:
            self._in_background.close()

    def _with_masters(self, specs: list[TensorSpec], entries: list[ExportEntry]) -> list[TensorSpec]:
        """The specs with masters in place of 16-bit weights for outputs that the option ``dtype`` makes fp32."""
        if self._options.dtype is None:
            return specs
        wide = {name for entry in entries if entry.dtype == 'F32' for name in entry.reads}
        return [replace(spec, dtype='F32') if spec.has_master and spec.name in wide else spec for spec in specs]

    def _make_plan(self, entries: list[ExportEntry], specs: list[TensorSpec], spread: Mapping[str, Spread]) -> None:
        who = self.writer
        self._source.require_readable({name for entry in entries for name in entry.reads})
        self.plan = make_plan(
            entries,
            specs,
            max_shard_nbytes=parse_size(self._options.max_shard_size),
            bucket_nbytes=self._half_bucket,
            n_parameters=self.exporter.n_parameters,
            n_writers=self._collective.world_size if who.all_ranks else 1,
            in_place=who.writes_local_shards,
            spread=spread if who.writes_local_shards or who.receives_local_shards else {},
            share_copies=self._in_background is not None,
            round_nbytes=self._round_nbytes,
        )

    def _renew_plan(self) -> None:
        must_plan = True
        with self._collective.remembering('plan'):  # rare; without an error, one collective is enough
            self._source = source_for(self._unwrapped.root)
            must_plan = self._source.specs() != self._specs
        if self._collective.any(must_plan, 'plan'):
            self._collective.agree('plan')
            self.prepare()  # tensors were frozen, unfrozen, resized or replaced since

    def _take_snapshot(self) -> Snapshot:
        return Snapshot(self.plan, self._source, self.snapshot_memory, self._collective)

    def _begin(
        self,
        target: SaveTarget,
        step: Step,
        facts: Mapping[str, Any],
        *,
        in_background: bool,
    ) -> _Begun:
        """Plan; for a background save, copy; start the writer's thread."""
        with self._collective.remembering('plan'):  # a kernel of training may have failed
            self._source.synchronize()  # what training has queued is not a cost of the save
        clock = SaveClock()
        with clock.stage('plan'):
            self._renew_plan()
        if self._log is not None:
            warn_of_left_out(self._log, self.exporter, self._unwrapped.root)
        collective, chunks = self._collective, live_chunks(self.plan, self._source, self._collective)
        if in_background:
            collective = self._in_background
            with clock.stage('snapshot'):
                chunks = self._take_snapshot().chunks(collective)
            clock.meter.sample()
            if copies := self._copies():
                with clock.stage('compare'):
                    with self._collective.stage('compare'):
                        checksums = checksums_of(copies, self._source)
                    require_same(copies, checksums, self._collective)
        with ExitStack() as on_error:
            with self._collective.stage('threads'):
                writer = Writer(self._half_bucket, fsync=target.fsync, beside_training=in_background)
                on_error.callback(writer.abort)
            on_error.pop_all()
        return _Begun(target, step, facts, collective, clock, chunks, writer)

    def _copies(self) -> dict[str, Spread]:
        """What several ranks hold."""
        return self._source.replicated([spec.name for spec in self.plan.reads if not spec.from_master])

    def _write_and_commit(self, begun: _Begun) -> CommittedCheckpoint:
        """Everything after that. Runs on: all ranks; for a background save, in the background thread."""
        plan, target, step, writer, clock = self.plan, begun.target, begun.step, begun.writer, begun.clock
        collective = begun.collective
        is_rank0 = collective.rank == 0
        warnings: list[str] = []
        made = None
        try:
            copies = {} if collective is self._in_background else self._copies()  # compared before training went on
            with clock.stage('staging'):
                with collective.stage('staging'):
                    if is_rank0:
                        staging = target.open_staging()
                        target.room(plan.nbytes)
                        warnings += self.exporter.write_hf_assets(staging, self.tokenizer, self.eos_token_ids)
                        made = staging.name, writer.create(plan, staging) if target.is_shared else {}
                    if copies:  # while they would wait for rank 0
                        checksums = checksums_of(copies, self._source)
                if copies:
                    require_same(copies, checksums, collective)
                name, files = collective.broadcast(made)
                place = target.place(name)
                if not target.is_shared:
                    with collective.stage('staging'):
                        files = writer.create(plan, place, owner=collective.rank)
            with clock.stage('write'):
                tally = self._write(begun, place, files)
            with clock.stage('tally'):
                tally.add_up(collective.all_reduce)
                peak = int(collective.all_reduce(np.array([clock.meter.peak_extra_nbytes]), 'MAX')[0])
            facts = {
                'world_size': collective.world_size,
                'writer': self.writer.value,
                'dtype': self._options.dtype or 'as trained',
                'weights': 'live',
                **self._unwrapped.facts,
                **begun.facts,
            }
            tensors = tally.written() if is_rank0 else []
            save = WrittenSave(plan, tensors, step, facts)
            if not target.is_shared:
                with clock.stage('upload'):
                    target.upload(save, self._options.verify, collective)
            with clock.stage('commit'), collective.stage('commit'):
                if is_rank0:
                    # Beside training, bytes are read back in this thread: none can be started while the process exits
                    workers = 1 if collective is self._in_background else None
                    target.commit(save, self._options.verify, workers)
                    warnings += warn_of_non_finite(tensors)
        finally:
            writer.abort()
            target.end_save()
        self._after_commit(target, step, collective)
        cost = SaveCost(plan.nbytes, clock.seconds, clock.stalled_secs, peak, clock.stage_secs)
        return CommittedCheckpoint(target.where, step, cost, tuple(warnings))

    def _write(self, begun: _Begun, place: Path, files: Mapping[str, FileIdentity]) -> Tally:
        """Returns what this rank has written."""
        collective, writer = begun.collective, begun.writer
        with begun.chunks as chunks, collective.stage('write'):
            writer.open(self.plan, place, files)
            n_writers = collective.world_size if self.writer.all_ranks else 1
            progress = Progress(self._log, begun.step.label, self.plan.nbytes // n_writers)
            for chunk in chunks:
                begun.clock.meter.sample()  # what was read, what was made from it, and what waits for the disk
                if collective.is_failing:
                    continue  # the others keep gathering until the next agreement, and need this rank
                with collective.remembering('write'):
                    progress.wrote(chunk.data.nbytes)
                    writer.write(chunk)
                    del chunk  # the next chunk is made while this one waits for the disk
            return Tally(self.plan) if collective.is_failing else writer.finish()
