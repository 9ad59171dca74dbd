"""All saves of one run, from preflight to the last report: shared by hook, callback and ``save_hf``."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from xhf_hooks.background.each_save import EachSave
from xhf_hooks.background.on_saved import OnSaved
from xhf_hooks.background.save_on_signal import SaveRequests
from xhf_hooks.background.upload import uploads_of_run
from xhf_hooks.collective import Collective
from xhf_hooks.errors import TargetError, XhfError
from xhf_hooks.exporters.base import find_tokenizer
from xhf_hooks.options import CallOptions, RunOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder, claim_targets
from xhf_hooks.places.kept_folder import new_name
from xhf_hooks.places.who_writes import WhoWrites, choose_writer
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.saves.save import Saver
from xhf_hooks.saves.telemetry import RunLog, log_preparations, log_save
from xhf_hooks.saves.unwrap import Unwrapped
from xhf_hooks.system.installed import require_usable, untested_set
from xhf_hooks.system.threads import ExitWait

#: Between two agreements of ranks that wait for each other's listeners. Signals are handled only in between.
_LOOK_SECS = 5.0


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
        final: The folder of the newest save.
        run: Identifies the run, such as MMEngine's runner. Only another run can take over the folders of this one.
        on_committed: Called with each committed save, in the thread that trains.
        on_result: Called there on rank 0 with the step of a save and the numbers that ``on_saved`` printed for it.
        collective: Used and left open; None creates one.

    Attributes:
        newest: The place of the newest save.
        others: Other places, by name suffix, each with one save.
        saved_at: Iterations done at the last save to ``newest``, unless it failed.
        collective: The collective of this run's saves.
    """

    #: The open managers of this process: locks belong to a process.
    _open: ClassVar[weakref.WeakSet[CheckpointManager]] = weakref.WeakSet()

    def __init__(
        self,
        unwrapped: Unwrapped,
        final: Path,
        options: RunOptions | CallOptions,
        log: RunLog,
        *,
        run: object | None = None,
        suffixes: Sequence[str] = (),
        on_committed: Callable[[CommittedCheckpoint], None] = lambda committed: None,
        on_result: Callable[[Step, Mapping[str, float]], None] = lambda step, numbers: None,
        collective: Collective | None = None,
    ) -> None:
        self._options, self._log, self._on_committed = options, log, on_committed
        self._after: Callable[[], None] | None = None  # for the save in flight
        self._listeners: list[EachSave[Any]] = []
        self._requests: SaveRequests | None = None
        self._deadline: float | None = None  # of exit_wait_secs
        self.saved_at: int | None = None
        self._process, self._run = os.getpid(), None if run is None else weakref.ref(run)
        if unwrapped.engine is not None:
            require_usable('deepspeed')
        self.newest = CheckpointFolder(final.absolute(), options.max_keep_ckpts, warn=log.warning)
        self.others = {suffix: self.newest.beside(suffix) for suffix in suffixes}
        self._end_interrupted()
        with ExitStack() as ending:
            self.collective = Collective() if collective is None else collective
            ending.callback(self.collective.close)
            writer = choose_writer(log, options.writer, new_name(self.newest.final, 'shared'), self.collective)
            self._saver = Saver(
                unwrapped,
                options,
                self.collective,
                writer=writer,
                in_background=options.async_save,
                log=log,
                after_commit=self._tell_listeners,
            )
            ending.callback(self._saver.close)
            for target in self._targets:
                ending.callback(target.release)
            self._uploads = None
            if options.upload_to is not None:
                finals = [target.final for target in self._targets]
                self._uploads = uploads_of_run(
                    options.upload_to, options.backend_args, options.upload_keep, finals, self.collective, log
                )
                self._listeners.append(self._uploads)
                ending.callback(self._uploads.close)
            with self.collective.stage('preflight'):
                if options.on_saved is not None and self.collective.rank == 0:
                    on_saved = OnSaved(options.on_saved, log, on_result)
                    self._listeners.append(on_saved)
                    ending.callback(on_saved.close)
            self._ending = ending.pop_all()
        # A run that is never closed must not keep its model in memory, nor locks after garbage collection
        weakref.finalize(self, _end_forgotten, self._process, self._targets, self._listeners).atexit = False
        CheckpointManager._open.add(self)

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
        options, saver = self._options, self._saver
        try:
            plan = saver.prepare()
            with self.collective.stage('preflight'):
                if self.collective.rank == 0:
                    claim_targets(self._log, self._targets, plan.nbytes, saver.exporter.base_dir, sweep=sweep)
                    self._find_tokenizer(tokenizer, finish_tokenizer)
                    for warning in saver.rehearse(self.newest):
                        self._log.warning(warning)
                if self._uploads is not None:
                    self._uploads.claim()
            if options.async_save:
                with self.collective.stage('preflight'):
                    reserved = saver.reserve_snapshot()
                self._log.info(f'background saves use {reserved / 1e6:.0f} MB of host memory on this rank')
            if options.async_save or self._listeners:
                end_work = weakref.WeakMethod(self._end_work)
                self._ending.callback(ExitWait(lambda: (method := end_work()) and method()).close)
            if options.save_on_signal:
                self._requests = SaveRequests(self._log, options.save_on_signal)
                self._ending.callback(self._requests.close)
                weakref.finalize(self, self._requests.close).atexit = False
            if (untested := untested_set()) is not None:
                self._log.info(untested)
            how = f'{saver.writer.value} writer{", in the background" * options.async_save}; about '
            how += f'{saver.expected_extra_nbytes / 1e6:.0f} MB of extra memory on the busiest rank'
            log_preparations(
                self._log,
                plan,
                saver.exporter,
                where=self.newest.final,
                when=self._occasions(when),
                how=how,
                expects_slices=saver.writer is not WhoWrites.GATHER and self.collective.world_size > 1,
            )
        except BaseException:
            self.close()
            raise

    def save(
        self,
        step: Step,
        target: CheckpointFolder | None = None,
        *,
        after: Callable[[], None] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Make one save, in ``newest`` unless another target is given.

        Args:
            after: Called after the commit.
            facts: For the manifest of this save.

        Raises:
            XhfError: The save failed, and ``on_error`` is 'raise'.
        """
        self.collect()
        self._deadline = None
        target, committed = target or self.newest, None
        try:
            if self._options.async_save:
                self._saver.start(target, step, facts)
            else:
                committed = self._saver.save(target, step, facts)
        except XhfError as error:
            self.handle(error, f'the save of {step.label}')
            return
        if target is self.newest:
            self.saved_at = step.iteration
        self._after = after
        if committed is not None:
            self._report(committed)

    def save_if_asked(self, step: Step, *, at_once: bool = False) -> None:
        """Save if a signal requested it. Runs on: all ranks, at the same points.

        Args:
            at_once: Count requests up to now: at the end of a validation or of training rather than of an iteration.

        Raises:
            XhfError: The save failed, and ``on_error`` is 'raise'; or ranks could not agree.
        """
        if self._requests is not None and self._requests.is_due(at_once=at_once):
            self._save_asked(step)

    def _save_asked(self, step: Step) -> None:
        self.collect()  # before reading saved_at: all ranks learn here whether the save in flight failed
        if self.saved_at != step.iteration:
            self.save(step)
        if self._requests.must_end:
            self.collect()
            self._requests.end_process()

    def look(self) -> None:
        """After an iteration: report the background save if it has succeeded on this rank, and look after listeners.

        On the other ranks it is then about to succeed.
        """
        if self._saver.in_flight is not None and self._saver.in_flight.succeeded:
            self.collect()
        for listener in self._listeners:
            listener.look()

    @property
    def must_tell_after(self) -> bool:
        """Whether a save is in flight whose ``after`` has not been called."""
        return self._after is not None

    def collect(self) -> None:
        """Wait for the save in flight, if any, and report it. The outcome is the same on all ranks."""
        if self._saver.in_flight is None:
            return
        try:
            committed = self._saver.outcome()
        except XhfError as error:
            self._after, self.saved_at = None, None
            self.handle(error, 'the save in the background')
        else:
            self._report(committed)

    def finish(self, step: Step) -> None:
        """At the end of training: :meth:`save_if_asked`, then wait for uploads and ``on_saved``, on all ranks.

        Ranks wait for each other on gloo, a short time at a time, since an NCCL collective may follow training.
        """
        self.save_if_asked(step, at_once=True)
        if self._options.upload_to is None and self._options.on_saved is None:
            return
        try:
            while self.collective.any(not self._have_finished(_LOOK_SECS), 'finish'):
                pass
        except XhfError as error:
            self.handle(error, 'waiting for uploads and on_saved')

    def manifests_of_others(self) -> list[tuple[bytes, str, str]]:
        """What saves to ``others`` would replace, there and in the store of ``upload_to``. Runs on: rank 0.

        Returns:
            The manifest of each save, its folder or URL, and the suffix.

        Raises:
            StoreError: The store cannot be read.
        """
        found = []
        for suffix, target in self.others.items():
            found.append((target.newest_manifest(), str(target.final), suffix))
            if self._uploads is not None:
                found.append((*self._uploads.newest(target.name), suffix))
        return [(manifest, where, suffix) for manifest, where, suffix in found if manifest is not None]

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
        self._end_work()
        if self._saver.in_flight is not None:
            try:
                self._report(self._saver.outcome())
            except Exception as error:  # the run is over: log it and go on closing
                self._log.error(f'the save in the background failed: {error}. The previous save is untouched.')
        CheckpointManager._open.discard(self)
        self._ending.close()
        if self._requests is not None:
            self._requests.end_process()

    @property
    def _targets(self) -> list[CheckpointFolder]:
        return [self.newest, *self.others.values()]

    @property
    def _places(self) -> set[str]:
        """The folders and URLs of saves: no two managers of a process have one in common."""
        url, folders = self._options.upload_to, [target.final for target in self._targets]
        return {*map(str, folders), *(f'{url}/{folder.name}' for folder in folders if url is not None)}

    def _find_tokenizer(self, tokenizer: Any | None, finish: Callable[..., Any] | None) -> None:
        tokenizer, warnings = find_tokenizer(self._options.tokenizer, tokenizer, self._saver.exporter)
        for warning in warnings:
            self._log.warning(warning)
        if finish is not None:
            tokenizer, self._saver.eos_token_ids, messages = finish(tokenizer)
            for message in messages:
                self._log.info(message)
        self._saver.tokenizer = tokenizer

    def _occasions(self, when: str | None) -> str:
        """Everything that triggers a save, for the log."""
        occasions = [] if when is None else [when]
        occasions += ['at the end of training'] * self._options.save_last
        occasions += [f'at a new best score ({target.name})' for target in self.others.values()]
        occasions += ['on demand'] * bool(self._options.save_on_signal)
        return ', '.join(occasions)

    def _tell_listeners(self, target: CheckpointFolder, step: Step, collective: Collective) -> None:
        for listener in self._listeners:
            listener.committed(target, step, collective)

    def _report(self, committed: CommittedCheckpoint) -> None:
        after, self._after = self._after, None
        if after is not None:
            after()
        log_save(self._log, committed)
        self._on_committed(committed)

    def _have_finished(self, secs: float) -> bool:
        """Wait for the save in flight and for listeners; returns whether nothing is left to wait for.

        In all, at most ``exit_wait_secs`` are waited; what takes longer is left alone.
        """
        is_first = self._deadline is None
        if self._deadline is None:
            self._deadline = time.monotonic() + self._options.exit_wait_secs
        waits = {listener.name: listener.wait for listener in self._listeners}
        if self._saver.in_flight is not None:
            waits = {'a save in the background': self._saver.in_flight.wait, **waits}
        for name, wait in waits.items():
            if is_first and not wait(0.0):
                self._log.info(f'waiting for {name}')
            left_secs = max(0.0, self._deadline - time.monotonic())
            if not wait(min(secs, left_secs)):
                if secs < left_secs:
                    return False
                if left_secs:  # else it has been said
                    self._log.warning(f'{name}: not finished within exit_wait_secs={self._options.exit_wait_secs:g} s')
        return True

    def _end_work(self) -> None:
        """Training has ended, or the process will: wait for what must be finished. Needs no other rank."""
        if os.getpid() == self._process:
            for listener in self._listeners:
                if not listener.must_finish:
                    listener.close()
            self._have_finished(math.inf)

    def _end_interrupted(self) -> None:
        """Close earlier runs of this process that hold our folders.

        Raises:
            TargetError: One may still be going on.
        """
        for other in [*CheckpointManager._open]:
            both = self._places & other._places
            if other._process != os.getpid() or not both:
                continue
            if self._run is None or other._run is None or other._run() is self._run():
                raise TargetError(
                    f'{min(both)} is in use by another run of this process; set out_dir to a folder of another name, '
                    f'or upload_to to another URL. If that run was interrupted, call close() of its hook or callback'
                )
            self._log.warning(f'{other.newest.final}: an earlier run was interrupted and is now closed')
            other.close()


def _end_forgotten(process: int, targets: Sequence[CheckpointFolder], listeners: Sequence[EachSave[Any]]) -> None:
    """Called by the garbage collector, in this process or in a forked child; returns at once."""
    if os.getpid() == process:
        for end in (*(target.release for target in targets), *(listener.close for listener in listeners)):
            threading.Thread(target=end, daemon=True).start()
