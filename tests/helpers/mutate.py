"""Mutations of bytes and of JSON values, for fuzzing. Each is reproducible from its number."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

#: Values that a reader may not expect.
HOSTILE: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    10**40,
    1.0,
    1.5,
    1e308,
    float('nan'),
    float('inf'),
    '',
    'F32',
    'BF16',
    'F4',
    '../../etc/passwd',
    'a\0b',
    '\ud800',
    'ü' * 300,
    [],
    [0],
    [0, 0],
    [0, 1, 2],
    [-1, 4],
    [4, 0],
    [2**62, 2**62],
    [1] * 100,
    {},
    {'a': 1},
    [[[[[]]]]],
]


def mutated_bytes(data: bytes, number: int) -> bytes:
    """One to three edits: bits flipped, bytes inserted, removed, repeated or swapped, the end cut off."""
    rng = random.Random(number)
    result = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randrange(len(result) + 1), rng.choice([1, 1, 1, 2, 4, 8, 40])
        kind = rng.randrange(6)
        if kind == 0 and at < len(result):
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            result[at:at] = rng.randbytes(length)
        elif kind == 2:
            del result[at : at + length]
        elif kind == 3:
            result[at:at] = result[at : at + length]
        elif kind == 4:
            result[at : at + length] = rng.choice([b'\0', b'\xff', b'9', b'{', b'}', b'[', b',', b'"', b'-']) * length
        else:
            del result[at:]
    return bytes(result)


def mutated_json(content: Any, number: int) -> Any:
    """One to three values replaced, removed, renamed, or swapped with another one of the document."""
    rng = random.Random(number)
    result = copy.deepcopy(content)
    for _ in range(rng.randint(1, 3)):
        places = list(places_in(result))
        if not places:
            break
        parent, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice(['', '__metadata__', f'{key}x', '../x', 'a/b'])] = parent.pop(key)
        elif kind == 2:
            other, name = rng.choice(places)
            parent[key] = copy.deepcopy(other[name])
        elif kind == 3 and type(parent[key]) is int:
            parent[key] += rng.choice([-8, -4, -1, 1, 4, 8, 10**6])
        else:
            parent[key] = copy.deepcopy(rng.choice(HOSTILE))
    return result


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value, with each of its keys or indices."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in pairs:
        yield value, key
        yield from places_in(child)
