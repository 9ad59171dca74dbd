"""Which committed folders to keep. Pure: names in, names out, nothing is deleted here."""

from __future__ import annotations

import re
from collections.abc import Iterable


def archive_name(final: str, label: str) -> str:
    """Name of an older save: ``hf_model`` of ``iter_500`` is ``hf_model_iter_500``."""
    return f'{final}_{label}'


def archives(final: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are older saves of ``final``, oldest first."""
    found = []
    for name in names:
        match = re.fullmatch(re.escape(final) + r'_(?:iter|epoch)_(\d+)', name)
        if match:
            found.append((int(match[1]), name))
    return [name for _, name in sorted(found)]


def outdated(final: str, names: Iterable[str], max_keep: int) -> list[str]:
    """Older saves that go when ``max_keep`` are kept, ``final`` itself included; -1 keeps all."""
    older = archives(final, names)
    return [] if max_keep == -1 else older[: max(0, len(older) - (max_keep - 1))]
