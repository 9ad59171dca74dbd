"""MMEngine's hook: ``custom_hooks = [dict(type='xhf_hooks.HFCheckpointHook')]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.model import is_model_wrapper
from torch import nn

from xhf_hooks.errors import AgreedError, XhfError
from xhf_hooks.format.text import error_text
from xhf_hooks.integrations.mmengine.averaged_weights import choose_weights
from xhf_hooks.integrations.mmengine.best import BestMetric, BestSave, best_of_resumed_runs
from xhf_hooks.integrations.mmengine.schedule import (
    Schedule,
    check_schedule,
    counts_epochs,
    resolve_schedule,
    validates,
)
from xhf_hooks.offline.model.run_config import RunConfig
from xhf_hooks.offline.model.starting_weights import StartingWeights, checkpoints_loaded_over
from xhf_hooks.options import HookOptions, documents_options, require_apart
from xhf_hooks.planning.types import CommittedCheckpoint, Step
from xhf_hooks.registry import register_hook
from xhf_hooks.runs.frontend import RunFrontend
from xhf_hooks.runs.run import Run
from xhf_hooks.runs.run_info import RunInfo
from xhf_hooks.runs.telemetry import RunLog, scalars
from xhf_hooks.runs.unwrap import unwrap
from xhf_hooks.system.child_processes import SignalProofChildren


@documents_options(HookOptions)
class HFCheckpointHook(RunFrontend, Hook):
    """Saves the model as a Hugging Face folder during training, at any DeepSpeed ZeRO stage.

    Before the first step it plans a save from metadata and raises an error if the save could not work. If a save fails
    later, the error is logged and training goes on (``on_error``). The property ``run`` (the open :class:`.Run`; an
    error if training has not begun) and ``close`` come from :class:`.RunFrontend`.

    Examples:
        >>> custom_hooks = [dict(type='xhf_hooks.HFCheckpointHook')]
    """

    priority = 95  # after CheckpointHook (90)
    _saved_to: Path | None = None  # out_dir of this hook in an earlier training of the same runner

    def __init__(self, out_dir: str | Path | None = None, **options: Any) -> None:
        self.options = HookOptions.of(out_dir, **options)
        self._schedule = Schedule(-1, by_epoch=False)  # until training begins
        self._best = self._best_metric()  # now, so that a wrong option is an error when the hook is built
        self._scores: dict[str, tuple[str, float]] = {}  # metric and score of a best save, by the target's name
        self._has_compared = False
        # Data loader workers must survive a save signal that is sent to the whole process group. They may start before
        # before_train: MMEngine builds this hook, then an IterBasedTrainLoop, which starts them when it is built. So
        # this cannot wait until before_train
        signals = [Signals[name] for name in self.options.save_on_signal or ()]
        self._children = SignalProofChildren.start(signals) if signals else None

    def before_train(self, runner: Any) -> None:
        """Check that saves will work. Runs on: all ranks.

        Raises:
            XhfError: A save would fail. The same on every rank.
        """
        self.close()
        options = self.options
        log = RunLog(runner.logger, 'HFCheckpointHook')
        out_dir = Path(options.out_dir or Path(runner.log_dir, 'hf_model'))
        # A save replaces out_dir as a whole: it must not be work_dir, nor hold it. Inside work_dir it is fine
        require_apart(out_dir, Path(runner.work_dir), 'the work_dir of the run')
        _warn_about_hooks_of_this_name(runner, log)
        self._schedule = resolve_schedule(runner, options.interval, options.by_epoch)
        has_scores = options.save_best is not None and validates(runner)
        self._best = self._best_metric() if has_scores else None  # anew: it keeps the scores of one training
        self._scores, self._has_compared = {}, False
        has_other_saves = has_scores or options.has_unscheduled_saves(runner.max_iters)
        will_miss_scores = options.save_best is not None and not has_scores
        check_schedule(runner, self._schedule, log, has_other_saves, will_miss_scores=will_miss_scores)
        live = replace(unwrap(runner.model, is_model_wrapper), run_config=runner.cfg)
        unwrapped = choose_weights(live, runner.hooks, self, ema=options.ema, log=log)
        info = RunInfo(
            unwrapped,
            out_dir,
            schedule=None if self._schedule.interval <= 0 else str(self._schedule),
            tokenizer=runner.cfg.get('tokenizer'),
            trainer=runner,
            timestamp=runner.timestamp,
            # Leftovers of killed runs next to the target are always removed. Without out_dir each run saves into a
            # folder of its own in work_dir, so leftovers of earlier runs lie in their folders: search those, too
            remove_leftovers_in=Path(runner.work_dir) if options.out_dir is None else None,
            # Another run that began in the same second has the same timestamped folder: don't replace its saves
            may_replace=options.out_dir is not None or out_dir == self._saved_to,
            is_resumed=runner.iter > 0,
            extra_suffixes=[] if self._best is None else self._best.suffixes(),
        )
        self._run = Run.open(
            info,
            options,
            log,
            on_committed=partial(self._note_committed, runner),
            on_result=partial(self._visualize, runner),
        )
        self._warn_about_starting_weights(unwrapped.model, runner.cfg)
        self._saved_to = out_dir
        if self._children is not None:
            self._children.close()  # from now on the run protects data loader workers from these signals
        if self._best is not None:
            self._learn_of_best(self._best, runner.message_hub)

    def _warn_about_starting_weights(self, model: nn.Module, cfg: Mapping[str, Any]) -> None:
        """Tell of an adapter that is saved without weights that the config loads over the base. Runs on: all ranks."""
        run, preparation = self.run, self.run.preparation
        if run.collective.rank or not any(file.is_of_adapter for file in preparation.plan.files):
            return
        try:
            starting_weights = StartingWeights.find(model, checkpoints_loaded_over(RunConfig('the config', cfg)))
            notes = starting_weights.notes_on_adapters(model, preparation.exporter.base_model.name)
        except Exception as error:  # of any type, from a file of any kind: other ranks go on, and saves work
            notes = [f'could not find out whether weights were loaded over those of the base: {error_text(error)}']
        for note in notes:
            run.log.warning(note)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        step = Step.of_iteration(runner.iter + 1)
        self.run.poll_background()
        schedule = self._schedule
        is_due = not schedule.by_epoch and self.every_n_train_iters(runner, schedule.interval, schedule.save_begin)
        if is_due or self.options.is_saved_at(step.iteration):
            self.run.save(step)
        self.run.save_if_requested(step)

    def after_train_epoch(self, runner: Any) -> None:
        schedule = self._schedule
        if schedule.by_epoch and self.every_n_epochs(runner, schedule.interval, schedule.save_begin):
            self.run.save(self._step(runner, runner.epoch + 1))

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        if self._run is None:  # a validation without training
            return
        if self._best is not None:
            self._save_if_best(self._best, runner, metrics or {})
        self.run.save_if_requested(Step.of_iteration(runner.iter), vote_now=True)

    def after_train(self, runner: Any) -> None:
        try:
            self.run.finish(self._step(runner, runner.epoch))
        finally:
            self.close()

    def _best_metric(self) -> BestMetric | None:
        return None if self.options.save_best is None else BestMetric(self.options.save_best, self.options.rule)

    def _save_if_best(self, best: BestMetric, runner: Any, metrics: Mapping[str, Any]) -> None:
        """Save the model for each metric that has improved. Runs on: all ranks.

        Rank 0 decides: the validation loss, for one, is not reduced over ranks (mmengine ``runner/loops.py``).

        Raises:
            AgreedError: The first validation cannot be compared, for example since it lacks the metric. Raised even
                with ``on_error='continue'``, as CheckpointHook does.
        """
        run = self.run

        def compare() -> list[tuple[str, float, str, dict[str, Any]]]:
            if not metrics:
                run.log.warning('save_best: this validation has no results to compare')
                return []
            improved = best.improved(metrics, runner.message_hub, run.log.warning)
            return [
                (metric, score, best.suffix(metric), best.manifest_fields(metric, score))
                for metric, score in improved.items()
            ]

        if run.saving_to in run.extra_targets.values():
            # A best save is in flight: its score is remembered after its commit, before new scores are compared
            run.wait_for_background_save()
        try:
            with run.collective.stage('comparing scores'):
                run.ensure_connected()
            improved = run.collective.from_rank0('comparing scores', compare)
        except XhfError as error:
            if isinstance(error, AgreedError) and not self._has_compared:
                raise
            run.raise_or_log(error, 'comparing scores')
            return
        self._has_compared = True
        for metric, score, suffix, manifest_fields in improved:
            target = run.extra_targets[suffix]
            self._scores[target.name] = metric, score
            run.save(Step.of_iteration(runner.iter), target, manifest_fields=manifest_fields)

    def _note_committed(self, runner: Any, committed: CommittedCheckpoint) -> None:
        """Record the score of a best save, and show the cost of any save to MMEngine's visualizer."""
        if self._best is not None and committed.target_name in self._scores:
            metric, score = self._scores.pop(committed.target_name)
            self._best.remember(metric, score, runner.message_hub)
            self.run.log.info(f'best {metric} so far, {score:.4f}')
        self._visualize(runner, committed.step, scalars(committed))

    def _learn_of_best(self, best: BestMetric, message_hub: MessageHub) -> None:
        """Read the scores of earlier best saves from their manifests. Runs on: all ranks.

        MMEngine's checkpoint holds a best score, too (in the message hub), but may be older than the best save.
        """
        run = self.run
        try:
            with run.collective.stage('preflight'):
                if run.collective.rank == 0:
                    earlier = [
                        BestSave.described_by(manifest, str(target.path), suffix)
                        for suffix, target in run.extra_targets.items()
                        if (manifest := target.newest_manifest()) is not None
                    ]
                    # Of the runs that this one was resumed from: the message hub has the paths of their folders
                    earlier += best_of_resumed_runs(message_hub)
                    # Makes these the scores to beat, and adds this folder to the message hub, for runs resumed later
                    for line in best.take_over_scores(run.newest.path, earlier, message_hub):
                        run.log.info(line)
        except XhfError:
            self.close()
            raise

    def _visualize(self, runner: Any, step: Step, numbers: Mapping[str, float]) -> None:
        if self.run.collective.rank == 0:
            runner.visualizer.add_scalars(dict(numbers), step=step.iteration)

    def _step(self, runner: Any, epochs: int) -> Step:
        """The step of a save, in epochs if both the schedule and the train loop count epochs."""
        if self._schedule.by_epoch and counts_epochs(runner):
            return Step('epoch', epochs, runner.iter)
        return Step.of_iteration(runner.iter)


# `import xhf_hooks` has registered a function that imports this module when MMEngine builds the hook. From now on the
# class itself is registered
register_hook('HFCheckpointHook', HFCheckpointHook)


def _warn_about_hooks_of_this_name(runner: Any, log: RunLog) -> None:
    """Warn about other hooks with this name, which would run, too."""
    for kind in map(type, runner.hooks):
        if kind.__name__ == 'HFCheckpointHook' and not issubclass(kind, HFCheckpointHook):
            name = f'{kind.__module__}.{kind.__name__}'
            log.warning(f'custom_hooks also has {name}, and both run: remove it, this hook replaces it')
