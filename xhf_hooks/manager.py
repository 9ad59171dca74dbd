"""All saves of one run, from preflight to the last report: shared by hook, callback and ``save_hf``."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from xhf_hooks.background.on_saved import AfterSaves, Result, after_saves_of_run, wait_for_all
from xhf_hooks.background.save_on_signal import SaveRequests
from xhf_hooks.collective import Collective
from xhf_hooks.config.options import CallOptions, RunOptions
from xhf_hooks.errors import TargetError, XhfError
from xhf_hooks.exporters.tokenizer import find_tokenizer
from xhf_hooks.installed import require_usable, untested_set
from xhf_hooks.model import Unwrapped
from xhf_hooks.places.checkpoint_folder import CheckpointFolder, claim_targets
from xhf_hooks.places.kept_folder import new_name
from xhf_hooks.places.store import StoreFolder
from xhf_hooks.places.target import SaveTarget
from xhf_hooks.places.upload import uploads_of_run
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.save import Saver
from xhf_hooks.sources.master_fragments import refuse_unreadable_fp32_masters
from xhf_hooks.telemetry import ProgressLog, RunLog, StallWatch, log_preparations, log_save
from xhf_hooks.threads import ExitWait
from xhf_hooks.writers.choose import choose_store_writer, choose_writer


class RunFrontend:
    """Base of hook and callback: the saves of one run."""

    _saves: CheckpointManager | None = None

    def close(self) -> None:
        """After interrupted training (Ctrl-C in a notebook): wait for a save in flight and release the folder.

        The next training in this process calls it. Runs on: any rank.
        """
        if self._saves is not None:
            self._saves.close()
            self._saves = None


class CheckpointManager:
    """Checks that saves will work, and makes them. Runs on: all ranks, every method.

    Hooks and callbacks are not notified when an exception or Ctrl-C interrupts training. So the next run in the same
    process (a notebook, a sweep, Trainer's auto_find_batch_size) closes an earlier one that holds its folders.

    Args:
        unwrapped: The trained model.
        final: The folder of the newest save, or the URL of a store.
        run: Identifies the run, such as MMEngine's runner. Only another run can take over the folders of this one.
        on_committed: Called with each committed save.
        on_result: Called on rank 0 with the numbers that ``on_saved`` printed.
        collective: Used and left open; None creates one.
        run_dir: Local folder of the run, for results of ``on_saved`` where saves go to a store.

    Attributes:
        newest: The folder of the newest save.
        others: Other folders, by name suffix, each with one save.
        saved_at: Iterations done at the last save to ``newest``, unless it failed.
        collective: The collective of this run's saves.
    """

    #: The open managers of this process: locks belong to a process.
    _open: ClassVar[weakref.WeakSet[CheckpointManager]] = weakref.WeakSet()

    def __init__(
        self,
        unwrapped: Unwrapped,
        final: Path | str,
        options: RunOptions | CallOptions,
        log: RunLog,
        *,
        run: object | None = None,
        suffixes: Sequence[str] = (),
        reward_token_id: int | None = None,
        on_committed: Callable[[CommittedCheckpoint], None] | None = None,
        on_result: Callable[[Result], None] | None = None,
        collective: Collective | None = None,
        run_dir: Path | str = '.',
    ) -> None:
        self._options, self._log, self._run_dir = options, log, Path(run_dir).absolute()
        self._on_committed, self._on_result = on_committed, on_result
        self._after: Callable[[], None] | None = None  # for the save in flight
        self._target: SaveTarget | None = None  # of the last save that was begun
        self._requests: SaveRequests | None = None
        self._after_saves: AfterSaves | None = None
        self.saved_at: int | None = None
        if unwrapped.engine is not None:
            require_usable('deepspeed')
        self._engine = unwrapped.engine
        self._run = None if run is None else weakref.ref(run)
        self._process, self._thread = os.getpid(), threading.get_ident()
        self.newest: SaveTarget
        if isinstance(final, str):
            self.newest = StoreFolder(final, options.max_keep_ckpts, options.backend_args, warn=log.warning)
        else:
            self.newest = CheckpointFolder(final.absolute(), options.max_keep_ckpts)
        self.others = {suffix: self.newest.beside(suffix) for suffix in suffixes}
        self._end_interrupted()
        with ExitStack() as ending:
            self.collective = Collective() if collective is None else collective
            ending.callback(self.collective.close)
            if isinstance(final, str):
                self._writer = choose_store_writer(options.writer)
            else:
                self._writer = choose_writer(
                    log, options.writer, new_name(self.newest.final, 'shared'), self.collective
                )
            self._uploads = uploads_of_run(
                options.upload_to,
                options.backend_args,
                options.upload_keep,
                [folder.final for folder in self._folders],
                self.collective,
                log,
                wait_secs=options.exit_wait_secs,
            )
            self._saver = Saver(
                unwrapped.model,
                options,
                self.collective,
                unwrapped.root,
                writer=self._writer,
                reward_token_id=reward_token_id,
                in_background=options.async_save,
                facts=unwrapped.facts,
                after_commit=None if self._uploads is None else self._uploads.offer,
            )
            ending.callback(self._saver.close)
            for folder in self._folders:
                ending.callback(folder.release)
            self._ending = ending.pop_all()
        # A run that is never closed must not keep its model in memory, nor its locks after garbage collection
        weakref.finalize(self, _release, self._process, self._folders).atexit = False
        CheckpointManager._open.add(self)
        self._tokenizer_warnings: tuple[str, ...] = ()
        self._watch = StallWatch(log, in_background=options.async_save, writer=self._writer)

    def prepare(
        self,
        tokenizer: Any | None,
        *,
        when: str | None,
        sweep: Path | None = None,
        finish_tokenizer: Callable[[Any | None], tuple[Any | None, Sequence[int], Sequence[str]]] | None = None,
    ) -> None:
        """Plan, claim the folders and rehearse.

        Args:
            tokenizer: The run's tokenizer. The option ``tokenizer`` overrides it; the base model's is the fallback.
            when: Describes the schedule, for the log; None means no schedule.
            sweep: A work_dir from which leftovers of killed runs are removed.
            finish_tokenizer: Returns the final tokenizer, EOS token ids to add, and log messages.

        Raises:
            XhfError: Saves will not work; the same on every rank. This manager is then closed.
        """
        try:
            plan = self._saver.prepare()
            if any(spec.from_master for spec in plan.reads):
                refuse_unreadable_fp32_masters(self._engine)
            with self.collective.stage('preflight'):
                if self.collective.rank != 0:
                    self.newest.connect()  # the other targets are beside it
                else:
                    self._refuse_other_runs()
                    claim_targets(self._log, self._folders, plan.nbytes, self._saver.exporter.base_dir, sweep=sweep)
                    found, warnings = find_tokenizer(self._options.tokenizer, tokenizer, self._saver.exporter)
                    for warning in warnings:
                        self._log.warning(warning)
                    self._tokenizer_warnings = tuple(warnings)
                    eos_token_ids: Sequence[int] = ()
                    if finish_tokenizer is not None:
                        found, eos_token_ids, messages = finish_tokenizer(found)
                        for message in messages:
                            self._log.info(message)
                    self._saver.set_tokenizer(found, eos_token_ids)
                    for warning in self._saver.rehearse(self.newest):
                        self._log.warning(warning)
                    self._after_saves = after_saves_of_run(self._options, self._log, self._run_dir)
            if self._uploads is not None:
                self._ending.callback(self._uploads.end)
                with self.collective.stage('preflight'):
                    self._uploads.claim(self.collective.rank)
                self._ending.callback(ExitWait(self._uploads.wait).close)
                weakref.finalize(self, self._uploads.end_forgotten).atexit = False
            if self._saver.in_background:
                with self.collective.stage('preflight'):
                    reserved = self._saver.reserve_snapshot()
                self._log.info(f'background saves use {reserved / 1e6:.0f} MB of host memory on this rank')
                self._ending.callback(ExitWait(self._wait_at_exit).close)
            if self._after_saves is not None:
                weakref.finalize(self, self._after_saves.close).atexit = False
                self._ending.callback(ExitWait(self._after_saves.close).close)  # called first: it takes a few seconds
            self._accept_requests()
            untested = untested_set()
            if untested is not None:
                self._log.info(untested)
            log_preparations(
                self._log,
                plan,
                self._saver.expected_extra_nbytes,
                when=self._occasions(when),
                writer=self._writer,
                in_background=self._saver.in_background,
                final=self.newest.final,
                left_out=self._saver.exporter.left_out,
                notes=self._saver.exporter.notes,
            )
        except BaseException:
            self.close()
            raise

    def save(
        self,
        step: Step,
        folder: SaveTarget | None = None,
        *,
        scheduled: bool = False,
        after: Callable[[], None] | None = None,
        facts: Mapping[str, Any] | None = None,
        prepare_secs: float = 0.0,
    ) -> None:
        """Make one save, in ``newest`` unless another folder is given.

        Args:
            facts: For the manifest of this save.
            scheduled: Whether the schedule asked for it, during training.
            after: Called after the commit.
            prepare_secs: Time spent before this call that counts as part of a synchronous save.

        Raises:
            XhfError: The save failed, and ``on_error`` is 'raise'.
        """
        began, folder = time.monotonic(), folder or self.newest
        if self._saver.in_background:
            self.collect()
        self._target = folder
        committed, progress = None, ProgressLog(self._log, step.label)
        try:
            if self._saver.in_background:
                self._saver.start(folder, step, progress, facts)
            else:
                committed = self._saver.save(folder, step, progress, facts, prepare_secs=prepare_secs)
        except XhfError as error:
            self.handle(error, f'the save of {step.label}')
            return
        if folder is self.newest:
            self.saved_at = step.iteration
        self._after = after
        if committed is not None:
            self._report(committed)
        if scheduled:
            self._watch.saved(began)

    def save_if_asked(self, step: Step, *, validated: bool = False) -> None:
        """Save if a signal requested it. Runs on: all ranks, at the same points.

        Args:
            validated: Called at the end of a validation rather than of an iteration.

        Raises:
            XhfError: The save failed, and ``on_error`` is 'raise'; or ranks could not agree.
        """
        if self._requests is not None and self._requests.is_due(at_once=validated):
            self._save_asked(step)

    def finish(self, step: Step) -> None:
        """At the end of training: :meth:`save_if_asked`, then wait for ``on_saved``."""
        if self._requests is not None and self._requests.is_due(at_once=True):
            self._save_asked(step)
        if self._options.on_saved is None:
            return
        try:
            wait_for_all(self._after_saves, self.collective, self._options.exit_wait_secs, self._log)
        except XhfError as error:
            self.handle(error, 'waiting for on_saved')
        self._tell_results()

    def best_in_stores(self) -> list[tuple[str, bytes]]:
        """URL and manifest of each best save in the store of ``out_dir`` or ``upload_to``. Runs on: rank 0.

        Raises:
            StoreError: The store cannot be read.
        """
        if self._uploads is not None:
            return self._uploads.newest_manifests()
        found = [(str(folder.final), folder.newest_manifest()) for folder in self.others.values()]
        return [(url, manifest) for url, manifest in found if manifest]

    @property
    def must_tell_after(self) -> bool:
        """Whether there is a save in flight whose ``after`` has not been called."""
        return self._after is not None

    def collect_if_done(self) -> None:
        """Report the background save if it has succeeded on this rank, and what ``on_saved`` printed.

        On the other ranks it is then about to succeed.
        """
        if self._saver.background.succeeded:
            self.collect()
        self._tell_results()

    def collect(self) -> None:
        """Wait for the save in flight, if any, and report it. The outcome is the same on all ranks."""
        if not self._saver.background.busy:
            return
        try:
            committed = self._saver.background.outcome()
        except XhfError as error:
            self._after, self.saved_at = None, None
            self.handle(error, 'the save in the background')
        else:
            self._report(committed)

    def handle(self, error: XhfError, what: str) -> None:
        """Raise or log an error that all ranks share, depending on ``on_error``."""
        if self._options.on_error == 'raise':
            raise error
        self._log.error(f'{what} failed and training goes on: {error}. The previous save is untouched.')

    def close(self) -> None:
        """Wait for a save in flight, release the folders, destroy process groups. Needs no other rank.

        Does nothing the second time, nor in a forked child, whose parent goes on.
        """
        if os.getpid() != self._process:
            return
        if self._after_saves is not None:
            self._after_saves.close()  # first: no command starts while the save and uploads are awaited
        if self._saver.background.busy:
            self._log.warning('a save is being written: waiting for it')
            try:
                self._report(self._saver.background.outcome())
            except Exception as error:  # the run is over: log it and go on closing
                self._log.error(f'the save in the background failed: {error}. The previous save is untouched.')
        CheckpointManager._open.discard(self)
        self._ending.close()
        if self._requests is not None:
            self._requests.end_process()

    def _occasions(self, when: str | None) -> str:
        """Everything that triggers a save, for the log."""
        options = self._options
        occasions = [] if when is None else [when]
        if isinstance(options, RunOptions):
            occasions += ['at the end of training'] * options.save_last
            occasions += [f'at a new best score ({folder.name})' for folder in self.others.values()]
            occasions += ['on demand'] * bool(options.save_on_signal)
        return ', '.join(occasions)

    def _accept_requests(self) -> None:
        if signals := self._options.save_on_signal:
            wait_secs = self._options.exit_wait_secs
            self._requests = SaveRequests(self._log, signals=signals, wait_secs=wait_secs)
            self._ending.callback(self._requests.close)
            weakref.finalize(self, self._requests.close).atexit = False

    def _tell_results(self) -> None:
        for result in () if self._after_saves is None else self._after_saves.results():
            if self._on_result is not None:
                self._on_result(result)

    def _save_asked(self, step: Step) -> None:
        self.collect()  # before reading saved_at: all ranks learn here whether the save in flight failed
        if self.saved_at != step.iteration:
            self.save(step)
        if self._requests.must_end:
            self.collect()
            self._requests.end_process()

    def _end_interrupted(self) -> None:
        """Close earlier runs of this process that hold our folders."""
        for other in self._others_with_our_folders():
            if self._may_end(other):
                self._log.warning(f'{other.newest.final}: an earlier run was interrupted and is now closed')
                other.close()

    def _refuse_other_runs(self) -> None:
        for other in self._others_with_our_folders():
            raise TargetError(
                f'{other.newest.final} is in use by another run of this process; set out_dir to another folder. '
                f'If that run was interrupted, call close() of its hook or callback'
            )

    def _others_with_our_folders(self) -> list[CheckpointManager]:
        ours = {folder.final for folder in self._folders}
        others = [other for other in CheckpointManager._open if other is not self and other._process == os.getpid()]
        return [other for other in others if ours & {folder.final for folder in other._folders}]

    def _may_end(self, other: CheckpointManager) -> bool:
        """Whether this thread has left the other run: it starts a new one, and both are known to be different runs."""
        if self._run is None or other._run is None or other._thread != self._thread:
            return False
        return other._run() is not self._run()

    @property
    def _folders(self) -> list[SaveTarget]:
        return [self.newest, *self.others.values()]

    def _report(self, committed: CommittedCheckpoint) -> None:
        if self._after is not None:
            after, self._after = self._after, None
            after()
        log_save(self._log, committed)
        committed = replace(committed, warnings=(*self._tokenizer_warnings, *committed.warnings))  # logged before
        if self._on_committed is not None:
            self._on_committed(committed)
        if self._after_saves is not None:
            self._after_saves.committed(committed, self._target)

    def _wait_at_exit(self) -> None:
        background = self._saver.background
        if background.busy and not background.done:
            self._log.warning('the process ends, but a save is being written: waiting for it')
            if not background.wait(self._options.exit_wait_secs):
                self._log.error(
                    f'it was not written within exit_wait_secs={self._options.exit_wait_secs} s. The previous save '
                    f'is untouched.'
                )


def _release(process: int, folders: Sequence[SaveTarget]) -> None:
    """Called by the garbage collector, in this process or in a forked child."""
    if os.getpid() == process:
        for folder in folders:
            folder.release_forgotten()
