"""Finds the folders of best saves and the scores in their manifests."""

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
