"""Which validation results are the best so far, by the rules of MMEngine's CheckpointHook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmengine.hooks import CheckpointHook
from mmengine.logging import MessageHub

from xhf_hooks.errors import OptionError


class BestMetric(CheckpointHook):
    """The part of CheckpointHook that understands ``save_best`` and ``rule``; it saves nothing itself.

    Scores live in the message hub, which MMEngine's checkpoints carry, so they survive a resume.
    """

    def __init__(self, save_best: str | list[str], rule: str | list[str] | None) -> None:
        if not save_best:
            raise OptionError('save_best', 'None, a metric or several', save_best)
        try:
            super().__init__(interval=-1, save_best=save_best, rule=rule)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise OptionError('save_best/rule', f'what CheckpointHook accepts ({error})', (save_best, rule)) from error

    def improved(self, metrics: Mapping[str, Any], hub: MessageHub) -> dict[str, float]:
        """Metric to score, of those that are better than any before.

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
        for metric, rule in zip(self.key_indicators, self.rules, strict=True):
            if metric not in metrics:
                raise OptionError('save_best', f'one of the validation results {sorted(metrics)}', metric)
            best = hub.runtime_info.get(_score_key(metric), self.init_value_map[rule])
            if metrics[metric] is not None and self.is_better_than[metric](metrics[metric], best):
                better[metric] = metrics[metric]
        return better

    def remember(self, metric: str, score: float, hub: MessageHub) -> None:
        """The save of this score is committed."""
        hub.update_info(_score_key(metric), score)

    def folder_suffixes(self) -> list[str]:
        """All that :meth:`folder_suffix` can give."""
        return [self.folder_suffix(metric) for metric in self.key_indicators]

    def folder_suffix(self, metric: str) -> str:
        """``best``, or with several metrics ``best_<metric>``."""
        return 'best' if len(self.key_indicators) == 1 else f'best_{metric}'.replace('/', '_')


def _score_key(metric: str) -> str:
    return f'hf_checkpoint_best_score_{metric}'
