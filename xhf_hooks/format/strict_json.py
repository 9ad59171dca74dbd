"""Parses JSON that may be damaged: clear errors, no duplicate names."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from xhf_hooks.errors import DamagedError

MOST_NBYTES = 100 * 10**6  # the safetensors library's limit for headers


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        where: The file, for messages.

    Raises:
        DamagedError: It is not a JSON object.
    """
    try:
        content = json.loads(data.decode('utf-8'), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise DamagedError(f'{where}: not UTF-8 text ({error.reason} at byte {error.start})') from None
    except RecursionError:
        raise DamagedError(f'{where}: JSON nested too deeply') from None
    except ValueError as error:  # also numbers with too many digits
        raise DamagedError(f'{where}: not valid JSON ({str(error)[:200]})') from None
    if not isinstance(content, dict):
        raise DamagedError(f'{where}: expected a JSON object, found {type(content).__name__}')
    return content


def read(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object.

    Raises:
        DamagedError: It cannot be read, is too large, or is not a JSON object.
    """
    try:
        with open(path, 'rb') as file:
            data = file.read(MOST_NBYTES + 1)
    except OSError as error:
        raise DamagedError(f'{path}: cannot be read ({error.strerror})') from None
    if len(data) > MOST_NBYTES:
        raise DamagedError(f'{path}: larger than {MOST_NBYTES} bytes, the limit')
    return parse(data, str(path))


def is_count(value: Any) -> bool:
    """Whether the value is a JSON integer in the range of sizes; true and 1.0 are not."""
    return type(value) is int and 0 <= value < 2**63


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f'duplicate name {twice[:80]!r}')
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f'{text} is not JSON')
