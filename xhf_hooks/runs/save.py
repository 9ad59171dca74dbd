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

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from xhf_hooks.errors import SharedError
from xhf_hooks.exporters.model_card import write_model_card
from xhf_hooks.files.output_file import FileIdentity
from xhf_hooks.files.tally import Tally, warn_of_non_finite
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.plan import WrittenSave
from xhf_hooks.planning.types import CommittedCheckpoint, SaveCost, Step
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.save_context import SaveContext
from xhf_hooks.runs.save_in_flight import SaveInFlight
from xhf_hooks.runs.telemetry import Progress, SaveClock
from xhf_hooks.sources.replicated import require_equal
from xhf_hooks.sources.send import Snapshot, live_chunks
from xhf_hooks.system.files import errors_naming

#: Called with the target, the step, and what connects the ranks.
AfterCommit = Callable[[CheckpointFolder, Step, Collective], None]


class Save:
    """One save, on its way from the plan to the commit. Runs on: all ranks, unless a method says otherwise.

    Made by :meth:`begin`. Then either :meth:`write_and_commit`, or :meth:`copy_and_continue`.

    Args:
        context: What all saves of the model share: the plan, the source, the exporter and the writer.
        target: Where the save goes.
        after_commit: As in :meth:`begin`.
        manifest_fields: Fields of the manifest for this save only.
        clock: Measures the save.
    """

    def __init__(
        self,
        context: SaveContext,
        target: CheckpointFolder,
        step: Step,
        after_commit: AfterCommit,
        manifest_fields: Mapping[str, Any],
        clock: SaveClock,
    ) -> None:
        self._context = context
        self._target = target
        self._step = step
        self._after_commit = after_commit
        self._manifest_fields = manifest_fields
        self._clock = clock
        self._writing_collective = context.collective  # of the thread that writes and commits
        self._chunks = live_chunks(context.plan, context.source, context.collective)  # a generator: nothing is read yet
        self._warnings: list[str] = []
        self._peak_nbytes = 0

    @classmethod
    def begin(
        cls,
        context: SaveContext,
        target: CheckpointFolder,
        step: Step,
        after_commit: AfterCommit = lambda target, step, collective: None,
        manifest_fields: Mapping[str, Any] | None = None,
        call_began: float | None = None,
    ) -> Save:
        """Start the clock, plan again if tensors or the config have changed, and compare replicas.

        Replicas of weights are compared across ranks; fp32 masters must round to their weights.

        Args:
            after_commit: Called on all ranks after the commit, in the thread that saves. If it communicates, it starts
                with a vote.
            manifest_fields: Fields of the manifest for this save only, such as its score.
            call_began: For ``save_hf``: ``time.perf_counter()`` when that call began, so that its preflight counts as
                part of the save. None: the save begins now.

        Raises:
            SharedError: A rank failed, or ranks hold different models. The previous checkpoint is untouched.
        """
        collective = context.collective
        with collective.stage('plan and compare'):
            context.source.synchronize()  # what training has queued is not a cost of the save
            clock = SaveClock(call_began)
            context.update()
            clock.begin('compare')
            reads = context.plan.reads
            context.source.require_masters_match_weights(reads)
            require_equal(context.source, [spec for spec in reads if not spec.from_master], collective)
            return cls(context, target, step, after_commit, manifest_fields or {}, clock)

    def copy_and_continue(
        self, report_outcome: Callable[[CommittedCheckpoint | None, BaseException | None], None]
    ) -> Future[CommittedCheckpoint]:
        """Copy what to save, while training waits; then write and commit it in the background.

        The previous save must have ended.

        Args:
            report_outcome: Called in the background thread with the committed save, or with the error.

        Returns:
            A future of the save's outcome: all ranks succeed, or all fail. It resolves after ``report_outcome``.

        Raises:
            SharedError: A rank failed while copying; nothing runs in the background.
        """
        context = self._context
        if context.background is None or context.background_collective is None:
            raise ValueError('expected a SaveContext whose options have async_save=True')
        self._clock.begin('snapshot')
        with context.collective.stage('copy'):
            snapshot = Snapshot.take(context.plan, context.source, context.memory, context.collective)
            self._chunks = snapshot.chunks(context.background_collective)
            self._clock.meter.sample()  # memory, with the copy in it
        with context.collective.stage('hand over'):  # ends with a vote: no rank writes if another cannot begin
            # The background thread begins with 'staging'. Until it runs, its wait counts as time of that stage
            self._clock.begin('staging')
            self._writing_collective = context.background_collective
            self._clock.training_goes_on()
            in_flight = SaveInFlight(self._step, self.write_and_commit, report_outcome)
        context.background.add(in_flight)
        return in_flight.outcome

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
                for clean_up in (self._context.writer.abort, self._target.abort):
                    with suppress(Exception):  # of any type: the next save removes what is left
                        clean_up()
        try:
            with self._writing_collective.stage('after the commit'):
                if name_was_taken:  # by foreign files: all ranks have this flag, but only rank 0 has the new path
                    path = self._writing_collective.from_rank0('after the commit', lambda: committed.path)
                    committed = replace(committed, path=path)
                committed = replace(committed, cost=self._cost())
                self._after_commit(self._target, self._step, self._writing_collective)
        except SharedError as error:
            warning = f'{self._step.label} is saved, but its upload and on_saved were not begun: {error}'
            return replace(committed, warnings=(*committed.warnings, warning))
        return committed

    def _open_staging(self) -> tuple[str, dict[str, FileIdentity]]:
        """Make the staging folder; returns its name, and the files that ranks write into. Runs on: rank 0."""
        context, target = self._context, self._target
        with errors_naming(target.path):
            staging = target.open_staging()
            target.require_disk_space(context.plan.nbytes)
            self._warnings += context.write_hf_assets(staging)
            if context.options.model_card:
                write_model_card(staging, context.preparation.exporter.base_model, self._step)
            return staging.name, context.writer.create(context.plan, staging)

    def _write(self, staging: str, files: Mapping[str, FileIdentity]) -> Tally:
        """Write this rank's part; returns the tally of that part."""
        context, collective = self._context, self._writing_collective
        self._clock.begin('write')
        with collective.stage('open files'):  # ends with a vote: no rank gathers if another cannot write
            folder = self._target.path.with_name(staging)  # hosts may mount the file system elsewhere
            context.writer.open(context.plan, folder, files)
            n_writers = collective.world_size if context.strategy.all_ranks_write else 1
            progress = Progress(context.log, self._step.label, context.plan.nbytes // n_writers)
        with collective.stage('write'), closing(self._chunks) as chunks:
            for chunk in chunks:
                with collective.remembering('write'):
                    self._clock.meter.sample()  # peak: source tensor + converted chunk + chunks queued for the disk
                    if not collective.has_remembered_error:  # else only take part, since other ranks keep gathering
                        progress.wrote(chunk.data.nbytes)
                        context.writer.write(chunk)
                del chunk  # the next one is made while this one waits for the disk
            return Tally(context.plan.placements) if collective.has_remembered_error else context.writer.finish()

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
        context, target, is_rank0 = self._context, self._target, self._writing_collective.rank == 0
        self._clock.begin('commit')
        with self._writing_collective.stage('describe'):  # ends with a vote: nothing is committed if a rank fails in it
            tensors = tally.written() if is_rank0 else []
            written = WrittenSave(context.plan, tensors, self._step, self._all_manifest_fields())
            warnings = (*self._warnings, *warn_of_non_finite(tensors))
            committed = CommittedCheckpoint(target.path, target.name, self._step, self._cost(), warnings)
        path = target.path
        with self._writing_collective.stage('commit') as name_was_taken, errors_naming(target.path):
            if is_rank0:
                # In the background, this thread itself reads bytes back: the process may already be exiting and waiting
                # for this save; then no thread can be started
                workers = 1 if self._writing_collective is context.background_collective else None
                path = target.commit(written, context.options.verify, workers)
                name_was_taken.is_set = path != target.path
        return replace(committed, path=path), name_was_taken.is_set

    def _all_manifest_fields(self) -> dict[str, Any]:
        """The fields of the manifest, besides the save's files and its commit."""
        context = self._context
        return {
            'world_size': context.collective.world_size,
            'writer': context.strategy.value,
            'dtype': context.options.dtype or 'as trained',
            'weights': 'live',  # unless unwrapped.manifest_fields say 'averaged'
            **context.unwrapped.manifest_fields,
            **self._manifest_fields,
        }

    def _cost(self) -> SaveCost:
        clock = self._clock
        return SaveCost(
            self._context.plan.nbytes, clock.seconds, clock.stalled_secs, self._peak_nbytes, clock.stage_secs
        )
