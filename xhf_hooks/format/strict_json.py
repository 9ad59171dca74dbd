"""Reads JSON objects that may be damaged, with clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        DamagedError: It is not a JSON object.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:  # also for text that is not UTF-8
        raise DamagedError(f'{where}: not valid JSON ({str(error)[:200]})') from None
    if not isinstance(content, dict):
        raise DamagedError(f'{where}: expected a JSON object, found {type(content).__name__}')
    return content


def read(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object.

    Raises:
        DamagedError: It cannot be read, or is not a JSON object.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(f'{path}: cannot be read ({error.strerror})') from None
    return parse(data, str(path))


def is_count(value: Any) -> bool:
    """Whether the value is a JSON integer in the range of sizes; true and 1.0 are not."""
    return type(value) is int and 0 <= value < 2**63
