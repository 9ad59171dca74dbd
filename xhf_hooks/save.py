"""The whole flow of a save, on one page.

Source.specs()      the tensors of the model          names and full shapes, no data
Exporter.entries()  the exported tensors              and their names
make_plan()         the place of each byte            digest compared across ranks
Replicas            checksums of whole copies         compared across ranks: one model, not several
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
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from xhf_hooks.collective import Collective
from xhf_hooks.config.options import SaveOptions
from xhf_hooks.errors import XhfError
from xhf_hooks.exporters import exporter_for
from xhf_hooks.host_memory import MemoryMeter, SnapshotMemory
from xhf_hooks.installed import package_versions
from xhf_hooks.places.target import SaveTarget
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
)
from xhf_hooks.sources import source_for
from xhf_hooks.sources.replicated import Replicas
from xhf_hooks.sources.snapshot import Snapshot, live_chunks
from xhf_hooks.system import allow_open_files
from xhf_hooks.telemetry import SaveClock
from xhf_hooks.threads import Background, WorkerThreads, default_workers, lower_priority
from xhf_hooks.writers.choose import WhoWrites
from xhf_hooks.writers.output_file import FileIdentity
from xhf_hooks.writers.tally import Tally, add_up, warn_of_non_finite
from xhf_hooks.writers.writer import Writer

#: Memory for writing slices: parts on their way to the disk, and a buffer for direct I/O (sources/, writers/).
_SLICES_NBYTES = 32 * 10**6


@dataclass(frozen=True)
class _Job:
    """One save: where it goes, what the manifest says of it, and its threads.

    Attributes:
        facts: Fields of the manifest for this save only.
        replicas: What every rank has a whole copy of.
        readers: Threads that read back what was written; on rank 0, with ``verify='full'``.
        to_close: Ends the threads.
    """

    folder: SaveTarget
    step: Step
    facts: Mapping[str, Any]
    on_progress: Callable[[int, int], None] | None
    writer: Writer
    replicas: Replicas
    readers: WorkerThreads | None
    to_close: ExitStack


class Saver:
    """Saves one live model, any number of times. Runs on: all ranks, every method.

    Args:
        model: The bare trained module (not the engine or wrapper around it).
        root: The module that the source reads, if it is not the model (model.py); None: the model.
        writer: The writer chosen for the option ``writer`` (writers/choose.py).
        reward_token_id: The token whose score is the reward, from the run's config; None if there is none.
        in_background: Whether :meth:`start` will be used.
        facts: More fields of the manifest, such as engine and ZeRO stage.
        after_commit: Called on all ranks after each commit, in the thread that saves, with the final name.

    Attributes:
        exporter: Set by :meth:`prepare`.
        plan: Set by :meth:`prepare`, renewed when the model's tensors change.
        background: Runs the save that :meth:`start` began; its outcome is the same on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        options: SaveOptions,
        collective: Collective,
        root: nn.Module | None = None,
        *,
        writer: str = 'stream',
        reward_token_id: int | None = None,
        in_background: bool = False,
        facts: Mapping[str, Any] | None = None,
        after_commit: Callable[[Path, Step, Collective], None] | None = None,
    ) -> None:
        self._after_commit = after_commit
        self._model = model
        self._root = model if root is None else root
        self._options, self._who, self._reward_token_id = options, WhoWrites(writer), reward_token_id
        self._facts_of_run = facts or {}
        self._collective = collective
        self._specs: list[TensorSpec] | None = None
        self.plan: SavePlan | None = None
        self._tokenizer: Any | None = None
        self._eos_token_ids: Sequence[int] = ()
        self.background: Background[CommittedCheckpoint] = Background('xhf-save')
        self._snapshot = SnapshotMemory()
        # A separate group: training and the first stages of the next save use the other one meanwhile
        self._in_background = Collective() if in_background else None

    @property
    def in_background(self) -> bool:
        """Whether :meth:`start` may be used."""
        return self._in_background is not None

    def set_tokenizer(self, tokenizer: Any | None, eos_token_ids: Sequence[int] = ()) -> None:
        """Set the tokenizer to write beside the weights, and EOS token ids to add. Runs on: rank 0."""
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids

    def prepare(self) -> SavePlan:
        """Plan the save from metadata alone and compare the plan across ranks.

        Raises:
            AgreedError: The model cannot be exported; the message has the reason.
            PlanError: Ranks hold different models.
        """
        with self._collective.stage('plan'):
            self._source = source_for(self._root)
            self.exporter = exporter_for(
                self._model,
                self._options.module,
                lora=self._options.lora,
                llava_format=self._options.llava_format,
                reward_token_id=self._reward_token_id,
            )
            self._specs = self._source.specs()
            entries = self.exporter.entries(self._specs, self._options.dtype)
            specs = self._with_masters(self._specs, entries)
        with self._collective.stage('plan'):  # a separate stage: ranks may exchange what they have
            spread = self._source.spread({spec.name for spec in specs if spec.from_master}, self._collective)
        with self._collective.stage('plan'):
            self._make_plan(entries, specs, spread)
            allow_open_files(len(self.plan.files), f'{len(self.plan.files)} files of weights')
        self._collective.require_same('the save plan', self.plan.digest, lambda: describe_plan(self.plan))
        return self.plan

    @property
    def expected_extra_nbytes(self) -> int:
        """Estimated memory of a save on the busiest rank."""
        gathered = self._source.memory_factor * self.plan.largest_bucket_nbytes + self.exporter.combine_nbytes
        received = self._half_bucket + 3 * self._round_nbytes if self.plan.rounds else 0
        return max(gathered, received) + _SLICES_NBYTES * bool(self.plan.sliced)

    def rehearse(self, folder: SaveTarget) -> list[str]:
        """Write the HF assets where saves will go, and remove them. Runs on: rank 0.

        Returns:
            Warnings for the log.
        """
        try:
            return self.exporter.write_hf_assets(folder.open_staging(), self._tokenizer, self._eos_token_ids)
        finally:
            folder.abandon()

    def save(
        self,
        folder: SaveTarget,
        step: Step,
        on_progress: Callable[[int, int], None] | None = None,
        facts: Mapping[str, Any] | None = None,
        prepare_secs: float = 0.0,
    ) -> CommittedCheckpoint:
        """Write and commit one checkpoint.

        Args:
            on_progress: Called after each tensor or part of one, on ranks that write, with the bytes that this rank
                has handed to the writer and an estimate of the total.
            facts: Fields of the manifest for this save only.
            prepare_secs: Time that the caller spent before this call; counts as part of the save.

        Raises:
            AgreedError: A rank failed, in the stage it names; the previous checkpoint is untouched.
            PlanError: Ranks hold different models.
        """
        clock = SaveClock(prepare_secs)
        with clock.stage('plan'):
            self._renew_plan()
        replicas = self._replicas()
        if replicas.tensors:
            with clock.stage('compare'):
                replicas.read()
        job = self._begin(folder, step, facts, on_progress, replicas, beside_training=False)
        chunks = live_chunks(self.plan, self._source, self._collective)
        return self._write_and_commit(job, chunks, self._collective, clock)

    def start(
        self,
        folder: SaveTarget,
        step: Step,
        on_progress: Callable[[int, int], None] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy what is to be saved, and write and commit it in the background.

        Training must pause only during this call. The previous save must have ended, and its outcome must have been
        collected from :attr:`background`.

        Raises:
            AgreedError: A rank failed while copying; nothing runs in the background.
            PlanError: Ranks hold different models.
        """
        clock = SaveClock()
        with clock.stage('plan'):
            self._renew_plan()
        with ExitStack() as on_error:
            with clock.stage('snapshot'):
                held = self._take_snapshot()
                clock.meter.sample()
                replicas = self._replicas()
                replicas.read()
            job = self._begin(folder, step, facts, on_progress, replicas, beside_training=True)
            on_error.callback(job.to_close.close)
            clock.training_goes_on()
            chunks = held.chunks(self._in_background)

            def work() -> CommittedCheckpoint:
                lower_priority()
                return self._write_and_commit(job, chunks, self._in_background, clock)

            self.background.start(work)
            on_error.pop_all()

    def reserve_snapshot(self) -> int:
        """Run a trial snapshot, so that memory shortages surface before training.

        Returns:
            Size of a snapshot on this rank, in bytes.
        """
        self._take_snapshot()
        return self._snapshot.nbytes

    def close(self) -> None:
        """Destroy the process group of background saves. No save may be in flight."""
        if self._in_background is not None:
            self._in_background.close()

    def _renew_plan(self) -> None:
        must_plan = True
        try:
            self._source = source_for(self._root)
            must_plan = self._source.specs() != self._specs
        except Exception as error:  # rare; without an error, one collective is enough
            self._collective.remember('plan', error)
        if self._collective.any(must_plan, 'plan'):
            self._collective.agree('plan')
            self.prepare()  # tensors were frozen, unfrozen, resized or replaced since

    def _replicas(self) -> Replicas:
        return Replicas(self.plan, self._source, self._collective.world_size)

    def _take_snapshot(self) -> Snapshot:
        return Snapshot(self.plan, self._source, self._snapshot, self._collective)

    def _with_masters(self, specs: list[TensorSpec], entries: list[ExportEntry]) -> list[TensorSpec]:
        """The specs with masters in place of 16-bit weights for outputs that the option ``dtype`` makes fp32."""
        if self._options.dtype is None:
            return specs
        wide = {name for entry in entries if entry.dtype == 'F32' for name in entry.reads}
        return [replace(spec, dtype='F32') if spec.has_master and spec.name in wide else spec for spec in specs]

    def _make_plan(self, entries: list[ExportEntry], specs: list[TensorSpec], spread: Mapping[str, Spread]) -> None:
        who = self._who
        self._source.require_readable({name for entry in entries for name in entry.reads})
        self.plan = make_plan(
            entries,
            specs,
            max_shard_nbytes=self._options.max_shard_nbytes,
            bucket_nbytes=self._half_bucket,
            n_parameters=self.exporter.n_parameters,
            n_writers=self._collective.world_size if who.all_ranks else 1,
            in_place=who.writes_local_shards,
            spread=spread if who.writes_local_shards or who.receives_local_shards else {},
            share_copies=self.in_background,
            round_nbytes=self._round_nbytes,
        )

    def _begin(
        self,
        folder: SaveTarget,
        step: Step,
        facts: Mapping[str, Any] | None,
        on_progress: Callable[[int, int], None] | None,
        replicas: Replicas,
        *,
        beside_training: bool,
    ) -> _Job:
        """Start all threads of the save before training goes on. The caller closes them."""
        with ExitStack() as to_close:
            with self._collective.stage('threads'):
                writer = Writer(self._half_bucket, fsync=folder.fsync, beside_training=beside_training)
                to_close.callback(folder.end_save)
                to_close.callback(writer.abort)
                readers = None
                if self._options.verify == 'full' and self._collective.rank == 0:
                    prepare = lower_priority if beside_training else lambda: None
                    readers = to_close.enter_context(WorkerThreads(default_workers(), prepare))
            return _Job(folder, step, facts or {}, on_progress, writer, replicas, readers, to_close.pop_all())

    def _write_and_commit(
        self,
        job: _Job,
        chunks: AbstractContextManager[Iterator[Chunk]],
        collective: Collective,
        clock: SaveClock,
    ) -> CommittedCheckpoint:
        """Everything after the plan. Runs on: all ranks; for a background save, in the background thread."""
        plan, is_rank0, folder, writer = self.plan, collective.rank == 0, job.folder, job.writer
        warnings: list[str] = []
        free_before = free_after = made = None
        try:
            if job.replicas.tensors:
                with clock.stage('compare'):
                    job.replicas.require_same(collective)
            with clock.stage('staging'):
                with collective.stage('staging'):
                    if is_rank0:
                        staging = folder.open_staging()
                        free_before = folder.room(plan.nbytes)
                        warnings += self.exporter.write_hf_assets(staging, self._tokenizer, self._eos_token_ids)
                        made = staging.name, writer.create(plan, staging) if folder.is_shared else {}
                name, files = collective.broadcast(made)
                place = folder.place(name)
                if not folder.is_shared:
                    with collective.stage('staging'):
                        files = writer.create(plan, place, owner=collective.rank)
            with clock.stage('write'):
                tally = self._write(writer, place, files, chunks, collective, job.on_progress, clock.meter)
            with clock.stage('tally'):
                tally.numbers = collective.all_reduce(tally.numbers, add_up)
                peak = int(collective.all_reduce(np.array([clock.meter.peak_extra_nbytes]), np.maximum)[0])
            facts = {'packages': package_versions(), **self._facts(), **job.facts}
            tensors = tally.written() if is_rank0 else []
            if not folder.is_shared:
                with clock.stage('upload'):
                    folder.upload(plan, tensors, job.step, facts, self._options.verify, collective)
            with clock.stage('commit'), collective.stage('commit'):
                if is_rank0:
                    folder.commit(plan, tensors, job.step, facts, self._options.verify, job.readers)
                    warnings += [*warn_of_non_finite(tensors), *folder.warnings]
                    free_after = folder.room()
        except XhfError:
            if is_rank0:
                folder.abandon()
            raise
        finally:
            job.to_close.close()
        if self._after_commit is not None:
            self._after_commit(folder.final, job.step, collective)
        cost = SaveCost(
            plan.nbytes,
            clock.seconds,
            clock.stalled_secs,
            peak,
            stage_secs=clock.stage_secs,
            free_before_nbytes=free_before,
            free_after_nbytes=free_after,
        )
        return CommittedCheckpoint(folder.where, job.step, cost, tuple(warnings))

    def _write(
        self,
        writer: Writer,
        place: Any,
        files: Mapping[str, FileIdentity],
        chunks: AbstractContextManager[Iterator[Chunk]],
        collective: Collective,
        on_progress: Callable[[int, int], None] | None,
        meter: MemoryMeter,
    ) -> Tally:
        """Returns what this rank has written."""
        done_nbytes = 0
        total_nbytes = self._own_nbytes(collective)
        with chunks as some, collective.stage('write'):
            writer.open(self.plan, place, files)
            for chunk in some:
                meter.sample()  # what was read, what was made from it, and what waits for the disk
                if collective.is_failing:
                    continue  # the others keep gathering until the next agreement, and need this rank
                try:
                    done_nbytes += chunk.data.nbytes
                    writer.write(chunk)
                    del chunk  # the next chunk is made while this one waits for the disk
                    if on_progress is not None:
                        on_progress(done_nbytes, total_nbytes)
                except Exception as error:
                    collective.remember('write', error)
            return Tally(self.plan) if collective.is_failing else writer.finish()

    def _own_nbytes(self, collective: Collective) -> int:
        """Estimate of the bytes that this rank writes."""
        owned = chain(self.plan.sent, (p for group in self.plan.gathered for p in group.placements))
        from_shards = sum(p.nbytes for group in self.plan.sliced for p in group.placements)
        return sum(p.nbytes for p in owned if p.owner == collective.rank) + from_shards // collective.world_size

    @property
    def _half_bucket(self) -> int:
        """Half a bucket: one half is gathered while the other is written."""
        return max(1, self._options.bucket_nbytes // 2)

    @property
    def _round_nbytes(self) -> int:
        """Bytes of a round: an owner receives one while two more wait for its disk."""
        return max(1, self._half_bucket // 2)

    def _facts(self) -> dict[str, Any]:
        return {
            'world_size': self._collective.world_size,
            'writer': self._who.value,
            'dtype': self._options.dtype or 'as trained',
            'weights': 'live',
            **self._facts_of_run,
        }
