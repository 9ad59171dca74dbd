"""All saves of one run, from preflight to the last report: shared by hook, callback and ``save_hf``.

How a run may end. Saves in the background, uploads and commands of ``on_saved`` tell their outcomes themselves, with
their steps, in their own threads; so an end only has to wait for them, for up to ``exit_wait_secs``.

=======================================  =============================================================================
training ends                            :meth:`CheckpointManager.finish`: all ranks wait for all work beside training
then; ``close()`` of hook or callback;   :meth:`CheckpointManager.close`: this rank waits for saves and uploads, ends
the next run of this process             commands, releases folders and process groups
the interpreter exits, whatever ended    :meth:`.BegunWork.end`: this rank waits for saves and uploads, ends commands;
training (Ctrl-C and sys.exit, too)      before other exit handlers (:class:`.ExitWait`)
SIGTERM, SIGHUP, SIGXCPU                 the same, then the process ends; if the user handles the signal,
                                         :meth:`.BegunWork.finish`, then the user's handler
a signal of ``save_on_signal``           a save; then, except after SIGUSR1 and SIGUSR2, as without that option
garbage collection of the run            folders are released, commands end; uploads go on, and exit waits for them
a forked child ends                      nothing: its parent goes on
``os._exit``, SIGKILL, other signals     nothing can be told; what was committed is whole
=======================================  =============================================================================
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from xhf_hooks.background.begun import BegunWork, SaveInFlight
from xhf_hooks.background.each_save import EachSave
from xhf_hooks.background.on_saved import OnSaved
from xhf_hooks.background.save_on_signal import SaveRequests
from xhf_hooks.background.upload import Uploads, uploads_of_run
from xhf_hooks.collective import Collective
from xhf_hooks.errors import TargetError, XhfError
from xhf_hooks.exporters.base import find_tokenizer
from xhf_hooks.exporters.base_files import base_dirs_of
from xhf_hooks.options import CallOptions, RunOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder, claim_targets
from xhf_hooks.places.kept_folder import new_name
from xhf_hooks.places.who_writes import WhoWrites, choose_writer
from xhf_hooks.planning.types import CommittedCheckpoint, SavePlan, Step
from xhf_hooks.saves.save import Saver
from xhf_hooks.saves.telemetry import RunLog, log_preparations, log_save
from xhf_hooks.saves.unwrap import Unwrapped
from xhf_hooks.system.threads import ExitWait
from xhf_hooks.system.versions import refuse_outdated

_STILL_THERE = 'The previous save is still complete.'
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
    thread (a notebook, a sweep, Trainer's auto_find_batch_size) closes an earlier one.

    Args:
        unwrapped: The trained model.
        final: The folder of the newest save.
        run: Identifies the run, such as MMEngine's runner. Only another run can close this one.
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
        self._options, self._log, self._on_committed, self._on_result = options, log, on_committed, on_result
        self._bases = base_dirs_of(unwrapped.model)
        self._after: Callable[[], None] | None = None  # for the save in flight
        self._in_flight = SaveInFlight()
        self._begun = BegunWork(log, options.exit_wait_secs)
        self._begun.listeners.append(self._in_flight)
        self._after_each: list[EachSave[Any]] = []
        self._uploads: Uploads | None = None
        self._on_saved: OnSaved | None = None
        self._requests: SaveRequests | None = None
        self.saved_at: int | None = None
        self._has_saved = False
        self._process, self._run = os.getpid(), None if run is None else weakref.ref(run)
        self._thread = threading.current_thread()
        if unwrapped.engine is not None:
            refuse_outdated('deepspeed')
        self.newest = CheckpointFolder(final.absolute(), options.max_keep_ckpts, warn=log.warning)
        self.others = {suffix: self.newest.beside(suffix) for suffix in suffixes}
        self._close_earlier()
        with ExitStack() as ending:
            self.collective = Collective() if collective is None else collective
            ending.callback(self.collective.close)
            writer = choose_writer(log, options.writer, new_name(self.newest.path, 'shared'), self.collective)
            self._saver = Saver(
                unwrapped,
                options,
                self.collective,
                writer=writer,
                in_background=options.async_save,
                log=log,
                after_commit=self._begin_after,
                tell=self._tell,
            )
            ending.callback(self._saver.close)
            for target in self._targets:
                ending.callback(target.release)
            if options.upload_to is not None:
                finals = [target.path for target in self._targets]
                self._uploads = uploads_of_run(
                    options.upload_to, options.backend_args, options.upload_keep, finals, self.collective, log
                )
                self._after_each.append(self._uploads)
                ending.callback(self._uploads.close)
            with self.collective.stage('preflight'):
                if options.on_saved is not None and self.collective.rank == 0:
                    self._on_saved = OnSaved(options.on_saved, log)
                    self._after_each.append(self._on_saved)
                    ending.callback(self._on_saved.close)
            self._begun.listeners += self._after_each
            self._ending = ending.pop_all()
        # A run that is never closed must not keep its model in memory, nor locks after garbage collection. So nothing
        # that has a thread or a handler, or that is named here, may know this manager or the run
        weakref.finalize(self, _end_forgotten, self._process, self._targets, self._begun).atexit = False
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
                    claim_targets(self._log, self._targets, plan.nbytes, self._bases, sweep=sweep)
                    self._find_tokenizer(tokenizer, finish_tokenizer)
                    for warning in saver.rehearse(self.newest):
                        self._log.warning(warning)
                if self._uploads is not None:
                    self._uploads.claim()
            if options.async_save:
                with self.collective.stage('preflight'):
                    reserved = saver.reserve_snapshot()
                self._log.info(f'background saves use {reserved / 1e6:.0f} MB of host memory on this rank')
            if options.async_save or self._after_each:
                self._ending.callback(ExitWait(self._begun.end, self._begun.finish).close)
            if options.save_on_signal:
                self._requests = SaveRequests(self._log, options.save_on_signal)
                self._ending.callback(self._requests.close)
                weakref.finalize(self, self._requests.close).atexit = False
            with self.collective.stage('preflight'):
                self._tell_preparations(plan, when)
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
        target, committed = target or self.newest, None
        try:
            with self.collective.stage('save'):
                self.collect()
                self._begun.renew()
                if self._options.async_save:
                    self._saver.start(target, step, facts)
                    self._in_flight.begun(self._saver.in_flight, step)
                else:
                    committed = self._saver.save(target, step, facts)
        except XhfError as error:
            self.handle(error, f'the save of {step.label}')
            return
        if target is self.newest:
            self.saved_at = step.iteration
        self._after = after
        if committed is not None:
            self._tell(step, committed, None)
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
        """After an iteration: collect the background save if it has ended on this rank, and results of ``on_saved``.

        On the other ranks it is then about to end. If it failed and ``on_error`` is 'raise', ranks raise where all pass
        together: when the next save is due, or training ends. They have told the error before.

        Raises:
            XhfError: The save failed, ``on_error`` is 'raise', and there are no other ranks.
        """
        in_flight = self._saver.in_flight
        if in_flight is not None and in_flight.done:
            is_alone = self._options.on_error != 'raise' or self.collective.world_size == 1
            if in_flight.succeeded or is_alone:
                self.collect()
        while self._on_saved is not None and self._on_saved.results:
            self._on_result(*self._on_saved.results.popleft())

    @property
    def must_tell_after(self) -> bool:
        """Whether a save is in flight whose ``after`` has not been called."""
        return self._after is not None

    def collect(self) -> None:
        """Wait for the save in flight, if any, which has then told its outcome. It is the same on all ranks.

        Raises:
            XhfError: It failed, and ``on_error`` is 'raise'.
        """
        if self._saver.in_flight is None:
            return
        try:
            committed = self._saver.outcome()
        except XhfError:
            self._after, self.saved_at = None, None
            if self._options.on_error == 'raise':
                raise
        else:
            self._report(committed)

    def finish(self, step: Step) -> None:
        """At the end of training: :meth:`save_if_asked`, then wait for all work beside training, on all ranks.

        Ranks wait for each other on gloo, a short time at a time, since an NCCL collective may follow training.

        Raises:
            XhfError: A save failed, and ``on_error`` is 'raise'; or ranks could not agree.
        """
        self.save_if_asked(step, at_once=True)
        self.collect()
        if not self._has_saved:
            self._log.warning('training has ended, and this run has saved nothing')
        if self._options.upload_to is None and self._options.on_saved is None:
            return
        try:
            while self.collective.any(not self._begun.wait(_LOOK_SECS), 'finish'):
                pass
        except XhfError as error:
            self.handle(error, 'waiting for uploads and on_saved')
        self.look()

    def manifests_of_others(self) -> list[tuple[bytes, str, str]]:
        """What saves to ``others`` would replace, there and in the store of ``upload_to``. Runs on: rank 0.

        Returns:
            The manifest of each save, its folder or URL, and the suffix.

        Raises:
            StoreError: The store cannot be read.
        """
        found = []
        for suffix, target in self.others.items():
            found.append((target.newest_manifest(), str(target.path), suffix))
            if self._uploads is not None:
                found.append((*self._uploads.newest(target.name), suffix))
        return [(manifest, where, suffix) for manifest, where, suffix in found if manifest is not None]

    def handle(self, error: XhfError, what: str) -> None:
        """Raise or log an error that all ranks share, depending on ``on_error``."""
        if self._options.on_error == 'raise':
            raise error
        self._log.error(f'{what} failed and training goes on: {error}. {_STILL_THERE}')

    def close(self) -> None:
        """Wait for a save in flight, release the folders, destroy process groups. Needs no other rank.

        Does nothing the second time, nor in a forked child, whose parent goes on.
        """
        if os.getpid() != self._process:
            return
        self._begun.end()
        if self._saver.in_flight is not None:
            with contextlib.suppress(Exception):  # its thread has told it
                self._report(self._saver.outcome())
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
        url, folders = self._options.upload_to, [target.path for target in self._targets]
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

    def _tell_preparations(self, plan: SavePlan, when: str | None) -> None:
        options, saver = self._options, self._saver
        how = f'{saver.who_writes.value} writer{", in the background" * options.async_save}; about '
        how += f'{saver.expected_extra_nbytes / 1e6:.0f} MB of extra memory on the busiest rank'
        log_preparations(
            self._log,
            plan,
            saver.exporter,
            where=self.newest.path,
            when=self._occasions(when),
            how=how,
            expects_slices=saver.who_writes is not WhoWrites.GATHER and self.collective.world_size > 1,
        )

    def _occasions(self, when: str | None) -> str:
        """Everything that triggers a save, for the log."""
        occasions = [] if when is None else [when]
        occasions += ['at the end of training'] * self._options.save_last
        occasions += [f'at a new best score ({target.name})' for target in self.others.values()]
        occasions += ['on demand'] * bool(self._options.save_on_signal)
        return ', '.join(occasions)

    def _begin_after(self, target: CheckpointFolder, step: Step, collective: Collective) -> None:
        for listener in self._after_each:
            listener.committed(target, step, collective)

    def _tell(self, step: Step, committed: CommittedCheckpoint | None, error: BaseException | None) -> None:
        """Log the outcome of a save. Runs on: the thread that saves."""
        if committed is None:
            text = str(error) if isinstance(error, XhfError) else f'{type(error).__name__}: {error}'
            self._log.error(f'the save of {step.label} in the background failed: {text}. {_STILL_THERE}')
            return
        with self._reporting(step):
            log_save(self._log, committed)

    def _report(self, committed: CommittedCheckpoint) -> None:
        """Runs on: the thread that trains."""
        self._has_saved = True
        after, self._after = self._after, None
        with self._reporting(committed.step):
            if after is not None:
                after()
            self._on_committed(committed)

    @contextlib.contextmanager
    def _reporting(self, step: Step) -> Iterator[None]:
        """The save is good, and other ranks go on, whatever fails in this block."""
        try:
            yield
        except Exception as error:  # of the user's visualizer, for example
            self._log.error(f'{step.label} is saved, but this was not reported: {type(error).__name__}: {error}')

    def _close_earlier(self) -> None:
        """Close earlier runs of this process that are over. A thread trains one run at a time.

        Raises:
            TargetError: A run that may still be going on holds our folders.
        """
        for other in [*CheckpointManager._open]:
            if other._process != os.getpid():
                continue
            both = self._places & other._places
            is_another = self._run is not None and other._run is not None and other._run() is not self._run()
            is_over = bool(both) or other._thread is self._thread or not other._thread.is_alive()
            if is_another and is_over:
                self._log.warning(f'{other.newest.path}: an earlier run was interrupted and is now closed')
                other.close()
            elif both:
                raise TargetError(
                    f'{min(both)} is in use by another run of this process; set out_dir to a folder of another name, '
                    f'or upload_to to another URL. If that run was interrupted, call close() of its hook or callback'
                )


def _end_forgotten(process: int, targets: Sequence[CheckpointFolder], begun: BegunWork) -> None:
    """Called by the garbage collector, in this process or in a forked child; returns at once."""
    if os.getpid() == process:
        for end in (*(target.release for target in targets), begun.close):
            threading.Thread(target=end, daemon=True).start()
