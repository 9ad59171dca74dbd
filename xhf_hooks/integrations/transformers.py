"""The callback for ``transformers.Trainer`` and libraries built on it (TRL, Axolotl)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from xhf_hooks.errors import OptionError
from xhf_hooks.options import CallbackOptions, explains, require_apart
from xhf_hooks.planning.types import Step
from xhf_hooks.saves.frontend import RunFrontend
from xhf_hooks.saves.manager import CheckpointManager
from xhf_hooks.saves.telemetry import RunLog, scalars, show
from xhf_hooks.saves.unwrap import Unwrapped, unwrap


@explains(CallbackOptions)
class HFCheckpointCallback(CallbackOptions, RunFrontend, TrainerCallback):
    """Save the model as a Hugging Face folder while Trainer trains it, at any DeepSpeed ZeRO stage.

    The same save as HFCheckpointHook's. It does not replace Trainer's own checkpoints, which are needed for resuming;
    ``save_strategy='no'`` in TrainingArguments turns those off.

    Trainer calls callbacks in the order in which they are given, and a save holds the weights that the model has when
    this one is called. So a callback that averages weights belongs before it.

    Examples:
        >>> trainer = Trainer(..., callbacks=[HFCheckpointCallback()])
    """

    logger = logging.getLogger('xhf_hooks')

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check that saves will work. Runs on: all ranks.

        Raises:
            XhfError: Saves will not work; the same on every rank.
        """
        self.close()
        if args.process_index == 0:
            show(self.logger, logging.INFO if args.log_level == 'passive' else args.get_process_log_level())
        log = RunLog(self.logger, 'HFCheckpointCallback', only_errors=args.process_index != 0)
        self._check_schedule(args, state, log)
        out_dir = Path(self.out_dir or Path(args.output_dir, 'hf_model'))
        require_apart(out_dir, Path(args.output_dir), 'the output_dir of Trainer')
        self._saves = CheckpointManager(
            _unwrap(kwargs['model'], kwargs.get('optimizer'), args),
            out_dir,
            self,
            log,
            when=self._when(args, state),
            tokenizer=kwargs.get('processing_class'),
            run=state,
            on_committed=lambda committed: _add_to_history(state, committed.step, scalars(committed)),
            on_result=partial(_add_to_history, state),
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.saves.look()
        every = self.save_steps or state.save_steps
        if self.save_strategy == 'steps' and state.global_step % every == 0:
            self._save(state, control)
        self.saves.save_if_asked(_step(state))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._saves is not None:
            self._saves.save_if_asked(_step(state), at_once=True)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.save_strategy == 'epoch':
            self._save(state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.save_strategy is None:
            self._save(state, control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        try:
            # load_best_model_at_end has replaced the weights
            self.saves.finish(_step(state), weights_are_others=args.load_best_model_at_end)
        finally:
            self.close()

    def _save(self, state: TrainerState, control: Any) -> None:
        # Between this step, if it is the last one, and on_train_end, other callbacks may put averaged weights in place
        self.saves.save(_step(state), remember_weights=control.should_training_stop)

    def _check_schedule(self, args: TrainingArguments, state: TrainerState, log: RunLog) -> None:
        every = self.save_steps or state.save_steps
        is_late = self.save_strategy == 'steps' and every > state.max_steps
        if (is_late or self._when(args, state) is None) and not self.save_last and not self.save_on_signal:
            expected = "'steps' or 'epoch' before training ends, or save_last: otherwise nothing is ever saved"
            raise OptionError('save_strategy', expected, self.save_strategy)
        if is_late:
            log.warning(f'save_steps: training ends after {state.max_steps} steps, before {every}; set a smaller one')

    def _when(self, args: TrainingArguments, state: TrainerState) -> str | None:
        if self.save_strategy == 'steps':
            return f'every {self.save_steps or state.save_steps} steps'
        if self.save_strategy == 'epoch':
            return 'every epoch'
        if self.save_strategy == 'no' or args.save_strategy == 'no':
            return None
        return 'whenever Trainer saves'


def _step(state: TrainerState) -> Step:
    return Step('iter', state.global_step, state.global_step, state.epoch)


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
    """Trainer passes callbacks the model from inside DeepSpeed's engine, and the engine's optimizer in a wrapper."""
    found = unwrap(model)
    plugin = getattr(args, 'deepspeed_plugin', None)
    if plugin is None:
        return found
    facts = {'engine': 'deepspeed', 'zero_stage': plugin.zero_stage}
    return Unwrapped(found.model, found.root, facts, engine=optimizer)
