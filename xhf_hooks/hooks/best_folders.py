"""Folders of best saves, and the scores in their manifests."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.integrity.manifest import MANIFEST_NAME


@dataclass(frozen=True)
class BestFolder:
    """A committed folder of the best save by a metric.

    Attributes:
        metric: None where the manifest has no score, as those of earlier versions of this package.
    """

    path: Path
    metric: str | None
    score: float
    iteration: int


def describe_best(metric: str, score: float, rule: str) -> dict[str, Any]:
    """The score, for the manifest of a best save; NaN and infinity as text."""
    value = float(score)
    return {'best': {'metric': metric, 'score': value if math.isfinite(value) else str(value), 'rule': rule}}


def find_best_folders(finals: Iterable[Path]) -> list[BestFolder]:
    """The best folders, such as ``hf_model_best``, beside those of newest saves. Runs on: rank 0."""
    found = []
    for final in finals:
        for manifest in sorted(final.parent.glob(f'{glob.escape(final.name)}_best*/{MANIFEST_NAME}')):
            folder = _read(manifest)
            found += [] if folder is None else [folder]
    return found


def _read(manifest: Path) -> BestFolder | None:
    """None where it is not a manifest of ours."""
    try:
        content = json.loads(manifest.read_text(encoding='utf-8'))
        iteration, best = int(content['iteration']), content.get('best')
        score = math.nan if best is None else float(best['score'])
        return BestFolder(manifest.parent, None if math.isnan(score) else str(best['metric']), score, iteration)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
