"""The whole flow of a save, on one page.

Source.specs()      the tensors of the model          names and full shapes, no data
Exporter.entries()  the exported tensors              and their names
make_plan()         the place of each byte            digest compared across ranks
require_equal()     checksums of copies               compared across ranks: one model, not several
live_chunks()       ranks write their own slices      with writer='positional', where possible
                    or send them to the owner         with 'stream' and 'parallel', where possible
                    the rest, a bucket at a time      under deepspeed.zero.GatheredParameters at ZeRO-3
Writer.write()      into a staging folder             while the next slice or bucket is read
commit()            staging gets the final name       then, and only then, older saves are deleted
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from xhf_hooks.collective import Collective
from xhf_hooks.errors import SharedError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.exporters.base import Exporter
from xhf_hooks.options import SaveOptions, parse_size
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
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
from xhf_hooks.sources.base import Source
from xhf_hooks.sources.host_memory import SnapshotMemory
from xhf_hooks.sources.master_fragments import refuse_unreadable_fp32_masters
from xhf_hooks.sources.replicated import Copies, require_equal
from xhf_hooks.sources.send import Snapshot, live_chunks
from xhf_hooks.system.calls import allow_open_files, naming
from xhf_hooks.system.threads import Background, BackgroundThread
from xhf_hooks.writers.output_file import FileIdentity
from xhf_hooks.writers.tally import Tally, warn_of_non_finite
from xhf_hooks.writers.writer import Writer

#: Memory for writing slices: parts on their way to the disk, and a buffer for direct I/O (sources/, writers/).
_SLICES_NBYTES = 32 * 10**6


class Saver:
    """Saves one live model, any number of times. Runs on: all ranks, every method.

    Args:
        unwrapped: The trained model (unwrap.py).
        writer: The writer chosen for the option ``writer`` (places/who_writes.py).
        in_background: Whether :meth:`start` will be used.
        log: Gets the progress of long saves.
        after_commit: Called on all ranks after each commit, in the thread that saves. Begins with an agreement if it
            communicates.
        tell: Called with the step of a background save, and what it made or its error, in its thread.

    Attributes:
        who_writes: Which ranks write what.
        source: Set by :meth:`prepare`, and renewed at each save.
        exporter: Set by :meth:`prepare`.
        plan: Set by :meth:`prepare`, renewed when the model's tensors change.
        writer: Set by :meth:`prepare`.
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
        after_commit: Callable[[CheckpointFolder, Step, Collective], None] = lambda target, step, collective: None,
        tell: Callable[[Step, CommittedCheckpoint | None, BaseException | None], None] = lambda step, made, error: None,
    ) -> None:
        self._unwrapped, self.options, self.who_writes = unwrapped, options, WhoWrites(writer)
        self._collective, self.log = collective, log
        self.after_commit, self._tell = after_commit, tell
        self._half_bucket = max(1, parse_size(options.bucket_size) // 2)  # gathered while the other half is written
        self._round_nbytes = max(1, self._half_bucket // 2)  # an owner receives one while two more wait for its disk
        self._specs: list[TensorSpec] | None = None
        self.source: Source | None = None
        self.exporter: Exporter | None = None
        self.plan: SavePlan | None = None
        self.writer: Writer | None = None
        self.tokenizer: Any | None = None
        self.eos_token_ids: Sequence[int] = ()
        self.in_flight: Background[CommittedCheckpoint] | None = None
        self.snapshot_memory = SnapshotMemory()
        # A separate group: training and the first stages of the next save use the other one meanwhile
        self._in_background = Collective() if in_background else None
        self._background: BackgroundThread | None = None

    def prepare(self) -> SavePlan:
        """Plan the save from metadata alone and compare the plan across ranks.

        Raises:
            AgreedError: The model cannot be exported; the message has the reason.
            RanksDifferError: Ranks hold different models.
        """
        with self._collective.stage('plan'):
            self._start_threads()
            self.source = source_for(self._unwrapped.root)
            self.exporter = exporter_for(
                self._unwrapped.model,
                self.options.module,
                lora=self.options.lora,
                llava_format=self.options.llava_format,
                reward_token_id=self._unwrapped.reward_token_id,
            )
            self._specs = None  # planned only when this has succeeded
            of_model = self.source.specs()
            entries = self.exporter.entries(of_model, self.options.dtype)
            specs = self._with_masters(of_model, entries)
        with self._collective.stage('plan'):  # ranks may exchange what they have
            spread = self.source.spread({spec.name for spec in specs if spec.from_master}, self._collective)
        with self._collective.stage('plan'):
            if any(spec.from_master for spec in specs):
                refuse_unreadable_fp32_masters(self._unwrapped.engine)
            self._make_plan(entries, specs, spread)
            allow_open_files(len(self.plan.files), f'{len(self.plan.files)} files of weights')
        self._collective.require_same('the save plan', self.plan.digest, lambda: describe_plan(self.plan))
        with self._collective.stage('rehearsal'):  # before the first step, and in the thread that trains
            notes = self.exporter.rehearse(self.plan.placements) if self._collective.rank == 0 else []
            for note in notes if self.log is not None else ():
                self.log.info(note)
            self._warn_of_left_out()
        self._specs = of_model
        return self.plan

    @property
    def expected_extra_nbytes(self) -> int:
        """Estimated memory of a save on the busiest rank."""
        gathered = self.source.memory_factor * self.plan.largest_bucket_nbytes + self.exporter.combine_nbytes
        received = self._half_bucket + 3 * self._round_nbytes if self.plan.rounds else 0
        return max(gathered, received) + _SLICES_NBYTES * bool(self.plan.sliced)

    def rehearse(self, target: CheckpointFolder) -> list[str]:
        """Write the HF assets where saves will go, and remove them. Runs on: rank 0.

        Returns:
            Warnings for the log.
        """
        try:
            with naming(target.path):
                return self.exporter.write_hf_assets(target.open_staging(), self.tokenizer, self.eos_token_ids)
        finally:
            target.abort()

    def reserve_snapshot(self) -> int:
        """Run a trial snapshot, so that memory shortages surface before training.

        Returns:
            Size of a snapshot on this rank, in bytes.
        """
        self.take_snapshot()
        return self.snapshot_memory.nbytes

    def save(
        self,
        target: CheckpointFolder,
        step: Step,
        facts: Mapping[str, Any] | None = None,
    ) -> CommittedCheckpoint:
        """Write and commit one checkpoint.

        Args:
            facts: Fields of the manifest for this save only.

        Raises:
            SharedError: A rank failed, in the stage that an AgreedError names, or ranks hold different models; the
                previous checkpoint is untouched.
        """
        with self._collective.stage('save'):
            save = self._begin(target, step, facts or {}, self._collective)
        return save.finish()

    def start(
        self,
        target: CheckpointFolder,
        step: Step,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy what is to be saved, and write and commit it in the background, as :attr:`in_flight`.

        Training must pause only during this call. The :meth:`outcome` of the previous save must have been collected.

        Raises:
            SharedError: A rank failed while copying, or ranks hold different models; nothing runs in the background.
        """
        with self._collective.stage('save'):
            save = self._begin(target, step, facts or {}, self._in_background)
            save.copy(self._collective)
            in_flight = Background(save.finish, partial(self._tell, step))
        self.in_flight = in_flight
        self._background.works.put(in_flight)

    def outcome(self) -> CommittedCheckpoint:
        """Wait for the save that :meth:`start` began.

        Raises:
            SharedError: As :meth:`save`.
        """
        self.in_flight.wait()
        ended, self.in_flight = self.in_flight, None
        return ended.outcome()

    def close(self) -> None:
        """End threads, destroy the process group of background saves. No save may be in flight."""
        if self.writer is not None:
            self.writer.close()
        if self._background is not None:
            self._background.close()
        if self._in_background is not None:
            self._in_background.close()

    def copies(self) -> Copies:
        """What several ranks hold of what is saved, but for fp32 masters."""
        names = [spec.name for spec in self.plan.reads if not spec.from_master]
        return Copies(self.source, names, self._collective.rank, self._collective.world_size)

    def take_snapshot(self) -> Snapshot:
        """Copy what this rank writes or sends."""
        return Snapshot(self.plan, self.source, self.snapshot_memory, self._collective)

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of the manifest."""
        return {
            'world_size': self._collective.world_size,
            'writer': self.who_writes.value,
            'dtype': self.options.dtype or 'as trained',
            'weights': 'live',
            **self._unwrapped.facts,
        }

    def _start_threads(self) -> None:
        if self.writer is None:
            is_beside_training = self._in_background is not None
            self.writer = Writer(self._half_bucket, beside_training=is_beside_training)
            weakref.finalize(self, self.writer.close).atexit = False
            self._background = BackgroundThread('xhf-save') if is_beside_training else None

    def _warn_of_left_out(self) -> None:
        if self.log is not None:
            warn_of_left_out(self.log, self.exporter, self._unwrapped.root)

    def _with_masters(self, specs: list[TensorSpec], entries: list[ExportEntry]) -> list[TensorSpec]:
        """The specs with masters in place of 16-bit weights for outputs that the option ``dtype`` makes fp32."""
        if self.options.dtype is None:
            return specs
        wide = {name for entry in entries if entry.dtype == 'F32' for name in entry.reads}
        return [replace(spec, dtype='F32') if spec.has_master and spec.name in wide else spec for spec in specs]

    def _make_plan(self, entries: list[ExportEntry], specs: list[TensorSpec], spread: Mapping[str, Spread]) -> None:
        who = self.who_writes
        self.source.require_readable({name for entry in entries for name in entry.reads})
        self.plan = make_plan(
            entries,
            specs,
            max_shard_nbytes=parse_size(self.options.max_shard_size),
            bucket_nbytes=self._half_bucket,
            n_parameters=self.exporter.n_parameters,
            n_writers=self._collective.world_size if who.all_ranks else 1,
            in_place=who.writes_local_shards,
            spread=spread if who.writes_local_shards or who.receives_local_shards else {},
            share_copies=self._in_background is not None,
            round_nbytes=self._round_nbytes,
        )

    def _begin(self, target: CheckpointFolder, step: Step, facts: Mapping[str, Any], collective: Collective) -> Save:
        """Start the clock, and plan again where tensors were frozen, unfrozen, resized or replaced."""
        must_plan = True
        with self._collective.remembering('plan'):  # which is rare: without an error, one collective is enough
            self.source.synchronize()  # what training has queued is not a cost of the save
            save = Save(self, target, step, facts, collective)
            self.source = source_for(self._unwrapped.root)
            must_plan = self.source.specs() != self._specs
            self._warn_of_left_out()
        if self._collective.any(must_plan, 'plan'):
            self.prepare()
        save.clock.stage_secs['plan'] = save.clock.seconds
        return save


class Save:
    """One save, on its way from the plan to the commit. Runs on: all ranks, every method.

    Args:
        saver: Has the plan, the source, the exporter and the writer.
        facts: Fields of the manifest for this save only.
        collective: For the thread that writes.

    Attributes:
        clock: Started when this is made.
    """

    def __init__(
        self, saver: Saver, target: CheckpointFolder, step: Step, facts: Mapping[str, Any], collective: Collective
    ) -> None:
        self.clock = SaveClock()
        self._saver, self._target, self._step, self._facts = saver, target, step, facts
        self._collective = collective
        self._is_rank0 = collective.rank == 0
        self._copied: Generator[Chunk, None, None] | None = None
        self._warnings: list[str] = []
        self._peak_nbytes = 0

    def copy(self, collective: Collective) -> None:
        """Copy what is to be saved, since training will change it. Called in the thread that trains.

        Args:
            collective: For that thread.

        Raises:
            SharedError: A rank failed, or ranks hold different models.
        """
        clock = self.clock
        with collective.stage('snapshot'), clock.stage('snapshot'):
            self._copied = self._saver.take_snapshot().chunks(self._collective)
            clock.meter.sample()
        with collective.stage('compare'):
            if (copies := self._saver.copies()).names:
                with clock.stage('compare'):
                    require_equal(copies, collective)
            clock.training_goes_on()

    def finish(self) -> CommittedCheckpoint:
        """Write and commit.

        Raises:
            SharedError: A rank failed, or ranks hold different models. The previous checkpoint is untouched.
        """
        with self._collective.stage('save'):
            try:
                with self.clock.stage('staging'):
                    staging, files = self._stage()
                with self.clock.stage('write'):
                    tally = self._write(staging, files)
                with self.clock.stage('tally'):
                    self._add_up(tally)
                with self.clock.stage('commit'):
                    committed = self._commit(tally)
            finally:
                for clean_up in (self._saver.writer.abort, self._target.abort):
                    with contextlib.suppress(Exception):  # what is left is removed before the next save
                        clean_up()
        try:
            with self._collective.stage('after the commit'):
                committed = replace(committed, cost=self._cost())
                self._saver.after_commit(self._target, self._step, self._collective)
        except SharedError as error:
            told = f'{self._step.label} is saved, but its upload and on_saved were not begun: {error}'
            return replace(committed, warnings=(*committed.warnings, told))
        return committed

    def _stage(self) -> tuple[str, dict[str, FileIdentity]]:
        """Prepare the staging folder; returns its name, and the files that ranks write into."""
        saver, made, copies = self._saver, None, None
        with self._collective.stage('staging'), naming(self._target.path):
            if self._is_rank0:
                staging = self._target.open_staging()
                self._target.require_room(saver.plan.nbytes)
                self._warnings += saver.exporter.write_hf_assets(staging, saver.tokenizer, saver.eos_token_ids)
                made = staging.name, saver.writer.create(saver.plan, staging)
            if self._copied is None:  # else they were compared before training went on
                copies = saver.copies()  # while they would wait for rank 0
        if copies is not None and copies.names:
            require_equal(copies, self._collective)
        return self._collective.broadcast(made)

    def _write(self, staging: str, files: Mapping[str, FileIdentity]) -> Tally:
        """Write this rank's part; returns what it was."""
        saver, collective, step = self._saver, self._collective, self._step
        with collective.stage('write'):
            folder = self._target.path.with_name(staging)  # hosts may mount the file system elsewhere
            saver.writer.open(saver.plan, folder, files, fsync=self._target.fsync)
            n_writers = collective.world_size if saver.who_writes.all_ranks else 1
            progress = Progress(saver.log, step.label, saver.plan.nbytes // n_writers)
            chunks = self._copied
            if chunks is None:
                chunks = live_chunks(saver.plan, saver.source, collective)
        with collective.stage('write'), closing(chunks):
            for chunk in chunks:
                with collective.remembering('write'):
                    self.clock.meter.sample()  # what was read, what was made from it, and what waits for the disk
                    if not collective.is_failing:  # else the others keep gathering, and need this rank
                        progress.wrote(chunk.data.nbytes)
                        saver.writer.write(chunk)
                del chunk  # the next one is made while this one waits for the disk
            return Tally(saver.plan) if collective.is_failing else saver.writer.finish()

    def _add_up(self, tally: Tally) -> None:
        """Make it what all ranks have written."""
        collective = self._collective
        with collective.stage('tally'):
            peak_nbytes = np.array([self.clock.meter.peak_extra_nbytes])
        tally.sums = collective.all_reduce(tally.sums, 'SUM')
        tally.checksums = collective.all_reduce(tally.checksums, 'BXOR')
        self._peak_nbytes = int(collective.all_reduce(peak_nbytes, 'MAX')[0])

    def _commit(self, tally: Tally) -> CommittedCheckpoint:
        """Commit on rank 0, once no rank can fail any more."""
        saver, collective, target = self._saver, self._collective, self._target
        with collective.stage('commit'):
            tensors = tally.written() if self._is_rank0 else []
            written = WrittenSave(saver.plan, tensors, self._step, {**saver.facts, **self._facts})
            warnings = (*self._warnings, *warn_of_non_finite(tensors))
            committed = CommittedCheckpoint(target.path, self._step, self._cost(), warnings)
        with collective.stage('commit'), naming(target.path):
            if self._is_rank0:
                # Beside training, bytes are read back in this thread: none can be started while the process exits
                target.commit(written, saver.options.verify, None if self._copied is None else 1)
        return committed

    def _cost(self) -> SaveCost:
        clock = self.clock
        return SaveCost(self._saver.plan.nbytes, clock.seconds, clock.stalled_secs, self._peak_nbytes, clock.stage_secs)
