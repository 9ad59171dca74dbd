"""All saves of one run, from its preflight to its last report: what hook, callback and call have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xhf_hooks import preflight
from xhf_hooks.collective import Collective
from xhf_hooks.commit.staging import CheckpointFolder
from xhf_hooks.errors import XhfError
from xhf_hooks.exit_wait import ExitWait
from xhf_hooks.options import RunOptions
from xhf_hooks.preflight import Unwrapped
from xhf_hooks.records import CommittedCheckpoint, Step
from xhf_hooks.report import ProgressLog, RunLog, StallWatch, log_preparations, log_save
from xhf_hooks.save import Saver
from xhf_hooks.tokenizer import find_tokenizer


class RunSaves:
    """Proves that saves will work, does them, and ends. Runs on: all ranks, every method.

    Args:
        unwrapped: The trained model.
        on_committed: Told of each save that is under its final name.

    Attributes:
        newest: The folder of the newest save.
        others: Further folders by the suffix of their names, each with one save.
        saved_at: Iterations done at the last save to ``newest``, if it has not failed.
        collective: Of this run's saves.
    """

    def __init__(
        self,
        unwrapped: Unwrapped,
        final: Path,
        options: RunOptions,
        log: RunLog,
        *,
        suffixes: Sequence[str] = (),
        reward_token_id: int | None = None,
        on_committed: Callable[[CommittedCheckpoint], None] | None = None,
    ) -> None:
        self._options, self._log = options, log
        self._on_committed = on_committed
        self._after: Callable[[], None] | None = None  # of the save in flight
        self.saved_at: int | None = None
        if options.save.dtype == 'F32':
            preflight.refuse_unreadable_masters(unwrapped.engine)
        self.collective = Collective()
        self._writer = preflight.choose_writer(log, options.save.writer, final.parent, self.collective)
        save = replace(options.save, writer=self._writer, facts=unwrapped.facts, reward_token_id=reward_token_id)
        self._saver = Saver(unwrapped.model, save, self.collective, unwrapped.root)
        self.newest = CheckpointFolder(final, options.max_keep)
        self.others = {
            suffix: CheckpointFolder(final.with_name(f'{final.name}_{suffix}'), max_keep=1) for suffix in suffixes
        }
        self._exit_wait: ExitWait | None = None
        self._watch = StallWatch(log, in_background=options.save.in_background, writer=self._writer)

    def prepare(
        self,
        tokenizer: Any | None,
        *,
        when: Any,
        sweep: Path | None = None,
        finish_tokenizer: Callable[[Any | None], tuple[Any | None, Sequence[int]]] | None = None,
    ) -> None:
        """Plan, claim the folders and rehearse.

        Args:
            tokenizer: Of the run; the option of that name goes before it, the base model's after.
            when: For the log: when saves are made.
            sweep: A work_dir to clear of what killed runs left.
            finish_tokenizer: Gives the final tokenizer, and the ids of what ends an answer.

        Raises:
            XhfError: Saves will not work; the same on every rank, before any training is paid for.
        """
        plan = self._saver.prepare()
        with self.collective.stage('preflight'):
            if self.collective.rank == 0:
                preflight.claim_targets(
                    self._log, self._folders, plan.nbytes, self._saver.exporter.base_dir, sweep=sweep
                )
                found = find_tokenizer(self._options.tokenizer, tokenizer, self._saver.exporter, self._log)
                self._saver.set_tokenizer(*((found, ()) if finish_tokenizer is None else finish_tokenizer(found)))
                for warning in self._saver.rehearse(self.newest):
                    self._log.warning(warning)
        if self._saver.in_background:
            with self.collective.stage('preflight'):
                reserved = self._saver.reserve_snapshot()
            self._log.info(f'saves go on in the background, from {reserved / 1e6:.0f} MB of host memory on this rank')
            self._exit_wait = ExitWait(self._wait_at_exit)
        log_preparations(self._log, self._saver, when, self._writer, self.newest.final)

    def save(
        self,
        step: Step,
        folder: CheckpointFolder | None = None,
        *,
        may_skip: bool = False,
        after: Callable[[], None] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """One save; into ``newest`` unless another folder is given.

        Args:
            facts: What the manifest says of this save alone.
            may_skip: It is one of a schedule, and ``async_busy='skip'`` may leave it out.
            after: Called when it is committed.

        Raises:
            XhfError: It failed, and ``on_error`` is 'raise'.
        """
        began, folder = time.monotonic(), folder or self.newest
        if self._saver.in_background and not self._make_way(step, may_skip=may_skip):
            return
        committed, progress = None, ProgressLog(self._log, step.label)
        try:
            if self._saver.in_background:
                self._saver.start(folder, step, progress, facts)
            else:
                committed = self._saver.save(folder, step, progress, facts)
        except XhfError as error:
            self.handle(error, f'the save of {step.label}')
            return
        if folder is self.newest:
            self.saved_at = step.iteration
        self._after = after
        if committed is not None:
            self._report(committed)
        if may_skip:
            self._watch.saved(began)

    @property
    def must_tell_after(self) -> bool:
        """Whether there is a save in flight whose ``after`` has not been called."""
        return self._after is not None

    def collect_if_done(self) -> None:
        """Report the save in the background if it has ended well on this rank, or will at any moment."""
        if self._saver.background.succeeded:
            self.collect()

    def collect(self) -> None:
        """Wait for the save in flight, if any, and report it. All ranks get the same outcome."""
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
        """An error that all ranks have: end the run or go on, as ``on_error`` says."""
        if self._options.on_error == 'raise':
            raise error
        self._log.error(f'{what} failed and training goes on: {error}. The previous save is untouched.')

    def close(self) -> None:
        """Let others use the folders, and give process groups back. No save may be in flight."""
        if self.collective.rank == 0:
            for folder in self._folders:
                folder.release()
        if self._exit_wait is not None:
            self._exit_wait.close()
        self._saver.close()
        self.collective.close()

    @property
    def _folders(self) -> list[CheckpointFolder]:
        return [self.newest, *self.others.values()]

    def _make_way(self, step: Step, *, may_skip: bool) -> bool:
        """End the save that is in flight; False when this one is to be skipped instead."""
        background = self._saver.background
        ranks_agree_on_it = self._options.async_busy == 'skip' and may_skip
        if ranks_agree_on_it and any(self.collective.all_gather(background.busy and not background.done)):
            self._log.warning(f'skipped the save of {step.label}: the one before is still being written')
            return False
        self.collect()
        return True

    def _report(self, committed: CommittedCheckpoint) -> None:
        if self._after is not None:
            after, self._after = self._after, None
            after()
        log_save(self._log, committed)
        if self._on_committed is not None:
            self._on_committed(committed)

    def _wait_at_exit(self) -> None:
        background = self._saver.background
        if background.busy and not background.done:
            self._log.warning('the process ends, but a save is being written: waiting for it')
            if not background.wait(self._options.exit_wait_secs):
                self._log.error(
                    f'it was not written within exit_wait_secs={self._options.exit_wait_secs} s. The previous save '
                    f'is untouched.'
                )
