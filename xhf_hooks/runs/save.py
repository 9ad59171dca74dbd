"""The whole flow of a save, on one page.

Source.specs()      the tensors of the model          names and full shapes, no data
Exporter.export()  the exported tensors              and their names
make_plan()         the place of each byte            digest compared across ranks
require_equal()     checksums of replicas             compared across ranks: one model, not several
live_chunks()       ranks write their own slices      with writer='positional', where possible
                    or send them to the owner         with 'stream' and 'parallel', where possible
                    the rest, a bucket at a time      gathered by all ranks
Writer.write()      into a staging folder             while the next slice or bucket is read
commit()            staging gets the final name       then, and only then, older saves are deleted

A save in the background first copies what it writes (Snapshot); from then on training goes on, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from xhf_hooks.errors import SharedError
from xhf_hooks.exporters.model_card import write_model_card
from xhf_hooks.files.output_file import FileIdentity
from xhf_hooks.files.tally import Tally, warn_of_non_finite
from xhf_hooks.files.writer import Writer
from xhf_hooks.options import SaveOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.plan import SavePlan, WrittenSave
from xhf_hooks.planning.types import CommittedCheckpoint, SaveCost, Step
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.ends.background_task import BackgroundTask
from xhf_hooks.runs.kept_plan import KeptPlan
from xhf_hooks.runs.preparation import Preparation, bucket_nbytes_of, prepare_saves
from xhf_hooks.runs.save_in_flight import SaveInFlight
from xhf_hooks.runs.telemetry import Progress, RunLog, SaveClock, warn_of_left_out
from xhf_hooks.runs.unwrap import Unwrapped
from xhf_hooks.sources import Source, source_for
from xhf_hooks.sources.host_memory import SnapshotMemory
from xhf_hooks.sources.replicated import checksum_local_elements, require_equal
from xhf_hooks.sources.send import Snapshot, live_chunks
from xhf_hooks.system.files import errors_naming


@dataclass(eq=False)
class Saver:
    """Saves one live model, any number of times. Runs on: all ranks, unless a method says otherwise.

    Made by :meth:`prepare`.

    Attributes:
        unwrapped: The bare model (``.model``), and what has its tensors (``.root``), such as an FSDP1 wrapper.
        source: Gives the model's tensors; made again at each save.
        preparation: The plan and what it was made from; made again when the model's tensors or config change.
        is_planned_before: Whether an earlier call of ``save_hf`` has planned and checked these saves.
        background: The thread of saves that :meth:`start` begins; None if :meth:`start` will not be used.
        background_collective: Connects the ranks for that thread: meanwhile the thread that trains uses another one,
            also while it waits for a save.
        kept: What calls of ``save_hf`` for this model share; None for a hook or callback.
        tokenizer: Written beside the weights. Set it on rank 0.
        eos_token_ids: Added to generation_config.json. Set them on rank 0.
    """

    unwrapped: Unwrapped
    options: SaveOptions
    collective: Collective
    log: RunLog
    strategy: WriteStrategy
    after_commit: Callable[[CheckpointFolder, Step, Collective], None]
    source: Source
    preparation: Preparation
    writer: Writer
    background: BackgroundTask[SaveInFlight] | None
    background_collective: Collective | None = None
    memory: SnapshotMemory = field(default_factory=SnapshotMemory)
    tokenizer: Any | None = None
    eos_token_ids: Sequence[int] = ()
    is_planned_before: bool = False
    kept: KeptPlan | None = None

    @classmethod
    def prepare(
        cls,
        unwrapped: Unwrapped,
        options: SaveOptions,
        collective: Collective,
        log: RunLog,
        *,
        strategy: WriteStrategy = WriteStrategy.STREAM,
        in_background: bool = False,
        stays_cached: bool = False,
        after_commit: Callable[[CheckpointFolder, Step, Collective], None] = lambda target, step, collective: None,
        kept: KeptPlan | None = None,
    ) -> Saver:
        """Plan the saves of a model, and start the threads that make them.

        Args:
            unwrapped: The trained model (:class:`.Unwrapped`).
            log: Gets warnings of what is trained and not saved, and the progress of long saves.
            strategy: Which rank writes which bytes, as chosen for the option ``writer`` (places/access.py).
            in_background: Whether :meth:`start` will be used.
            stays_cached: Leave the files in the page cache, for a program that reads them at once.
            after_commit: Called on all ranks after each commit, in the thread that saves. If it communicates, it starts
                with a vote.
            kept: What calls of ``save_hf`` for this model share: its plan serves again if it fits on all ranks.

        Raises:
            AgreedError: The model cannot be exported; the message has the reason.
            RanksDifferError: Ranks hold different models.
        """
        with collective.stage('plan') as must_plan:
            source = source_for(unwrapped.root)
            found = None if kept is None else kept.preparation(unwrapped, source, options, strategy)
            must_plan.is_set = found is None
        if must_plan.is_set or found is None:  # on all ranks, if one has to
            with collective.stage('plan'):
                found = prepare_saves(unwrapped, source, options, strategy, collective, log, in_background)
        background: BackgroundTask[SaveInFlight] | None = None
        if in_background:
            background = BackgroundTask('a save in the background', SaveInFlight.save, must_finish=True)
        background_collective = None
        if in_background:
            background_collective = Collective.connect() if kept is None else Collective.shared('background')
        with collective.stage('start threads'):
            pending_nbytes = bucket_nbytes_of(options)  # one bucket waits for the disk while the next one is gathered
            writer = Writer.start(pending_nbytes, in_background=in_background, stays_cached=stays_cached)
            if background is not None:
                background.start()
        how = (strategy, after_commit, source, found, writer, background, background_collective)
        saver = cls(unwrapped, options, collective, log, *how)
        if kept is not None:
            saver.kept, saver.memory, saver.is_planned_before = kept, kept.memory, not must_plan.is_set
            saver.tokenizer, saver.eos_token_ids = kept.tokenizer()
        # A run that is never closed ends its thread when it is garbage (see also the end of Run.open)
        weakref.finalize(saver, writer.close).atexit = False
        return saver

    @property
    def plan(self) -> SavePlan:
        """The plan of a save."""
        return self.preparation.plan

    def manifest_fields_of(self, save: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the manifest of a save, besides its files and its commit.

        Args:
            save: Those of this save only, such as its score.
        """
        return {
            'world_size': self.collective.world_size,
            'writer': self.strategy.value,
            'dtype': self.options.dtype or 'as trained',
            'weights': 'live',  # unless unwrapped.manifest_fields say 'averaged'
            **self.unwrapped.manifest_fields,
            **save,
        }

    def write_hf_assets(self, folder: Path) -> list[str]:
        """Write all files except the weights; returns warnings for the log. Runs on: rank 0."""
        prepared = self.preparation
        return prepared.exporter.write_hf_assets(prepared.export, folder, self.tokenizer, self.eos_token_ids)

    def reserve_snapshot(self) -> int:
        """Run a trial snapshot, so that memory shortages surface before training; returns its bytes on this rank."""
        Snapshot.take(self.plan, self.source, self.memory, self.collective)
        return self.memory.nbytes

    def save(
        self,
        target: CheckpointFolder,
        step: Step,
        manifest_fields: Mapping[str, Any] | None = None,
        call_began: float | None = None,
    ) -> CommittedCheckpoint:
        """Write and commit one checkpoint.

        Args:
            manifest_fields: Fields of the manifest for this save only.
            call_began: For ``save_hf``: ``time.perf_counter()`` when that call began, so that its preflight counts as
                part of the save. None: the save begins now.

        Raises:
            SharedError: A rank failed, or ranks hold different models. The previous checkpoint is untouched.
        """
        with self.collective.stage('plan and compare'):
            save = self._begin(target, step, manifest_fields or {}, call_began)
        return save.write_and_commit()

    def start(
        self,
        target: CheckpointFolder,
        step: Step,
        manifest_fields: Mapping[str, Any] | None = None,
        report_outcome: Callable[[CommittedCheckpoint | None, BaseException | None], None] = lambda *outcome: None,
        call_began: float | None = None,
    ) -> Future[CommittedCheckpoint]:
        """Compare replicas and copy what to save, while training waits; then write and commit it in the background.

        The previous save must have ended.

        Args:
            manifest_fields: Fields of the manifest for this save only.
            report_outcome: Called in the background thread with the committed save, or with the error.
            call_began: As in :meth:`save`.

        Returns:
            A future of the save's outcome: all ranks succeed, or all fail. It resolves after ``report_outcome``.

        Raises:
            SharedError: A rank failed while copying, or ranks hold different models; nothing runs in the background.
        """
        with self.collective.stage('plan, compare and copy'):
            if self.background is None or self.background_collective is None:
                raise ValueError('expected a Saver that was prepared with in_background=True')
            save = self._begin(target, step, manifest_fields or {}, call_began)
            save.copy(self.memory, self.background_collective)
            in_flight = SaveInFlight(step, save.write_and_commit, report_outcome)
        self.background.add(in_flight)
        return in_flight.outcome

    def ensure_connected(self) -> bool:
        """Reconnect the ranks for background saves if a connection has broken; returns whether it had.

        Runs on: all ranks. No save may be in flight.

        Raises:
            RankLostError: Ranks could not connect.
        """
        # A rank that failed since the caller's stage began votes on this collective. Vote here first: the background
        # collective, below, is another one, and the two votes would not pair
        self.collective.raise_if_any_failed('save')
        return self.background_collective is not None and self.background_collective.ensure_connected()

    def checksum_weights(self) -> int:
        """A checksum of the part of the model that this rank holds, as it is now.

        Needs no other rank: only reading fp32 masters uses the collective; these specs are of the weights themselves.
        """
        source = source_for(self.unwrapped.root)
        return checksum_local_elements(source, source.specs(), self.collective)

    def close(self) -> None:
        """End threads, free host memory, destroy the process group of background saves. No save may be in flight."""
        for close in self.closers():
            close()

    def closers(self) -> list[Callable[[], None]]:
        """What :meth:`close` calls. None of it refers to this object, or to the model."""
        found: list[Callable[[], None]] = [self.writer.close]
        if self.kept is None:  # else the next call uses it again
            found.append(self.memory.free)
        if self.background is not None:
            found.append(self.background.close)
        if self.background_collective is not None:
            found.append(self.background_collective.close)
        return found

    def _begin(
        self, target: CheckpointFolder, step: Step, manifest_fields: Mapping[str, Any], call_began: float | None = None
    ) -> Save:
        """Start the clock, plan again if tensors or the config have changed, and compare replicas."""
        self.source.synchronize()  # what training has queued is not a cost of the save
        clock = SaveClock(call_began)
        if self.kept is None:  # else prepare() has just made it, in the same call of save_hf
            self.source = source_for(self.unwrapped.root)
        prepared = self.preparation
        warn_of_left_out(self.log, prepared.left_out, self.unwrapped.model)
        is_outdated = self.source.specs() != prepared.specs or prepared.exporter.is_outdated(prepared.export)
        if self.collective.vote_any(is_outdated, 'plan'):
            in_background = self.background is not None
            self.preparation = prepare_saves(
                self.unwrapped, self.source, self.options, self.strategy, self.collective, self.log, in_background
            )
        if self.kept is not None:
            self.kept.keep(self.preparation, self.options, self.strategy, self.tokenizer, self.eos_token_ids)
        save = Save(self, target, step, manifest_fields, clock)
        save.compare()
        return save


