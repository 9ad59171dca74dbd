"""Which committed folders to keep. Pure: names in, names out, nothing is deleted here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def archive_name(final: str, label: str) -> str:
    """Name of an older save: ``hf_model`` of ``iter_500`` is ``hf_model_iter_500``."""
    return f'{final}_{label}'


def archives(final: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are names of older saves of ``final``, by their numbers."""
    found = []
    for name in names:
        match = re.fullmatch(re.escape(final) + r'_(?:iter|epoch)_(\d+)', name)
        if match:
            found.append((int(match[1]), name))
    return [name for _, name in sorted(found)]


def outdated(order: Mapping[str, Any], max_keep: int) -> list[str]:
    """Older saves to delete when ``max_keep`` are kept, the newest, which is not among them, included; -1 keeps all.

    Args:
        order: By name, larger for later commits. Not the iteration: a run that resumes from an earlier one commits the
            same iterations again, and those are the newer saves.
    """
    oldest_first = sorted(order, key=lambda name: order[name])
    return [] if max_keep == -1 else oldest_first[: max(0, len(oldest_first) - (max_keep - 1))]
