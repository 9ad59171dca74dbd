"""All saves of one run, from preflight to the last report: shared by hook, callback and ``save_hf``.

How a run may end: the table in :mod:`.run_end`. What the verbs for it mean (poll, wait, finish, close, abort, unlock,
abandon): "Terms" in docs/how-it-works.md.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.errors import RankLostError, XhfError
from xhf_hooks.options import CallOptions, RunOptions
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.access import choose_strategy
from xhf_hooks.runs.ends.after_saves import AfterSaves
from xhf_hooks.runs.ends.run_end import RunEnd
from xhf_hooks.runs.kept_plan import KeptPlan
from xhf_hooks.runs.preflight import log_preparations, occasions_of, preflight
from xhf_hooks.runs.preparation import Preparation
from xhf_hooks.runs.run_info import RunInfo
from xhf_hooks.runs.save import Save
from xhf_hooks.runs.save_context import SaveContext
from xhf_hooks.runs.telemetry import RunLog, log_save
from xhf_hooks.sources import source_for
from xhf_hooks.sources.replicated import checksum_local_elements
from xhf_hooks.system.threads import wait_until


class Run:
    """All saves of one run: checks that they will work, and makes them.

    Runs on: all ranks, unless a method says otherwise.

    Made by :meth:`open`.

    Attributes:
        newest: The target of all saves but the extra ones: the folder of the newest one, with older saves next to it.
        extra_targets: Further targets by suffix, such as 'best'. Each keeps one save.
        saving_to: The target of the save in flight in the background; None if there is none.
        saved_at: Iterations done at the last save to ``newest``, also one in flight; None before the first, and after
            one that failed in the background.
    """

    def __init__(
        self,
        context: SaveContext,
        newest: CheckpointFolder,
        extra_targets: Mapping[str, CheckpointFolder],
        options: RunOptions | CallOptions,
        end: RunEnd,
        after_saves: AfterSaves,
        on_committed: Callable[[CommittedCheckpoint], None],
        on_result: Callable[[Step, Mapping[str, float]], None],
    ) -> None:
        self._context = context
        self.log, self.collective = context.log, context.collective
        self.newest, self.extra_targets = newest, extra_targets
        self._options = options
        self._end = end
        self._after_saves = after_saves
        self._on_committed, self._on_result = on_committed, on_result
        self._saving: Future[CommittedCheckpoint] | None = None  # in the background
        self.saving_to: CheckpointFolder | None = None
        self.saved_at: int | None = None
        self._saved_checksum: int | None = None  # of this rank's weights at the last save to `newest`
        self._has_saved = False
        self._last_error = ''

    @classmethod
    @torch.inference_mode(False)  # the caller may be in it, and what is made in it cannot be trained with later
    def open(
        cls,
        info: RunInfo,
        options: RunOptions | CallOptions,
        log: RunLog,
        *,
        on_committed: Callable[[CommittedCheckpoint], None] = lambda committed: None,
        on_result: Callable[[Step, Mapping[str, float]], None] = lambda step, numbers: None,
        collective: Collective | None = None,
        kept: KeptPlan | None = None,
    ) -> Run:
        """Check that saves will work, lock their folders, and start the threads that make them.

        Args:
            info: What the frontend knows of the run, with the trained model.
            on_committed: Called with each committed save, in the thread that trains.
            on_result: Called on rank 0 in the thread that trains, with the step of a save and the numbers that the
                command of ``on_saved`` printed for it.
            collective: Connects the ranks; closed with this run. ``save_hf`` gives the one that all its calls share
                (:meth:`.Collective.shared`), whose ``close`` does nothing. None connects the ranks anew.
            kept: What calls of ``save_hf`` for this model share; None for a hook or callback.

        Raises:
            XhfError: Saves will not work; the same on every rank.
        """
        newest = CheckpointFolder(
            info.folder.absolute(),
            options.max_keep_ckpts,
            keep_every=options.keep_every,
            is_resumed=info.is_resumed,
            warn=log.warning,
        )
        extra_targets = {suffix: newest.extra_target(suffix) for suffix in info.extra_suffixes}
        targets = [newest, *extra_targets.values()]
        end = RunEnd(targets, info.trainer, options, log)
        end.begin()
        try:
            collective = Collective.connect() if collective is None else collective
            end.do_last(collective.close)
            how_to_choose = choose_strategy if kept is None else kept.choose_strategy
            strategy = how_to_choose(log, options.writer, newest.path, collective)
            context = SaveContext.open(
                info.unwrapped,
                options,
                collective,
                log,
                end.do_last,
                strategy=strategy,
                stays_cached=options.on_saved is not None,
                kept=kept,
            )
            # In the order in which an end waits for them
            if context.background is not None:
                end.add_task(context.background)
            for target in targets:
                end.add_task(target.siblings.deletion)
            paths = [target.path for target in targets]
            after_saves = AfterSaves.start(options, paths, collective, log, info.timestamp, end.add_task)
            preflight(context, targets, after_saves.uploads, info)
            run = cls(context, newest, extra_targets, options, end, after_saves, on_committed, on_result)
            end.listen()
            if not context.is_planned_before:
                with collective.stage('log preparations'):
                    log_preparations(context, targets, occasions_of(options, info.schedule, extra_targets))
        except BaseException:
            end.close()
            raise
        # A run that is never closed must not keep its model in memory, nor its folders locked, once it is garbage. So
        # no thread, no signal handler and nothing that an end calls may hold a reference to this object, or to
        # `info` (its trainer, such as MMEngine's runner, has the model, too)
        weakref.finalize(run, end.close_in_thread).atexit = False
        return run

    @torch.inference_mode(False)  # else ZeRO-3 would leave tensors behind that training cannot use
    def save(
        self,
        step: Step,
        target: CheckpointFolder | None = None,
        *,
        manifest_fields: Mapping[str, Any] | None = None,
        remember_weights: bool = False,
        call_began: float | None = None,
    ) -> None:
        """Make one save, or begin it if saves are made in the background.

        Does nothing if this iteration is saved in ``newest`` already, unless the weights have changed since.

        Args:
            target: Where it goes; None: to ``newest``.
            manifest_fields: Fields of the manifest for this save only.
            remember_weights: Take a checksum of the weights, by which a later call for the same iteration, or
                :meth:`finish`, sees whether they changed since.
            call_began: As in :meth:`.Save.begin`.

        Raises:
            XhfError: The save failed, and ``on_error`` is 'raise'.
        """
        target = target or self.newest
        committed = None
        try:
            if self._end.is_closed:  # on all ranks alike
                raise self._end.closed_error()
            with self.collective.stage('connect'):
                # After SIGTERM and its like, another thread waits for the tasks, then lets the signal take effect.
                # Until then this thread stays here; it goes on only if the user's handler of the signal returns
                self._end.signals.block_if_process_is_ending()
                self.ensure_connected()
                self.wait_for_background_save()  # here all ranks learn whether it failed
                self._warn_if_reconnected(self._context.ensure_connected())
                # The clock, a signal, a schedule and the trainer may ask for the same iteration
                is_saved = target is self.newest and self._is_saved(step)
            if is_saved:
                return
            with self.collective.stage('begin'):
                # exit_wait_secs is one limit for all waits at the end of a run. A signal may have started that time,
                # and the user's handler may have let the process live on: count anew
                self._end.reset_wait_deadline()
                save = Save.begin(
                    self._context, target, step, self._after_saves.handle_commit, manifest_fields, call_began
                )
                if self._options.async_save:
                    self._saving = save.copy_and_continue(partial(self._log_outcome, step))
                    self.saving_to = target
                else:
                    committed = save.write_and_commit()
                if target is self.newest:
                    self._saved_checksum = self._checksum_weights() if remember_weights else None
        except XhfError as error:
            self.raise_or_log(error, f'the save of {step.label}')
            return
        finally:
            if self._end.requests is not None and target is self.newest:
                # After a failed save, too: else the next iteration would save again, and fail alike
                self._end.requests.restart_clock()
        if target is self.newest:
            self.saved_at = step.iteration
        if committed is not None:
            self._log_outcome(step, committed, None)
            self._call_frontend(committed)
            if target is self.newest and self._end.requests is not None:
                # A signal that came while the save was written is answered by it
                self._end.requests.mark_answered()
                self._end.signals.answer(self._end)

    def save_if_requested(self, step: Step, *, vote_now: bool = False, remember_weights: bool = False) -> None:
        """Save if a signal or the clock requested it. Runs on: all ranks, at the same points.

        Args:
            vote_now: The vote asks whether a rank was asked for a save. False, at the end of an iteration: act on the
                answer to the vote that an earlier call started, and start one if it is time, without waiting. True, at
                the end of a validation or of training: wait for all ranks and vote now.
            remember_weights: As in :meth:`save`.

        Raises:
            XhfError: The save failed, or ranks could not vote, and ``on_error`` is 'raise'.
        """
        requests = self._end.requests
        if requests is None or self._end.is_closed:
            return
        try:
            if vote_now:
                with self.collective.stage('connect before a vote'):
                    self.ensure_connected()
            if not requests.is_due(vote_now=vote_now):
                return
        except RankLostError as error:
            if self._raises:
                raise
            self.log.error(
                f'save_on_signal and interval_minutes have no effect until a save or validation connects again: {error}'
            )
            return
        self.save(step, remember_weights=remember_weights)
        if self._end.signals.ends_after_save(self._end):
            self.wait_for_background_save()
            self._end.signals.answer(self._end)

    def poll_background(self) -> None:
        """After an iteration: note a background save that has ended on this rank, and pass on results of ``on_saved``.

        If the process is ending after a signal, this thread stays here. A rank notes the end of the save without asking
        the others, which see the same outcome a moment apart. Only an error that must be raised (``on_error='raise'``)
        is left for the next save, or the end of training, where all ranks raise it together. The thread that saves has
        logged it before.

        Raises:
            XhfError: The save failed, ``on_error`` is 'raise', and there are no other ranks.
        """
        self._end.signals.block_if_process_is_ending()
        if self._saving is not None and self._saving.done():
            is_same_on_all_ranks = not self._raises or self.collective.world_size == 1
            if self._saving.exception() is None or is_same_on_all_ranks:
                self.wait_for_background_save()
        results = self._after_saves.results
        while results:
            step, numbers = results.popleft()
            with self.log.logging_errors_of_callbacks(step):
                self._on_result(step, numbers)

    def wait_for_background_save(self) -> None:
        """Wait for the save in flight, if any, and call the frontend. The outcome was logged; it is equal on all ranks.

        Raises:
            XhfError: The save failed, and ``on_error`` is 'raise'.
        """
        if self._saving is None:
            return
        wait_until(self._saving.done)  # without a limit; signals are handled meanwhile
        ended, target = self._saving, self.saving_to
        self._saving = self.saving_to = None
        try:
            self._call_frontend(ended.result())
        except XhfError:
            if target is self.newest:
                self.saved_at = None
            if self._raises:
                raise

    def finish(self, step: Step, *, reloaded_step: Step | None = None) -> None:
        """At the end of training: the last save, then wait for all background tasks, on all ranks.

        Args:
            step: The last step.
            reloaded_step: The step whose weights the trainer reloaded at the end (``load_best_model_at_end``); None if
                it did not. If the last step is not saved, or the weights have changed since, the last save
                (``save_last``) is labelled with it. The change is noticed only if the save of the last step was made
                with ``remember_weights``, so a frontend that passes ``reloaded_step`` must set ``remember_weights``
                for every save that may turn out to be the one of the last step.

        Raises:
            XhfError: A save failed, or ranks could not vote, and ``on_error`` is 'raise'.
        """
        self.wait_for_background_save()
        if self._end.is_closed:
            self.save(step)  # whose error says that no save can be made
            return
        try:
            with self.collective.stage('connect at the end'):
                self.ensure_connected()
            # Trainer knows its best checkpoint only on hosts that see that folder
            reloaded_step = self.collective.from_rank0('finish', lambda: reloaded_step)
            is_saved = self._is_saved(step)
        except XhfError as error:
            self.raise_or_log(error, 'the last save')
            return
        if reloaded_step is not None and not is_saved:
            step = reloaded_step
        if self._options.save_last and not is_saved:
            self.save(step)
            self.wait_for_background_save()
        self.save_if_requested(step, vote_now=True)
        self.wait_for_background_save()
        if not self._has_saved:
            self.log.warning('training has ended, and this run has saved nothing')
        try:
            self._end.wait_on_all_ranks(self.collective)
        except XhfError as error:
            self.raise_or_log(error, 'waiting for deletions, uploads and on_saved')
        self.poll_background()

    def ensure_connected(self) -> None:
        """Wait for all ranks, and reconnect them where a connection has broken. Runs on: all ranks.

        Call it before ranks communicate again after a pause: idle connections may have been dropped. (:meth:`save` does
        the same for background saves, once the one in flight has ended.)

        Raises:
            RankLostError: A rank has died, or could not be reached again.
        """
        has_reconnected = self.collective.ensure_connected()
        if self._end.requests is not None:
            has_reconnected = self._end.requests.ensure_connected(self.collective) or has_reconnected
        self._warn_if_reconnected(has_reconnected)

    def _warn_if_reconnected(self, has_reconnected: bool) -> None:
        if has_reconnected:
            self.log.warning('a connection between ranks had broken; they are connected again')

    def _is_saved(self, step: Step) -> bool:
        """Whether the weights are those of the last save to ``newest``. Runs on: all ranks, with the same result."""
        if self.saved_at != step.iteration:
            return False
        if self._saved_checksum is None:  # made without remember_weights: they count as unchanged
            return True
        has_changed = True
        # An error may be of one rank alone. It counts as a change: then all ranks vote, save, and get it from the save
        with contextlib.suppress(Exception):
            has_changed = self._checksum_weights() != self._saved_checksum
        return not self.collective.vote_any(has_changed, 'comparing weights')

    def _checksum_weights(self) -> int:
        """A checksum of the part of the model that this rank holds, as it is now.

        Needs no other rank: only reading fp32 masters uses the collective; these specs are of the weights themselves.
        """
        source = source_for(self._context.unwrapped.root)
        return checksum_local_elements(source, source.specs(), self.collective)

    def close(self) -> None:
        """Wait for a save in flight, unlock the folders, destroy process groups. Needs no other rank.

        If a signal of ``save_on_signal`` has come that ends the process, and no save has answered it, it takes effect
        now. Does nothing the second time, nor in a forked child, whose parent goes on.
        """
        if not self._end.is_of_this_process:
            return
        # Waits at most exit_wait_secs for saves and uploads, then drops what is left, except a save being written. For
        # that it waits, however long: the folder stays locked until it ends
        self._end.close()
        with contextlib.suppress(Exception):  # of any type: the thread that saves has logged it
            self.wait_for_background_save()
        self._end.signals.answer(self._end)

    def close_after_save(self) -> tuple[Future[CommittedCheckpoint], RunEnd]:
        """Have this run closed once the save in flight has ended; returns its outcome, and what closes the run."""
        outcome, end = self._saving, self._end
        if outcome is None:
            raise ValueError('expected a save in the background')
        outcome.add_done_callback(lambda _: end.close_in_thread())  # not in the thread that saves: close() waits for it
        return outcome, end

    def raise_or_log(self, error: XhfError, what: str) -> None:
        """Raise or log an error, depending on ``on_error``. Rank 0 alone logs what all ranks share."""
        if self._raises:
            raise error
        self._log_error(error, f'{what} failed and training goes on: {error}')

    @property
    def preparation(self) -> Preparation:
        """What saves are made of; another one once tensors or the config have changed."""
        return self._context.preparation

    @property
    def save_in_flight(self) -> Future[CommittedCheckpoint] | None:
        """The outcome of the save that goes on in the background, equal on all ranks; None if there is none."""
        return self._saving

    @property
    def _raises(self) -> bool:
        return self._options.on_error == 'raise'

    def _log_outcome(self, step: Step, committed: CommittedCheckpoint | None, error: BaseException | None) -> None:
        """Log what became of a save. Runs on: the thread that saves."""
        if committed is None:
            text = str(error) if isinstance(error, XhfError) else f'{type(error).__name__}: {error}'
            self._log_error(error, f'the save of {step.label} in the background failed: {text}')
            return
        with self.log.logging_errors_of_callbacks(step):
            log_save(self.log, committed, whole_path=RunEnd.is_ambiguous(Path(committed.path)))

    def _log_error(self, error: BaseException | None, text: str) -> None:
        """Log why a save failed: once, also if it was tried again."""
        is_shared = isinstance(error, XhfError) and not isinstance(error, RankLostError)
        if text != self._last_error and not (is_shared and self.collective.rank != 0):
            self.log.error(f'{text}.{" The previous save is still complete." if self._has_saved else ""}')
        self._last_error = text

    def _call_frontend(self, committed: CommittedCheckpoint) -> None:
        """Call the frontend for a committed save. Runs on: the thread that trains."""
        self._has_saved = True
        with self.log.logging_errors_of_callbacks(committed.step):
            self._on_committed(committed)
