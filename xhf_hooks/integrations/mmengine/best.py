"""save_best: which model is the best so far, also of the runs that this one was resumed from."""

from __future__ import annotations

import contextlib
import glob
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.hooks import CheckpointHook
from mmengine.logging import MessageHub

from xhf_hooks.errors import OptionError, TargetError
from xhf_hooks.files.manifest import describe_best
from xhf_hooks.format.index import MANIFEST_NAME

#: Key in the message hub: folders of the newest saves of this run and of the runs that it was resumed from.
_FOLDERS_KEY = 'hf_checkpoint_folders'


@dataclass(frozen=True)
class BestSave:
    """A committed best save.

    Attributes:
        metric: None if the manifest has no score.
        where: Its folder or URL.
        suffix: The suffix of its name, if a save of this run would replace it; see :meth:`BestMetric.suffix`.
    """

    where: str
    metric: str | None
    score: float
    suffix: str | None

    @classmethod
    def described_by(cls, manifest: bytes, where: str, suffix: str | None = None) -> BestSave:
        """The best save that a manifest describes."""
        try:
            best = json.loads(manifest)['best']
            metric, score = str(best['metric']), float(best['score'])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            metric, score = '', math.nan
        return cls(where, None if math.isnan(score) else metric, score, suffix)


def best_of_resumed_runs(hub: MessageHub) -> list[BestSave]:
    """The best saves of the runs that this run was resumed from. They stay where they are. Runs on: rank 0."""
    found = []
    for folder in map(Path, hub.runtime_info.get(_FOLDERS_KEY, ())):
        for path in sorted(folder.parent.glob(f'{glob.escape(folder.name)}_best*/{MANIFEST_NAME}')):
            with contextlib.suppress(OSError):
                found.append(BestSave.described_by(path.read_bytes(), str(path.parent)))
    return found


class BestMetric(CheckpointHook):
    """The part of CheckpointHook that understands ``save_best`` and ``rule``; it saves nothing itself.

    Scores are recorded in the message hub, which is part of MMEngine's checkpoints, and in the manifests of the saves.
    A checkpoint may be older than the best save, so the better of the two scores counts.
    """

    def __init__(self, save_best: str | list[str], rule: str | list[str] | None) -> None:
        if not save_best:
            raise OptionError('save_best', 'None, a metric or a list of metrics', save_best)
        try:
            super().__init__(interval=-1, save_best=save_best, rule=rule)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            if rule is None and isinstance(error, ValueError):  # which the name of the metric does not show
                raise OptionError('rule', f"'greater' or 'less', for the metric {save_best!r}", rule) from None
            raise OptionError('save_best/rule', f'what CheckpointHook accepts ({error})', (save_best, rule)) from error
        self._earlier: Sequence[BestSave] = ()
        self._blocked: set[str] = set()  # metrics whose best saves would replace a folder that this run may not replace
        if len(set(self.suffixes())) < len(self.key_indicators):  # no metric may replace the best save of another
            raise OptionError(
                'save_best', "metrics that differ in more than '/' and '_', which name folders", save_best
            )

    def take_over_scores(self, newest: Path, earlier: Sequence[BestSave], hub: MessageHub) -> list[str]:
        """Take over the scores of earlier saves; returns log messages. Runs on: rank 0.

        Args:
            newest: The folder of the newest save, for the runs that are resumed from this one.

        Raises:
            TargetError: A save that would be replaced belongs to another metric, or has no known score.
        """
        self._earlier = earlier
        folders = [*hub.runtime_info.get(_FOLDERS_KEY, ()), str(newest)]
        hub.update_info(_FOLDERS_KEY, [*dict.fromkeys(folders)])
        if self.key_indicators == ['auto']:  # the first validation determines the metric
            return []
        for metric in self.key_indicators:
            self._take_over(metric, hub)
        known = [metric for metric in self.key_indicators if _score_key(metric) in hub.runtime_info]
        return [f'best {metric} so far: {float(self._best(metric, hub)):.4f}' for metric in known]

    def improved(self, metrics: Mapping[str, Any], hub: MessageHub, warn: Callable[[str], object]) -> dict[str, float]:
        """The metrics that have improved, with their scores. Runs on: rank 0; those of other ranks may differ.

        Args:
            warn: Called if best saves by a metric that :meth:`take_over_scores` did not know yet would replace a folder
                that an earlier run left. There are none then, and training goes on: it may have taken hours until here.

        Raises:
            OptionError: A metric of ``save_best`` is not among the results.
        """
        if self.key_indicators == ['auto']:
            first = next(iter(metrics))
            try:
                self._init_rule(self.rules, [first])
            except ValueError as error:
                raise OptionError('rule', f"'greater' or 'less' for the metric {first!r}", None) from error
        better = {}
        for metric in self.key_indicators:
            if metric not in metrics:
                raise OptionError('save_best', f'one of the validation results {sorted(metrics)}', metric)
            try:
                self._take_over(metric, hub)
            except TargetError as error:
                if metric not in self._blocked:
                    self._blocked.add(metric)
                    warn(f'save_best: this run makes no best saves by the metric {metric!r}: {error}, for the next run')
                continue
            if metrics[metric] is not None and self.is_better_than[metric](metrics[metric], self._best(metric, hub)):
                better[metric] = float(metrics[metric])
        return better

    def remember(self, metric: str, score: float, hub: MessageHub) -> None:
        """Record the score of a committed save."""
        hub.update_info(_score_key(metric), score)

    def manifest_fields(self, metric: str, score: float) -> dict[str, Any]:
        """The fields of the manifest about the score of a save."""
        return describe_best(metric, score, self._rule(metric) == 'greater')

    def suffixes(self) -> list[str]:
        """All possible results of :meth:`suffix`."""
        return [self.suffix(metric) for metric in self.key_indicators]

    def suffix(self, metric: str) -> str:
        """The suffix of the folder's name: ``best``, or ``best_<metric>`` if there are several metrics."""
        return 'best' if len(self.key_indicators) == 1 else f'best_{metric}'.replace('/', '_')

    def _take_over(self, metric: str, hub: MessageHub) -> None:
        """Record the best score of earlier saves, unless the message hub's is better."""
        for save in self._earlier:
            is_replaced = save.suffix == self.suffix(metric)
            if is_replaced and save.metric not in (metric, None):
                raise TargetError(
                    f'{save.where} holds the best save by {save.metric!r}, and a save by {metric!r} would replace it. '
                    f'Move it away, or set out_dir'
                )
            if is_replaced and save.metric is None and _score_key(metric) not in hub.runtime_info:
                raise TargetError(f'{save.where} has no recorded score to compare with. Move it away, or set out_dir')
            if save.metric == metric and not self.is_better_than[metric](self._best(metric, hub), save.score):
                self.remember(metric, save.score, hub)

    def _best(self, metric: str, hub: MessageHub) -> float:
        return hub.runtime_info.get(_score_key(metric), self.init_value_map[self._rule(metric)])

    def _rule(self, metric: str) -> str:
        return self.rules[self.key_indicators.index(metric)]


def _score_key(metric: str) -> str:
    return f'hf_checkpoint_best_score_{metric}'
