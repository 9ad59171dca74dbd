"""save_best: which model is the best so far, and where earlier runs left theirs."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.hooks import CheckpointHook
from mmengine.logging import MessageHub

from xhf_hooks.errors import OptionError, TargetError
from xhf_hooks.integrity.manifest import MANIFEST_NAME


@dataclass(frozen=True)
class BestFolder:
    """The committed best save by a metric.

    Attributes:
        path: Its folder, or its URL in a store.
        metric: None if the manifest has no score, as with earlier versions of this package.
    """

    path: Path | str
    metric: str | None
    score: float
    iteration: int


def describe_best(metric: str, score: float, rule: str) -> dict[str, Any]:
    """The score as recorded in the manifest of a best save; NaN and infinity as text."""
    value = float(score)
    return {'best': {'metric': metric, 'score': value if math.isfinite(value) else str(value), 'rule': rule}}


def find_best_folders(finals: Iterable[Path]) -> list[BestFolder]:
    """The best folders, such as ``hf_model_best``, beside the given newest saves. Runs on: rank 0."""
    found = []
    for final in finals:
        for path in sorted(final.parent.glob(f'{glob.escape(final.name)}_best*/{MANIFEST_NAME}')):
            try:
                manifest = path.read_bytes()
            except OSError:
                continue
            found.append(_described(path.parent, manifest))
    return [folder for folder in found if folder is not None]


def find_best_in_stores(manifests: Iterable[tuple[str, bytes]]) -> list[BestFolder]:
    """The best saves in a store, by their URLs and manifests."""
    found = [_described(url, manifest) for url, manifest in manifests]
    return [folder for folder in found if folder is not None]


def _described(path: Path | str, manifest: bytes) -> BestFolder | None:
    """The best save that a manifest describes; None if this package did not write the manifest."""
    try:
        content = json.loads(manifest)
        iteration, best = int(content['iteration']), content.get('best')
        score = math.nan if best is None else float(best['score'])
        return BestFolder(path, None if math.isnan(score) else str(best['metric']), score, iteration)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


#: Key in the message hub: folders of the newest saves of this run and of the runs that it was resumed from.
_FOLDERS_KEY = 'hf_checkpoint_folders'
_NOWHERE = 'according to the checkpoint, but no saved folder has that score'


class BestMetric(CheckpointHook):
    """The part of CheckpointHook that understands ``save_best`` and ``rule``; it saves nothing itself.

    Scores are recorded in the message hub, which is part of MMEngine's checkpoints, and in the manifests of the
    folders. A checkpoint may be older than the best save, so the better of the two scores counts.
    """

    def __init__(self, save_best: str | list[str], rule: str | list[str] | None) -> None:
        if not save_best:
            raise OptionError('save_best', 'None, a metric or a list of metrics', save_best)
        try:
            super().__init__(interval=-1, save_best=save_best, rule=rule)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise OptionError('save_best/rule', f'what CheckpointHook accepts ({error})', (save_best, rule)) from error
        self._known: Sequence[BestFolder] = ()
        self._newest: Path | str | None = None

    def begin(self, newest: Path | str, known: Sequence[BestFolder], hub: MessageHub) -> list[str]:
        """Take over the scores of known best folders before training. Runs on: all ranks, with the same result.

        Args:
            newest: Folder of the newest save, or its URL in a store. Folders of best saves are named after it.
            known: Best folders beside it and beside :func:`earlier_folders`.

        Returns:
            Log messages.

        Raises:
            TargetError: A folder that would be replaced belongs to another metric, or has no known score.
        """
        self._newest, self._known = newest, known
        folders = [*earlier_folders(hub), *([newest] if isinstance(newest, Path) else [])]
        hub.update_info(_FOLDERS_KEY, [*dict.fromkeys(map(str, folders))])
        if self.key_indicators == ['auto']:  # the first validation determines the metric
            return []
        return [line for metric in self.key_indicators for line in self._count_known(metric, hub)]

    def improved(self, metrics: Mapping[str, Any], hub: MessageHub) -> dict[str, float]:
        """The metrics that have improved, with their scores.

        Raises:
            OptionError: A metric of ``save_best`` is not among the results.
            TargetError: As for :meth:`begin`, if the metric was not known then.
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
        """Record the score of a committed save."""
        hub.update_info(_score_key(metric), score)

    def facts(self, metric: str, score: float) -> dict[str, Any]:
        """What the manifest of a save records about its score."""
        return describe_best(metric, score, self._rule(metric))

    def folder_suffixes(self) -> list[str]:
        """All possible results of :meth:`folder_suffix`."""
        return [self.folder_suffix(metric) for metric in self.key_indicators]

    def folder_suffix(self, metric: str) -> str:
        """``best``, or ``best_<metric>`` if there are several metrics."""
        return 'best' if len(self.key_indicators) == 1 else f'best_{metric}'.replace('/', '_')

    def _count_known(self, metric: str, hub: MessageHub) -> list[str]:
        """Record the better of the folders' and the message hub's scores in the hub; returns log messages."""
        lines = self._check_own(metric, hub)
        holder = None
        for folder in self._known:
            if folder.metric == metric and not self.is_better_than[metric](self._best(metric, hub), folder.score):
                holder = folder
                self.remember(metric, folder.score, hub)
        if _score_key(metric) not in hub.runtime_info:
            return lines
        where = f'in {holder.path} (iteration {holder.iteration})' if holder else _NOWHERE
        return [*lines, f'best {metric} so far: {float(self._best(metric, hub)):.4f}, {where}']

    def _check_own(self, metric: str, hub: MessageHub) -> list[str]:
        """Refuse to replace a folder whose score cannot be compared; returns log messages."""
        own = self._own(metric)
        for folder in self._known:
            if folder.path != own or folder.metric == metric:
                continue
            if folder.metric is not None:
                raise TargetError(
                    f'{own} holds the best save by {folder.metric!r}, and a save by {metric!r} would replace it. '
                    f'Move it away, or set out_dir'
                )
            if _score_key(metric) not in hub.runtime_info:
                raise TargetError(f'{own} has no recorded score to compare with. Move it away, or set out_dir')
            return [f'{own} has no recorded score; the one in the checkpoint is used']
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
    """Folders of the newest saves of the runs that this run was resumed from. They may no longer exist."""
    return [Path(folder) for folder in hub.runtime_info.get(_FOLDERS_KEY, ())]


def _score_key(metric: str) -> str:
    return f'hf_checkpoint_best_score_{metric}'