class Save:
    """One save, on its way from the plan to the commit. Runs on: all ranks, unless a method says otherwise.

    Args:
        saver: Has the plan, the source, the exporter and the writer.
        target: Where the save goes.
        manifest_fields: Fields of the manifest for this save only.
        clock: Measures the save.

    Attributes:
        in_background: Whether training goes on meanwhile.
    """

    def __init__(
        self, saver: Saver, target: CheckpointFolder, step: Step, manifest_fields: Mapping[str, Any], clock: SaveClock
    ) -> None:
        self.in_background = False
        self._saver = saver
        self._target = target
        self._step = step
        self._manifest_fields = manifest_fields
        self._clock = clock
        self._collective = saver.collective  # of the thread that trains
        self._writing_collective = saver.collective  # of the thread that writes and commits
        self._chunks = live_chunks(saver.plan, saver.source, saver.collective)  # a generator: nothing is read yet
        self._warnings: list[str] = []
        self._peak_nbytes = 0

    def compare(self) -> None:
        """Check that fp32 masters round to their weights, then compare replicas (not of the masters) across ranks.

        Raises:
            SharedError: A rank failed, or ranks hold different models.
        """
        saver = self._saver
        self._clock.begin('compare')
        with self._collective.stage('compare'):
            saver.source.require_masters_match_weights(saver.plan.reads)
            specs = [spec for spec in saver.plan.reads if not spec.from_master]
            require_equal(saver.source, specs, self._collective)

    def copy(self, memory: SnapshotMemory, background_collective: Collective) -> None:
        """Copy the weights to save, since training will change them.

        Args:
            background_collective: Used from now on, by the background thread that goes on with this save.

        Raises:
            AgreedError: A rank failed.
        """
        self._clock.begin('snapshot')
        with self._collective.stage('copy'):
            snapshot = Snapshot.take(self._saver.plan, self._saver.source, memory, self._collective)
            self._chunks = snapshot.chunks(background_collective)
            self._clock.meter.sample()  # memory, with the copy in it
        # The background thread begins with 'staging'. Until it runs, its wait counts as time of that stage
        self._clock.begin('staging')
        self._writing_collective = background_collective
        self.in_background = True
        self._clock.training_goes_on()

    def write_and_commit(self) -> CommittedCheckpoint:
        """Write, commit, and start uploads and ``on_saved``: all that comes after the copy.

        Raises:
            SharedError: A rank failed. The previous checkpoint is untouched.
        """
        with self._writing_collective.stage('save'):
            try:
                self._clock.begin('staging')
                staging, files = self._writing_collective.from_rank0('staging', self._open_staging)
                tally = self._write(staging, files)
                self._add_up(tally)
                committed, name_was_taken = self._commit(tally)
            finally:
                # After a commit both have nothing to remove. Only rank 0's target has opened a staging folder
                for clean_up in (self._saver.writer.abort, self._target.abort):
                    with suppress(Exception):  # of any type: the next save removes what is left
                        clean_up()
        try:
            with self._writing_collective.stage('after the commit'):
                if name_was_taken:  # by foreign files: all ranks have this flag, but only rank 0 has the new path
                    path = self._writing_collective.from_rank0('after the commit', lambda: committed.path)
                    committed = replace(committed, path=path)
                committed = replace(committed, cost=self._cost())
                self._saver.after_commit(self._target, self._step, self._writing_collective)
        except SharedError as error:
            warning = f'{self._step.label} is saved, but its upload and on_saved were not begun: {error}'
            return replace(committed, warnings=(*committed.warnings, warning))
        return committed

    def _open_staging(self) -> tuple[str, dict[str, FileIdentity]]:
        """Make the staging folder; returns its name, and the files that ranks write into. Runs on: rank 0."""
        saver, target = self._saver, self._target
        with errors_naming(target.path):
            staging = target.open_staging()
            target.require_disk_space(saver.plan.nbytes)
            self._warnings += saver.write_hf_assets(staging)
            if saver.options.model_card:
                write_model_card(staging, saver.preparation.exporter.base_model, self._step)
            return staging.name, saver.writer.create(saver.plan, staging)

    def _write(self, staging: str, files: Mapping[str, FileIdentity]) -> Tally:
        """Write this rank's part; returns the tally of that part."""
        saver, collective = self._saver, self._writing_collective
        self._clock.begin('write')
        with collective.stage('open files'):  # ends with a vote: no rank gathers if another cannot write
            folder = self._target.path.with_name(staging)  # hosts may mount the file system elsewhere
            saver.writer.open(saver.plan, folder, files)
            n_writers = collective.world_size if saver.strategy.all_ranks_write else 1
            progress = Progress(saver.log, self._step.label, saver.plan.nbytes // n_writers)
        with collective.stage('write'), closing(self._chunks) as chunks:
            for chunk in chunks:
                with collective.remembering('write'):
                    self._clock.meter.sample()  # peak: source tensor + converted chunk + chunks queued for the disk
                    if not collective.has_remembered_error:  # else only take part, since other ranks keep gathering
                        progress.wrote(chunk.data.nbytes)
                        saver.writer.write(chunk)
                del chunk  # the next one is made while this one waits for the disk
            return Tally(saver.plan.placements) if collective.has_remembered_error else saver.writer.finish()

    def _add_up(self, tally: Tally) -> None:
        """Reduce the tally over all ranks, in place."""
        self._clock.begin('tally')
        tally.sums, tally.checksums, peak_nbytes = self._writing_collective.reduce_over_ranks(
            'tally',
            lambda: (tally.sums, tally.checksums, np.array([self._clock.meter.peak_extra_nbytes])),
            # BXOR: of the CRC-32s of slices, advanced past the bytes that follow (Tally.add), it gives the tensor's
            ('SUM', 'BXOR', 'MAX'),
        )
        self._peak_nbytes = int(peak_nbytes[0])

    def _commit(self, tally: Tally) -> tuple[CommittedCheckpoint, bool]:
        """Commit on rank 0, once no other rank can fail. Also returns whether foreign files have taken the name."""
        saver, target, is_rank0 = self._saver, self._target, self._writing_collective.rank == 0
        self._clock.begin('commit')
        with self._writing_collective.stage('describe'):  # ends with a vote: nothing is committed if a rank fails in it
            tensors = tally.written() if is_rank0 else []
            written = WrittenSave(saver.plan, tensors, self._step, saver.manifest_fields_of(self._manifest_fields))
            warnings = (*self._warnings, *warn_of_non_finite(tensors))
            committed = CommittedCheckpoint(target.path, target.name, self._step, self._cost(), warnings)
        path = target.path
        with self._writing_collective.stage('commit') as name_was_taken, errors_naming(target.path):
            if is_rank0:
                # In the background, this thread itself reads bytes back: the process may already be exiting and waiting
                # for this save; then no thread can be started
                path = target.commit(written, saver.options.verify, workers=1 if self.in_background else None)
                name_was_taken.is_set = path != target.path
        return replace(committed, path=path), name_was_taken.is_set

    def _cost(self) -> SaveCost:
        clock = self._clock
        return SaveCost(self._saver.plan.nbytes, clock.seconds, clock.stalled_secs, self._peak_nbytes, clock.stage_secs)
