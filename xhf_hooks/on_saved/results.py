"""Turns what a command prints into scalars for a visualizer."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

#: More numbers than this are not a result but a dump.
_MOST = 1000


def scalars_in(line: str) -> dict[str, float]:
    """The finite numbers in a line that is a JSON object; nested names are joined by slashes.

    Empty for other lines, and if there are too many numbers.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    flat = dict(_flat(found, '')) if isinstance(found, dict) else {}
    return flat if len(flat) <= _MOST else {}


def _flat(found: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f'{prefix}{name}/')
        elif isinstance(value, (int, float)):
            with contextlib.suppress(OverflowError):  # an integer of hundreds of digits
                if math.isfinite(value):
                    yield f'{prefix}{name}', float(value)
