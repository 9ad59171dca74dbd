"""The callback for ``transformers.Trainer`` and libraries built on it (TRL, Axolotl)."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from xhf_hooks.errors import OptionError, XhfError
from xhf_hooks.files.manifest import describe_best
from xhf_hooks.options import CallbackOptions, documents_options, require_apart
from xhf_hooks.planning.types import Step
from xhf_hooks.ranks.collective import Collective
from xhf_hooks.runs.frontend import RunFrontend
from xhf_hooks.runs.run import Run
from xhf_hooks.runs.run_info import RunInfo
from xhf_hooks.runs.telemetry import RunLog, scalars, show
from xhf_hooks.runs.unwrap import Unwrapped, unwrap
from xhf_hooks.system.versions import require_packages


@documents_options(CallbackOptions)
class HFCheckpointCallback(RunFrontend, TrainerCallback):
    """Save the model as a Hugging Face folder while Trainer trains it, at any DeepSpeed ZeRO stage.

    The same save as HFCheckpointHook's. It does not replace Trainer's own checkpoints, which are needed for resuming;
    ``save_strategy='no'`` in TrainingArguments turns those off.

    Trainer calls callbacks in the order in which they are given, and a save holds the weights that the model has when
    this one is called. So a callback that averages weights belongs before it.

    Examples:
        >>> trainer = Trainer(..., callbacks=[HFCheckpointCallback()])
    """

    logger = logging.getLogger('xhf_hooks')

    def __init__(self, out_dir: str | Path | None = None, **options: Any) -> None:
        self.options = CallbackOptions.of(out_dir, **options)
        self._saved_best_metric: float | None = None  # Trainer's best score at the last save of its best model

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check that saves will work. Runs on: all ranks.

        Raises:
            XhfError: Saves will not work; the same on every rank.
        """
        self.close()
        if args.process_index == 0:
            show(self.logger, logging.INFO if args.log_level == 'passive' else args.get_process_log_level())
        log = RunLog(self.logger, 'HFCheckpointCallback', only_errors=args.process_index != 0)
        self._saved_best_metric = state.best_metric
        self._check_schedule(args, state, log)
        out_dir = Path(self.options.out_dir or Path(args.output_dir, 'hf_model'))
        require_apart(out_dir, Path(args.output_dir), 'the output_dir of Trainer')
        if args.push_to_hub and out_dir.absolute().is_relative_to(Path(args.output_dir).absolute()):
            log.warning(
                f'push_to_hub: Trainer uploads all of {args.output_dir}, with {out_dir} and with files of saves that '
                f'are being written; set out_dir to a folder outside of it'
            )
        options, collective = self.options, None
        if state.is_hyper_param_search:  # each trial trains another model
            collective, options = Collective.connect(), copy.copy(options)
            trial = state.trial_name or collective.from_rank0('preflight', partial(_make_trial_folder, out_dir.parent))
            out_dir = out_dir.parent / trial / out_dir.name
            options.upload_to = None if options.upload_to is None else f'{options.upload_to}/{trial}'
        self._run = Run.open(
            RunInfo(
                _unwrap(kwargs['model'], kwargs.get('optimizer'), args),
                out_dir,
                self._when(args, state),
                kwargs.get('processing_class'),
                trainer=state,
                is_resumed=state.global_step > 0,
                extra_suffixes=['best'] if self._saves_best(args) else [],
            ),
            options,
            log,
            on_committed=lambda committed: _add_to_history(state, committed.step, scalars(committed)),
            on_result=partial(_add_to_history, state),
            collective=collective,
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.run.poll_background()
        every = self.options.save_steps or state.save_steps
        is_due = self.options.save_strategy == 'steps' and state.global_step % every == 0
        if is_due or self.options.is_saved_at(state.global_step):
            self._save(args, state, control)
        self.run.save_if_requested(_step(state), remember_weights=_may_reload(args, control))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.save_if_requested(_step(state), vote_now=True, remember_weights=_may_reload(args, control))

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.options.save_strategy == 'epoch':
            self._save(args, state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.options.save_strategy is None:
            self._save(args, state, control, is_best=self._saves_best(args) and self._has_improved(state))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        try:
            self.run.finish(_step(state), reloaded_step=_reloaded_step(args, state))
        finally:
            self.close()

    def _save(self, args: TrainingArguments, state: TrainerState, control: Any, *, is_best: bool = False) -> None:
        target, fields = None, None
        if is_best:
            target, metric = self.run.extra_targets['best'], str(args.metric_for_best_model)
            fields = describe_best(metric, state.best_metric or 0.0, bool(args.greater_is_better))
        self.run.save(_step(state), target, manifest_fields=fields, remember_weights=_may_reload(args, control))

    def _saves_best(self, args: TrainingArguments) -> bool:
        """Whether this callback saves when Trainer does, and Trainer saves each new best model."""
        return self.options.save_strategy is None and args.save_strategy == 'best'

    def _has_improved(self, state: TrainerState) -> bool:
        """Whether Trainer saves since the model is the best so far, and not since another callback asked for it.

        Runs on: all ranks. Rank 0 decides. If ranks cannot agree on that, the model is not known to be the best.
        """
        improved, self._saved_best_metric = state.best_metric != self._saved_best_metric, state.best_metric
        try:
            with self.run.collective.stage('comparing scores'):
                self.run.ensure_connected()
            return self.run.collective.from_rank0('comparing scores', lambda: improved)
        except XhfError as error:
            self.run.raise_or_log(error, 'comparing scores')
            return False

    def _check_schedule(self, args: TrainingArguments, state: TrainerState, log: RunLog) -> None:
        every = self.options.save_steps or state.save_steps
        is_late = self.options.save_strategy == 'steps' and every > state.max_steps
        has_other_saves = self._saves_best(args) or self.options.has_unscheduled_saves(state.max_steps)
        if (is_late or self._when(args, state) is None) and not has_other_saves:
            expected = "'steps' or 'epoch' before training ends, or save_last: otherwise nothing is ever saved"
            raise OptionError('save_strategy', expected, self.options.save_strategy)
        if is_late:
            log.warning(f'save_steps: training ends after {state.max_steps} steps, before {every}; set a smaller one')

    def _when(self, args: TrainingArguments, state: TrainerState) -> str | None:
        if self.options.save_strategy == 'steps':
            return f'every {self.options.save_steps or state.save_steps} steps'
        if self.options.save_strategy == 'epoch':
            return 'every epoch'
        if self.options.save_strategy == 'no' or args.save_strategy == 'no' or self._saves_best(args):
            return None  # at best saves, which the log names besides
        return 'whenever Trainer saves'


def _step(state: TrainerState) -> Step:
    return Step.of_iteration(state.global_step, state.epoch)


def _may_reload(args: TrainingArguments, control: Any) -> bool:
    """Whether the model may get other weights between this step and ``on_train_end``.

    Trainer may load the best ones (early stopping has not decided yet whether this step is the last), and other
    callbacks may put averaged ones in place after the last step.
    """
    return control.should_training_stop or args.load_best_model_at_end


def _reloaded_step(args: TrainingArguments, state: TrainerState) -> Step | None:
    """The step whose weights Trainer reloaded at the end of training; None if it did not."""
    if not args.load_best_model_at_end or state.best_model_checkpoint is None:
        return None
    found = re.fullmatch(rf'{PREFIX_CHECKPOINT_DIR}-(\d+)', Path(state.best_model_checkpoint).name)
    if found is None:
        return None
    number = int(found[1])
    epochs = [entry['epoch'] for entry in state.log_history if entry.get('step') == number and 'epoch' in entry]
    return Step.of_iteration(number, epochs[-1] if epochs else None)


def _make_trial_folder(parent: Path) -> str:
    """Make the first of the folders ``run-0``, ``run-1``, ... that is not there; returns its name. Runs on: rank 0.

    Trainer names the folders of its checkpoints so, by the number of the trial, unless ``hyperparameter_search`` was
    given an ``hp_name``. Callbacks get that name, but not the number.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        with contextlib.suppress(FileExistsError):
            (parent / f'run-{number}').mkdir()
            break
    return f'run-{number}'


def _add_to_history(state: TrainerState, step: Step, numbers: Mapping[str, float]) -> None:
    """Add the numbers of a save to Trainer's ``log_history``, as an entry like its own. Runs on: all ranks.

    Trainer's summary of training, which it adds before ``on_train_end``, stays the last entry.
    """
    if not state.is_world_process_zero:
        return
    entry = {**numbers, 'epoch': step.epochs_done, 'step': step.iteration}
    history = state.log_history
    summaries = [place for place, logged in enumerate(history) if 'train_runtime' in logged]
    history.insert(summaries[-1] if summaries else len(history), entry)


def _unwrap(model: Any, optimizer: Any, args: TrainingArguments) -> Unwrapped:
    """Trainer gives callbacks no DeepSpeed engine, only the model in it and its optimizer, in a wrapper.

    The optimizer serves in place of the engine: by either, masters that cannot be read are refused.
    """
    found = unwrap(model)
    plugin = getattr(args, 'deepspeed_plugin', None)
    if plugin is None:
        return found
    require_packages('deepspeed')
    manifest_fields = {'engine': 'deepspeed', 'zero_stage': plugin.zero_stage}
    return Unwrapped(found.model, found.root, manifest_fields, engine=optimizer)
