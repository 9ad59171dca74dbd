"""MMEngine's hook: ``custom_hooks = [dict(type='HFCheckpointHook')]``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODEL_WRAPPERS

from xhf_hooks.errors import XhfError
from xhf_hooks.exporters.xtuner.chat_template import tokenizer_for_run
from xhf_hooks.exporters.xtuner.reward import has_head
from xhf_hooks.hooks.averaged_weights import choose_weights
from xhf_hooks.hooks.best import BestMetric, BestSave, best_of_earlier_runs
from xhf_hooks.hooks.schedule import check_schedule, counts_epochs, resolve_schedule
from xhf_hooks.options import HookOptions
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.saves.manager import CheckpointManager, RunFrontend
from xhf_hooks.saves.telemetry import RunLog, scalars
from xhf_hooks.saves.unwrap import unwrap


@HOOKS.register_module(force=True)  # replaces the function of the package that imports this module on demand
class HFCheckpointHook(HookOptions, RunFrontend, Hook):
    """Saves the model as a Hugging Face folder during training, at any DeepSpeed ZeRO stage.

    Before the first step it plans a save from metadata and raises an error if the save could not work. If a save fails
    later, the error is logged and training goes on. docs/options.md explains the options.

    Examples:
        >>> custom_imports = dict(imports=['xhf_hooks'])
        >>> custom_hooks = [dict(type='HFCheckpointHook')]
    """

    priority = 95  # after CheckpointHook (90)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._best = None if self.save_best is None else BestMetric(self.save_best, self.rule)

    def before_train(self, runner: Any) -> None:
        """Check that saves will work. Runs on: all ranks.

        Raises:
            XhfError: A save would fail. The same on every rank.
        """
        self.close()
        unwrapped = unwrap(runner.model, _wrappers())
        log = RunLog(runner.logger, 'HFCheckpointHook')
        self._schedule = resolve_schedule(runner, self.interval, self.by_epoch)
        self._in_epochs = self._schedule.by_epoch and counts_epochs(runner)
        saves_anyway = self.save_last or self._best is not None or bool(self.save_on_signal)
        check_schedule(runner, self._schedule, log, saves_anyway=saves_anyway)
        unwrapped = choose_weights(unwrapped, runner.hooks, self, ema=self.ema, log=log)
        if has_head(unwrapped.model):
            unwrapped = replace(unwrapped, reward_token_id=runner.cfg.get('reward_token_id'))
        self._saves = CheckpointManager(
            unwrapped,
            Path(self.out_dir or Path(runner.log_dir, 'hf_model')),
            self,
            log,
            run=runner,
            suffixes=[] if self._best is None else self._best.suffixes(),
            on_committed=partial(self._visualize, runner),
            on_result=lambda step, numbers: runner.visualizer.add_scalars(numbers, step=step.iteration),
        )
        self._saves.prepare(
            runner.cfg.get('tokenizer'),
            when=None if self._schedule.interval <= 0 else str(self._schedule),
            sweep=Path(runner.work_dir) if self.out_dir is None else None,
            finish_tokenizer=partial(tokenizer_for_run, cfg=runner.cfg),
        )
        self._log = log
        if self._best is not None:
            self._learn_of_best(runner)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        done = runner.iter + 1
        self._saves.look()
        schedule = self._schedule
        if not schedule.by_epoch and self.every_n_train_iters(runner, schedule.interval, schedule.save_begin):
            self._saves.save(Step('iter', done, done))
        self._saves.save_if_asked(Step('iter', done, done))

    def after_train_epoch(self, runner: Any) -> None:
        schedule = self._schedule
        if schedule.by_epoch and self.every_n_epochs(runner, schedule.interval, schedule.save_begin):
            self._saves.save(self._step(runner, runner.epoch + 1))

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        if self._saves is None:
            return
        if self._best is not None and metrics:
            self._save_if_best(runner, metrics)
        self._saves.save_if_asked(Step('iter', runner.iter, runner.iter), at_once=True)

    def after_train(self, runner: Any) -> None:
        try:
            self._saves.collect()
            if self.save_last and self._saves.saved_at != runner.iter:
                self._saves.save(self._step(runner, runner.epoch))
                self._saves.collect()
            self._saves.finish(self._step(runner, runner.epoch))
        finally:
            self.close()

    def _save_if_best(self, runner: Any, metrics: dict[str, float]) -> None:
        if self._saves.must_tell_after:
            self._saves.collect()  # whether the last best save succeeded decides what the best score is
        try:
            improved = self._best.improved(metrics, runner.message_hub)
        except XhfError as error:
            self._saves.handle(error, 'comparing scores')
            return
        for metric, score in improved.items():
            target = self._saves.others[self._best.suffix(metric)]
            remember = partial(self._remember, runner, metric, score)
            facts = self._best.facts(metric, score)
            self._saves.save(Step('iter', runner.iter, runner.iter), target, after=remember, facts=facts)

    def _learn_of_best(self, runner: Any) -> None:
        """Read the scores of earlier best saves, since the resumed checkpoint may be older. Runs on: all ranks."""
        collective, hub, earlier = self._saves.collective, runner.message_hub, list[BestSave]()
        try:
            with collective.stage('preflight'):
                if collective.rank == 0:
                    earlier = [BestSave.described_by(*found) for found in self._saves.manifests_of_others()]
                    earlier += best_of_earlier_runs(hub)
            for line in self._best.begin(self._saves.newest.final, collective.broadcast(earlier), hub):
                self._log.info(line)
        except XhfError:
            self.close()
            raise

    def _remember(self, runner: Any, metric: str, score: float) -> None:
        """Record the score of a committed best save."""
        self._best.remember(metric, score, runner.message_hub)
        self._log.info(f'best {metric} so far, {score:.4f}')

    def _visualize(self, runner: Any, committed: CommittedCheckpoint) -> None:
        if self._saves.collective.rank == 0:
            runner.visualizer.add_scalars(scalars(committed), step=committed.step.iteration)

    def _step(self, runner: Any, epochs: int) -> Step:
        """The step of a save, in epochs if both the schedule and the train loop count epochs."""
        return Step('epoch', epochs, runner.iter) if self._in_epochs else Step('iter', runner.iter, runner.iter)


def _wrappers() -> tuple[type, ...]:
    """All model wrappers registered with MMEngine and its child scopes. Each holds the model as ``module``."""
    found = list(MODEL_WRAPPERS.module_dict.values())
    for child in MODEL_WRAPPERS.children.values():
        found += child.module_dict.values()
    return tuple(found)
