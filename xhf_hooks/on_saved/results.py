"""Turns what a command or function returns into scalars for a visualizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

#: More numbers than this are not a result but a dump.
_MOST = 1000


def scalars_in(line: str) -> dict[str, float]:
    """The numbers in a line that is a JSON object, by name; empty for other lines."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return numbers(found) if isinstance(found, dict) else {}


def numbers(found: Mapping[Any, Any]) -> dict[str, float]:
    """All finite numbers; nested names are joined by slashes. Empty if there are too many."""
    flat = dict(_flat(found, ''))
    return flat if len(flat) <= _MOST else {}


def _flat(found: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f'{prefix}{name}/')
            continue
        try:
            number = float(value)  # also numbers of numpy and torch
        except (TypeError, ValueError, OverflowError, RuntimeError):
            continue
        if not isinstance(value, (str, bytes)) and math.isfinite(number):
            yield f'{prefix}{name}', number
