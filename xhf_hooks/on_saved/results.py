"""Numbers that a command or a function returns, as scalars for a visualizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

#: More are no result, but a dump.
_MOST = 1000


def scalars_in(line: str) -> dict[str, float]:
    """The numbers of a line that is a JSON object, by name; none where it is something else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return numbers(found) if isinstance(found, dict) else {}


def numbers(found: Mapping[Any, Any]) -> dict[str, float]:
    """All finite numbers; nested names are joined by slashes. None where there are too many."""
    flat = dict(_flat(found, ''))
    return flat if len(flat) <= _MOST else {}


def _flat(found: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f'{prefix}{name}/')
            continue
        try:
            number = float(value)  # numpy's and torch's, too
        except (TypeError, ValueError, OverflowError, RuntimeError):
            continue
        if not isinstance(value, (str, bytes)) and math.isfinite(number):
            yield f'{prefix}{name}', number
