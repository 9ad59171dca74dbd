"""All saves of one run, from preflight to the last report: shared by hook, callback and ``save_hf``.

How a run may end. Saves in the background, uploads and commands of ``on_saved`` tell their outcomes themselves, with
their steps, in their own threads; so an end only has to wait for them, for up to ``exit_wait_secs``.

=======================================  =============================================================================
training ends                            :meth:`CheckpointManager.finish`: all ranks wait for all work beside training
then; ``close()`` of hook or callback;   :meth:`CheckpointManager.close`: this rank waits for saves and uploads, ends
the next run of this process             commands, releases folders and process groups
the interpreter exits, whatever ended    :meth:`.BackgroundTasks.close`: this rank waits for saves and uploads, ends
training (Ctrl-C and sys.exit, too)      commands; before other exit handlers (:class:`.ExitWait`)
SIGTERM, SIGHUP, SIGXCPU                 the same in a thread, while training pauses at the end of its iteration; then
                                         the process ends; if the user handles the signal,
                                         :meth:`.BackgroundTasks.wait_before_exit`, then the user's handler
a signal of ``save_on_signal``           a save; then, except after SIGUSR1 and SIGUSR2, as without that option
garbage collection of the run            folders are released, commands end; uploads go on, and exit waits for them
a forked child ends                      nothing: its parent goes on
``os._exit``, SIGKILL, other signals     nothing can be told; what was committed is whole
=======================================  =============================================================================

The words for it: *wait* until work has ended, at most so long; *collect* the outcome of the save in flight; *finish*
what ends well (a run, on all ranks; a writer's files); *close* an object and what it holds, on this rank alone, also a
second time; *abort* what was not committed; *release* what others may have then; *abandon* other ranks, which get an
error at once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.background.background_tasks import BackgroundTasks, poll
from xhf_hooks.background.exit_wait import ExitWait
from xhf_hooks.background.on_saved import OnSaved
from xhf_hooks.background.save_on_signal import SaveRequests
from xhf_hooks.background.upload import Uploads, uploads_of_run
from xhf_hooks.base_files import base_dirs_of
from xhf_hooks.collective import Collective
from xhf_hooks.errors import RankLostError, XhfError
from xhf_hooks.options import CallOptions, RunOptions, require_uploads_apart
from xhf_hooks.places.access import choose_strategy
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.saves.preflight import FinishTokenizer, log_preparations, occasions_of, preflight
from xhf_hooks.saves.run_registration import RunRegistration
from xhf_hooks.saves.save import Saver
from xhf_hooks.saves.telemetry import RunLog, log_save
from xhf_hooks.saves.unwrap import Unwrapped
from xhf_hooks.system.versions import require_packages

#: Between two agreements of ranks that wait for each other's tasks. Signals are handled only in between.
_LOOK_SECS = 5.0

_CONNECTED_AGAIN = 'a connection between ranks had broken; they are connected again'


class CheckpointManager:
    """Checks that saves will work, and makes them. Runs on: all ranks, every method.

    Args:
        path: The folder of the newest save.
        when: Describes the schedule, for the log; None means no schedule.
        tokenizer: The run's tokenizer. The option ``tokenizer`` overrides it; the base model's is the fallback.
        sweep: A work_dir from which leftovers of killed runs are removed.
        may_replace: Whether saves may replace those that are there before the run.
        run: Identifies the run, such as MMEngine's runner. Only another run can close this one.
        suffixes: Of the names of other folders, each for one save, such as the best.
        on_committed: Called with each committed save, in the thread that trains.
        on_result: Called there on rank 0 with the step of a save and the numbers that ``on_saved`` printed for it.
        collective: Closed with this, unless it is for reuse; None creates one.

    Attributes:
        others: Other targets, by name suffix, each with one save.
        saved_at: Iterations done at the last save to ``newest``, unless it failed.

    Raises:
        XhfError: Saves will not work; the same on every rank.
    """

    @torch.inference_mode(False)  # the caller may be in it, and what is made in it cannot be trained with later
    def __init__(
        self,
        unwrapped: Unwrapped,
        path: Path,
        options: RunOptions | CallOptions,
        log: RunLog,
        *,
        when: str | None,
        tokenizer: Any | None = None,
        finish_tokenizer: FinishTokenizer | None = None,
        sweep: Path | None = None,
        may_replace: bool = True,
        run: object | None = None,
        suffixes: Sequence[str] = (),
        on_committed: Callable[[CommittedCheckpoint], None] = lambda committed: None,
        on_result: Callable[[Step, Mapping[str, float]], None] = lambda step, numbers: None,
        collective: Collective | None = None,
    ) -> None:
        self._options = options
        self.log = log
        self._on_committed = on_committed
        self._on_result = on_result
        self._saving: Future[CommittedCheckpoint] | None = None  # in the background
        self._after: Callable[[], None] | None = None  # for the save in flight
        self.saved_at: int | None = None
        self._saved_checksum: int | None = None  # of this rank's weights at the last save
        self._has_saved = False
        self.newest = CheckpointFolder(
            path.absolute(), options.max_keep_ckpts, keep_every=options.keep_every, warn=log.warning
        )
        self.extra_targets = {suffix: self.newest.sibling(suffix) for suffix in suffixes}
        self._background_tasks = BackgroundTasks(log, options.exit_wait_secs)
        self._uploads: Uploads | None = None
        self._on_saved: OnSaved | None = None
        self._requests: SaveRequests | None = None
        self._exit_wait: ExitWait | None = None
        if unwrapped.engine is not None:
            require_packages('deepspeed')
        self._registration = RunRegistration(run, self._places, self.close)
        self._registration.close_earlier(log)
        with ExitStack() as ending:
            ending.callback(self._registration.unregister)
            self.collective = Collective() if collective is None else collective
            ending.callback(self.collective.close)
            self._saver = Saver(
                unwrapped,
                options,
                self.collective,
                log,
                strategy=choose_strategy(log, options.writer, self.newest.path, self.collective),
                in_background=options.async_save,
                stays_cached=options.on_saved is not None,
                after_commit=self._background_tasks.handle_commit,
            )
            ending.callback(self._saver.close)
            for target in self._targets:
                ending.callback(target.unlock)
            ending.callback(self._background_tasks.close)
            self._start_background_tasks()
            preflight(
                self._saver,
                self._targets,
                base_dirs_of(unwrapped.model),
                self._uploads,
                tokenizer=tokenizer,
                finish_tokenizer=finish_tokenizer,
                sweep=sweep,
                may_replace=may_replace,
            )
            self._watch_for_ends(ending)
            with self.collective.stage('preflight'):
                log_preparations(self._saver, self._targets, occasions_of(options, when, self.extra_targets))
            self._ending = ending.pop_all()
        # A run that is never closed must not keep its model in memory, nor locks after garbage collection. So nothing
        # that has a thread or a handler, or that is named here, may know this manager or the run
        weakref.finalize(self, _end_forgotten, os.getpid(), self._targets, self._background_tasks).atexit = False
        self._registration.register()

    def _start_background_tasks(self) -> None:
        """What works beside training: the save in flight, uploads, and on rank 0 the command of ``on_saved``."""
        options, tasks = self._options, self._background_tasks.all
        if self._saver.background is not None:
            tasks.append(self._saver.background)
        if options.upload_to is not None:
            with self.collective.stage('preflight'):
                require_uploads_apart(options.upload_to, self.newest.path)
            paths = [target.path for target in self._targets]
            self._uploads = uploads_of_run(
                options.upload_to,
                options.storage_options,
                options.upload_keep,
                paths,
                self.collective,
                self.log,
                keep_every=options.keep_every,
            )
            tasks.append(self._uploads)
        with self.collective.stage('preflight'):
            if options.on_saved is not None and self.collective.rank == 0:
                self._on_saved = OnSaved(options.on_saved, self.log)
                tasks.append(self._on_saved)

    def _watch_for_ends(self, ending: ExitStack) -> None:
        """Handle exits and signals from now on."""
        if self._background_tasks.all:
            self._exit_wait = ExitWait(self._background_tasks.close, self._background_tasks.wait_before_exit)
            ending.callback(self._exit_wait.close)
        options = self._options
        if options.save_on_signal or options.interval_minutes is not None:
            interval_secs = None if options.interval_minutes is None else 60 * options.interval_minutes
            self._requests = SaveRequests(self.log, options.save_on_signal or (), interval_secs)
            ending.callback(self._requests.close)
            weakref.finalize(self, self._requests.close).atexit = False

    @torch.inference_mode(False)  # else ZeRO-3 would leave tensors behind that training cannot use
    def save(
        self,
        step: Step,
        target: CheckpointFolder | None = None,
        *,
        after: Callable[[], None] | None = None,
        manifest_fields: Mapping[str, Any] | None = None,
        remember_weights: bool = False,
        call_began: float | None = None,
    ) -> None:
        """Make one save, in ``newest`` unless another target is given.

        Args:
            call_began: As for :class:`.SaveClock`; for a save that training waits for.
            remember_weights: Take a checksum of the weights, by which :meth:`finish` sees whether they changed since.

        Raises:
            XhfError: The save failed, and ``on_error`` is 'raise'.
        """
        target = target or self.newest
        committed = None
        try:
            if self._registration.is_closed:  # on all ranks alike
                raise self._registration.closed_error()
            with self.collective.stage('save'):
                self._pause_if_ending()
                self.ensure_connected()
                self.wait_for_background_save()
                if self._saver.ensure_connected():
                    self.log.warning(_CONNECTED_AGAIN)
                self._background_tasks.reset_wait_deadline()
                if self._options.async_save:
                    self._saving = self._saver.start(target, step, manifest_fields, partial(self._tell, step))
                else:
                    committed = self._saver.save(target, step, manifest_fields, call_began)
                self._saved_checksum = self._saver.checksum_weights() if remember_weights else None
        except XhfError as error:
            self.raise_or_log(error, f'the save of {step.label}')
            return
        finally:
            if self._requests is not None and target is self.newest:
                self._requests.restart_clock()  # after a save that failed, too: the next iteration would fail alike
        if target is self.newest:
            self.saved_at = step.iteration
        self._after = after
        if committed is not None:
            self._tell(step, committed, None)
            self._report(committed)

    def save_if_requested(self, step: Step, *, vote_now: bool = False) -> None:
        """Save if a signal or the clock requested it. Runs on: all ranks, at the same points.

        Args:
            vote_now: Count requests up to now: at the end of a validation or of training rather than of an iteration.

        Raises:
            XhfError: The save failed, and ``on_error`` is 'raise'; or ranks could not agree.
        """
        requests = self._requests
        if requests is None or self._registration.is_closed:
            return
        try:
            if vote_now:
                with self.collective.stage('save_on_signal'):
                    self.ensure_connected()
            if not requests.is_due(vote_now=vote_now):
                return
        except RankLostError as error:
            if self._options.on_error == 'raise':
                raise
            self.log.error(
                f'no signal and no clock requests a save until the next save or validation connects again: {error}'
            )
            return
        # Before saved_at is read: here all ranks learn whether the save in flight failed
        self.wait_for_background_save()
        if self.saved_at != step.iteration:
            self.save(step)
        if requests.ending_signal is not None:
            self.wait_for_background_save()
            if self._exit_wait is not None:
                self._exit_wait.finish_work_before(requests.ending_signal)
            requests.end_process()

    def poll_background(self) -> None:
        """After an iteration: collect the background save if it has ended on this rank, and results of ``on_saved``.

        On the other ranks it is then about to end. If it failed and ``on_error`` is 'raise', ranks raise where all pass
        together: when the next save is due, or training ends. They have told the error before.

        Raises:
            XhfError: The save failed, ``on_error`` is 'raise', and there are no other ranks.
        """
        self._pause_if_ending()
        if self._saving is not None and self._saving.done():
            is_alone = self._options.on_error != 'raise' or self.collective.world_size == 1
            if self._saving.exception() is None or is_alone:
                self.wait_for_background_save()
        while self._on_saved is not None and self._on_saved.results:
            step, numbers = self._on_saved.results.popleft()
            with self._reporting(step):
                self._on_result(step, numbers)

    @property
    def has_pending_callback(self) -> bool:
        """Whether a save is in flight whose ``after`` has not been called."""
        return self._after is not None

    def wait_for_background_save(self) -> None:
        """Wait for the save in flight, if any, which has then told its outcome. It is the same on all ranks.

        Raises:
            XhfError: It failed, and ``on_error`` is 'raise'.
        """
        if self._saving is None:
            return
        poll(self._saving.done)
        ended = self._saving
        self._saving = None
        try:
            self._report(ended.result())
        except XhfError:
            self._after = None
            self.saved_at = None
            if self._options.on_error == 'raise':
                raise

    def finish(self, step: Step, *, reloaded_step: Step | None = None) -> None:
        """At the end of training: the last save, then wait for all work beside training, on all ranks.

        Ranks wait for each other on gloo, a short time at a time, since an NCCL collective may follow training.

        Args:
            step: The last step.
            reloaded_step: The step whose weights the trainer says it has loaded since then: the save is named after its
                weights, unless they are still those of the last step.

        Raises:
            XhfError: A save failed, and ``on_error`` is 'raise'; or ranks could not agree.
        """
        self.wait_for_background_save()
        if self._registration.is_closed:
            self.save(step)  # which tells that it cannot
            return
        try:
            with self.collective.stage('finish'):
                self.ensure_connected()
            reloaded_step = self.collective.from_rank0(
                'finish', lambda: reloaded_step
            )  # other hosts may not see the trainer's files
        except XhfError as error:
            self.raise_or_log(error, 'the last save')
            return
        is_saved = self.saved_at == step.iteration
        has_changed = self._have_weights_changed() if is_saved else reloaded_step is not None
        if reloaded_step is not None and has_changed:
            step = reloaded_step
        if self._options.save_last and (not is_saved or has_changed):
            self.save(step)
            self.wait_for_background_save()
        self.save_if_requested(step, vote_now=True)
        self.wait_for_background_save()
        if not self._has_saved:
            self.log.warning('training has ended, and this run has saved nothing')
        has_work = self._options.upload_to is not None or self._options.on_saved is not None
        try:
            with self.collective.stage('finish'):  # the other ranks wait for the disk here, not in a collective of NCCL
                for target in self._targets:
                    target.siblings.deletion.wait()
            while has_work and self.collective.any(not self._background_tasks.wait(_LOOK_SECS), 'finish'):
                pass
        except XhfError as error:
            self.raise_or_log(error, 'waiting for deletions, uploads and on_saved')
        self.poll_background()

    def ensure_connected(self) -> None:
        """Wait for all ranks, and connect them again where a connection has broken. Runs on: all ranks.

        It precedes what ranks do together after a time. (For saves in the background, :meth:`save` does that once the
        one in flight has ended.)

        Raises:
            RankLostError: A rank has died, or could not be reached again.
        """
        has_broken = self.collective.ensure_connected()
        if self._requests is not None:
            has_broken = self._requests.ensure_connected(self.collective) or has_broken
        if has_broken:
            self.log.warning(_CONNECTED_AGAIN)

    def _have_weights_changed(self) -> bool:
        """Whether a rank's weights are not those of the last save. Runs on: all ranks, with the same result."""
        if self._saved_checksum is None:
            return False
        has_changed = True
        with contextlib.suppress(Exception):  # what cannot be read here fails again in the save, which tells why
            has_changed = self._saver.checksum_weights() != self._saved_checksum
        return self.collective.any(has_changed, 'finish')

    def manifests_of_extra_targets(self) -> list[tuple[bytes, str, str]]:
        """What saves to ``others`` would replace, there and in the store of ``upload_to``. Runs on: rank 0.

        Returns:
            The manifest of each save, its folder or URL, and the suffix.

        Raises:
            StoreError: The store cannot be read.
        """
        found = []
        for suffix, target in self.extra_targets.items():
            found.append((target.newest_manifest(), str(target.path), suffix))
            if self._uploads is not None:
                found.append((*self._uploads.newest(target.name), suffix))
        return [(manifest, where, suffix) for manifest, where, suffix in found if manifest is not None]

    def raise_or_log(self, error: XhfError, what: str) -> None:
        """Raise or log an error that all ranks share, depending on ``on_error``."""
        if self._options.on_error == 'raise':
            raise error
        self.log.error(f'{what} failed and training goes on: {error}.{self._still_there}')

    def close(self) -> None:
        """Wait for a save in flight, release the folders, destroy process groups. Needs no other rank.

        Does nothing the second time, nor in a forked child, whose parent goes on.
        """
        if not self._registration.is_of_this_process:
            return
        self._background_tasks.close()
        with contextlib.suppress(Exception):  # its thread has told it
            self.wait_for_background_save()
        self._ending.close()
        if self._requests is not None:
            self._requests.end_process()

    def _pause_if_ending(self) -> None:
        """Go no further in training once a signal has come that ends the process after the work beside training."""
        if self._exit_wait is not None:
            self._exit_wait.pause_if_ending()

    @property
    def _still_there(self) -> str:
        """What follows the message of a save that failed."""
        return ' The previous save is still complete.' if self._has_saved else ''

    @property
    def _targets(self) -> list[CheckpointFolder]:
        return [self.newest, *self.extra_targets.values()]

    @property
    def _places(self) -> set[str]:
        """The folders and URLs of saves."""
        url, folders = self._options.upload_to, [target.path for target in self._targets]
        return {*map(str, folders), *(f'{url}/{folder.name}' for folder in folders if url is not None)}

    def _tell(self, step: Step, committed: CommittedCheckpoint | None, error: BaseException | None) -> None:
        """Log the outcome of a save. Runs on: the thread that saves."""
        if committed is None:
            text = str(error) if isinstance(error, XhfError) else f'{type(error).__name__}: {error}'
            self.log.error(f'the save of {step.label} in the background failed: {text}.{self._still_there}')
            return
        with self._reporting(step):
            log_save(self.log, committed)

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
            self.log.error(f'{step.label} is saved, but this was not reported: {type(error).__name__}: {error}')


def _end_forgotten(process: int, targets: Sequence[CheckpointFolder], tasks: BackgroundTasks) -> None:
    """Called by the garbage collector, in this process or in a forked child; returns at once."""
    if os.getpid() == process:
        for end in (*(target.unlock for target in targets), tasks.close):
            threading.Thread(target=end, daemon=True).start()
