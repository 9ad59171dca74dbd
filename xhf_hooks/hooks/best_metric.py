"""Finds the best validation results so far, by the rules of MMEngine's CheckpointHook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.hooks import CheckpointHook
from mmengine.logging import MessageHub

from xhf_hooks.errors import OptionError, TargetError
from xhf_hooks.hooks.best_folders import BestFolder, describe_best

#: In the message hub: the folders of the newest saves of this run and of those that it was resumed from.
_FOLDERS_KEY = 'hf_checkpoint_folders'
_NOWHERE = 'as the checkpoint says; no folder is known that holds it'


class BestMetric(CheckpointHook):
    """The part of CheckpointHook that understands ``save_best`` and ``rule``; it saves nothing itself.

    Scores are in the message hub, which MMEngine's checkpoints carry, and in the manifests of the folders. A checkpoint
    may be older than the best save, so the better score of both counts.
    """

    def __init__(self, save_best: str | list[str], rule: str | list[str] | None) -> None:
        if not save_best:
            raise OptionError('save_best', 'None, a metric or several', save_best)
        try:
            super().__init__(interval=-1, save_best=save_best, rule=rule)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise OptionError('save_best/rule', f'what CheckpointHook accepts ({error})', (save_best, rule)) from error
        self._known: Sequence[BestFolder] = ()
        self._newest: Path | str | None = None

    def begin(self, newest: Path | str, known: Sequence[BestFolder], hub: MessageHub) -> list[str]:
        """Learn of the best folders before training. Runs on: all ranks, with the same result.

        Args:
            newest: Folder of the newest save, or its name in a store; those of the best are named after it.
            known: Best folders beside it, and beside those of :func:`earlier_folders`.

        Returns:
            Log messages.

        Raises:
            TargetError: A folder that would be replaced is of another metric, or its score is not known.
        """
        self._newest, self._known = newest, known
        folders = [*earlier_folders(hub), *([newest] if isinstance(newest, Path) else [])]
        hub.update_info(_FOLDERS_KEY, [*dict.fromkeys(map(str, folders))])
        if self.key_indicators == ['auto']:  # the metric is told by the first validation
            return []
        return [line for metric in self.key_indicators for line in self._count_known(metric, hub)]

    def improved(self, metrics: Mapping[str, Any], hub: MessageHub) -> dict[str, float]:
        """The metrics that have improved, with their scores.

        Raises:
            OptionError: A metric of ``save_best`` is not among the results.
            TargetError: As :meth:`begin`, for a metric that was not known then.
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
            self._count_known(metric, hub)
            if metrics[metric] is not None and self.is_better_than[metric](metrics[metric], self._best(metric, hub)):
                better[metric] = metrics[metric]
        return better

    def remember(self, metric: str, score: float, hub: MessageHub) -> None:
        """The save of this score is committed."""
        hub.update_info(_score_key(metric), score)

    def facts(self, metric: str, score: float) -> dict[str, Any]:
        """For the manifest of the save with this score."""
        return describe_best(metric, score, self._rule(metric))

    def folder_suffixes(self) -> list[str]:
        """All that :meth:`folder_suffix` can give."""
        return [self.folder_suffix(metric) for metric in self.key_indicators]

    def folder_suffix(self, metric: str) -> str:
        """``best``, or with several metrics ``best_<metric>``."""
        return 'best' if len(self.key_indicators) == 1 else f'best_{metric}'.replace('/', '_')

    def _count_known(self, metric: str, hub: MessageHub) -> list[str]:
        """Put the better score of folders and message hub into the hub; returns log messages."""
        lines = self._check_own(metric, hub)
        holder = None
        for folder in self._known:
            if folder.metric == metric and not self.is_better_than[metric](self._best(metric, hub), folder.score):
                holder = folder
                self.remember(metric, folder.score, hub)
        if _score_key(metric) not in hub.runtime_info:
            return lines
        where = f'in {holder.path} (iteration {holder.iteration})' if holder else _NOWHERE
        return [*lines, f'the best {metric} so far is {float(self._best(metric, hub)):.4f}, {where}']

    def _check_own(self, metric: str, hub: MessageHub) -> list[str]:
        """Refuse to replace a folder whose score cannot be compared; returns log messages."""
        own = self._own(metric)
        for folder in self._known:
            if folder.path != own or folder.metric == metric:
                continue
            if folder.metric is not None:
                raise TargetError(
                    f'{own} is the best save by {folder.metric!r}, not by {metric!r}, which would replace it. '
                    f'Move it away or set out_dir'
                )
            if _score_key(metric) not in hub.runtime_info:
                raise TargetError(f'{own} holds no score to compare with. Move it away or set out_dir')
            return [f'{own} holds no score: that of the checkpoint is taken for it']
        return []

    def _own(self, metric: str) -> Path | str | None:
        suffix = f'_{self.folder_suffix(metric)}'
        if isinstance(self._newest, Path):
            return self._newest.with_name(f'{self._newest.name}{suffix}')
        return self._newest and f'{self._newest}{suffix}'

    def _best(self, metric: str, hub: MessageHub) -> float:
        return hub.runtime_info.get(_score_key(metric), self.init_value_map[self._rule(metric)])

    def _rule(self, metric: str) -> str:
        return self.rules[self.key_indicators.index(metric)]


def earlier_folders(hub: MessageHub) -> list[Path]:
    """Folders of the newest saves of the runs that this one was resumed from; they may be gone."""
    return [Path(folder) for folder in hub.runtime_info.get(_FOLDERS_KEY, ())]


def _score_key(metric: str) -> str:
    return f'hf_checkpoint_best_score_{metric}'
