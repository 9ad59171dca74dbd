"""Mutations of bytes, for fuzzing. Each is reproducible from its number."""

from __future__ import annotations

import random


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
