"""Decides which committed folders to delete. Pure functions of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def archive_name(final: str, label: str) -> str:
    """Name of an older save: ``hf_model`` and ``iter_500`` give ``hf_model_iter_500``."""
    return f'{final}_{label}'


def archives(final: str, names: Iterable[str]) -> list[str]:
    """The names of older saves of ``final``, sorted by number."""
    found = []
    for name in names:
        match = re.fullmatch(re.escape(final) + r'_(?:iter|epoch)_(\d+)', name)
        if match:
            found.append((int(match[1]), name))
    return [name for _, name in sorted(found)]


def outdated(order: Mapping[str, Any], max_keep: int) -> list[str]:
    """Older saves to delete. ``max_keep`` includes the newest save, which is not in ``order``; -1 keeps all.

    Args:
        order: Name to a key that grows with each commit. Not the iteration: a resumed run commits some iterations
            again.
    """
    oldest_first = sorted(order, key=lambda name: order[name])
    return [] if max_keep == -1 else oldest_first[: max(0, len(oldest_first) - (max_keep - 1))]
