"""The hook for XTuner V1: ``hooks_config=HooksConfig(after_save_hf=HFCheckpoint())`` in a TrainerConfig.

V1's interface is that of ``xtuner/v1/train/trainer.py`` in InternLM/xtuner, commit b934f462 and tag v1.0.1: a hook with
``connect_trainer`` gets the Trainer when it is built, and ``_maybe_save_hf`` calls ``save_hf`` or ``async_save_hf`` of
its engine with the folder of a save, when one is due. Then it deletes older saves, and calls hooks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from xhf_hooks.errors import ModelError, OptionError, XhfError
from xhf_hooks.options import RunOptions, VerifyLevel, WriterName
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.runs.frontend import RunFrontend
from xhf_hooks.runs.run import Run
from xhf_hooks.runs.run_info import RunInfo
from xhf_hooks.runs.telemetry import RunLog, show
from xhf_hooks.runs.unwrap import unwrap


class HFCheckpoint(RunFrontend):
    """Writes the Hugging Face folders of XTuner V1's Trainer as HFCheckpointHook writes its saves.

    V1 goes on to decide when it saves (``hf_interval``), to which folder, how many saves it keeps (``hf_max_keep``) and
    whether saves are made in the background (``async_hf_export``). The options are those of HFCheckpointHook.

    Examples:
        >>> TrainerConfig(..., hf_interval=500, hooks_config=HooksConfig(after_save_hf=HFCheckpoint()))
    """

    def __init__(
        self,
        *,
        model_card: bool = True,
        max_shard_size: int | str = '5GB',
        bucket_size: int | str = '128MB',
        writer: WriterName = 'auto',
        verify: VerifyLevel = 'sizes',
        on_error: Literal['continue', 'raise'] = 'continue',
    ) -> None:
        self._options = RunOptions(  # checks them where the config is read
            model_card=model_card,
            max_shard_size=max_shard_size,
            bucket_size=bucket_size,
            writer=writer,
            verify=verify,
            on_error=on_error,
            save_last=False,
        )
        self._committed: CommittedCheckpoint | None = None

    def __call__(
        self, checkpoint: Path, step: int, epoch: int | None, total_step: int, total_epoch: int | None
    ) -> None:
        """V1 calls its hooks when a save is done: nothing is left to do."""

    def connect_trainer(self, trainer: Any) -> None:
        """Check that saves will work, and make them from now on. Runs on: all ranks, when the Trainer is built.

        Raises:
            XhfError: Saves will not work; the same on every rank.
        """
        self.close()
        if not hasattr(trainer, '_maybe_save_hf') or not hasattr(trainer, '_engine'):
            raise ModelError(
                f'{type(trainer).__name__}: expected the Trainer of xtuner.v1.train, whose engine saves the model; for '
                f"others, such as those of reinforcement learning, keep XTuner V1's own save_hf"
            )
        logger = logging.getLogger('xhf_hooks')
        if trainer.rank == 0:
            show(logger, logging.INFO)  # V1 logs with loguru
        log = RunLog(logger, 'HFCheckpoint', only_errors=trainer.rank != 0)
        if trainer._hf_interval is None:
            log.warning('XTuner V1 saves no Hugging Face folders here: debug_skip_save is set, or load_from has none')
            return
        self._trainer, engine, tokenizer = trainer, trainer._engine, trainer.tokenizer
        self._run = Run.open(
            RunInfo(
                unwrap(engine.model),
                Path(trainer.exp_dir, 'hf'),  # for its lock alone: each save has a folder of its own
                f'every {trainer._hf_interval} steps and at the end, as XTuner V1 does, to hf-STEP',
                tokenizer if hasattr(tokenizer, 'save_pretrained') else None,
                trainer=trainer,
            ),
            replace(self._options, async_save=getattr(trainer, '_async_hf_export', False)),
            log,
            on_committed=self._remember,
        )
        engine.save_hf, engine.async_save_hf = self._save, self._start
        trainer._maybe_save_hf = partial(self._save_if_due, trainer._maybe_save_hf)
        trainer.tokenizer = _Unsaved(tokenizer)

    def _save_if_due(self, maybe_save_hf: Callable[[], None]) -> None:
        """V1's own method. If the save fails, training goes on, and V1 neither counts the folder nor deletes another.

        Raises:
            XhfError: The save failed, and ``on_error`` is 'raise'.
        """
        with suppress(_NotSavedError):
            maybe_save_hf()

    def _save(self, hf_dir: str, save_dtype: torch.dtype = torch.bfloat16) -> None:
        """In place of the engine's ``save_hf``."""
        target = self._open(hf_dir, save_dtype)
        try:
            self._committed = None
            self.run.save(Step.of_iteration(self._trainer.cur_step), target)
        finally:
            self._unlock(target)
        if self._committed is None:
            raise _NotSavedError

    def _start(self, hf_dir: str, save_dtype: torch.dtype = torch.bfloat16) -> Future[Path]:
        """In place of the engine's ``async_save_hf``."""
        target = self._open(hf_dir, save_dtype)
        started = None
        try:
            self.run.save(Step.of_iteration(self._trainer.cur_step), target)
            started = self.run.save_in_flight
        finally:
            if started is None:
                self._unlock(target)
        if started is None:
            raise _NotSavedError
        saved: Future[Path] = Future()

        def finish(outcome: Future[CommittedCheckpoint]) -> None:
            self._unlock(target)
            if (error := outcome.exception()) is not None:
                saved.set_exception(error)
            else:
                saved.set_result(outcome.result().path)  # V1 deletes older saves, and calls hooks, in this thread

        started.add_done_callback(finish)
        return saved

    def _open(self, hf_dir: str, save_dtype: torch.dtype) -> CheckpointFolder:
        """The folder of a save, which nobody else may use until :meth:`_unlock`. Runs on: all ranks."""
        if save_dtype != torch.bfloat16:
            raise OptionError('save_dtype', 'torch.bfloat16', save_dtype)
        run = self.run
        base = run.preparation.exporter.base_model.folder
        target = CheckpointFolder(Path(hf_dir).absolute(), 1, elsewhere='set work_dir to', warn=run.log.warning)
        try:
            with run.collective.stage('open the folder'):
                run.ensure_connected()
                if run.collective.rank == 0:
                    target.lock_and_recover([] if base is None else [base])
        except XhfError as error:
            run.raise_or_log(error, f'the save to {target.name}')
            raise _NotSavedError from error
        return target

    def _unlock(self, target: CheckpointFolder) -> None:
        if self.run.collective.rank == 0:
            target.unlock()

    def _remember(self, committed: CommittedCheckpoint) -> None:
        self._committed = committed


class _NotSavedError(Exception):
    """A save has failed, and why was logged."""


class _Unsaved:
    """A tokenizer that V1 does not take for one that it has to save, which it does after the commit."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)
