"""Small files that would take gigabytes or minutes to read. Each is made on demand.

Counts are near the limits of 20 million instructions and 256 MB per pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from tests.helpers.hostile_pickles import STORAGE, named, proto, short, tensor

_MASK = 2**64 - 1
_LANE_1, _LANE_2, _START = 11400714785074694791, 14029467366897019727, 2870177450012600261


def many(unit: bytes, n: int, before: bytes = b'') -> Callable[[], bytes]:
    """A list of ``n`` values made by ``unit``."""
    return lambda: proto(before + b'(' + unit * n + b'l')


def dropped(unit: bytes, n: int, before: bytes = b'') -> Callable[[], bytes]:
    """The same values, but each is dropped: this takes only time."""
    return lambda: proto(before + (unit + b'0') * n + b'N')


def number(value: int) -> bytes:
    return b'\x8a\x09' + value.to_bytes(9, 'little', signed=True)


def keys(made: Callable[[], Iterable[bytes]]) -> Callable[[], bytes]:
    return lambda: proto(b'}(' + b''.join(key + b'N' for key in made()) + b'u')


def equal_tuples() -> Iterable[bytes]:
    """Pairs of numbers with equal hashes (CPython ``tupleobject.c``, ``tuplehash``)."""
    inverse = pow(_LANE_2, -1, 2**64)
    found = 0
    first = 0
    while found < 200_000:
        first += 1
        seen = (_START + first * _LANE_2) & _MASK
        seen = ((seen << 31 | seen >> 33) & _MASK) * _LANE_1 & _MASK
        second = (12345 - seen) * inverse & _MASK
        if second < 2**60:
            found += 1
            yield number(first) + number(second) + b'\x86'


def chained_numbers(size: int = 2**20) -> list[int]:
    """Numbers that fill the slots that a dict of ``size`` probes in turn, and others that start probing there."""
    chain = [1]
    for _ in range(size // 3 + 1000):
        chain.append((5 * chain[-1] + 1) % size)
    late: list[int] = []
    taken = set(chain)
    for place in chain[:3000]:
        for turn in range(1, 2**11):
            value = place + size * turn
            perturb, at = value, place
            while perturb and at in taken:  # dictobject.c, lookdict
                perturb >>= 5
                at = (5 * at + perturb + 1) % size
            if not perturb and at in taken:
                late.append(value)
    return chain + late[: size // 3 - 3000]


def text(nbytes: int) -> bytes:
    return b'X' + struct.pack('<I', nbytes + 4) + b'a' * nbytes + '\U0001f600'.encode()


def called(module: str, name: str, args: bytes) -> bytes:
    """A prefix; after it, ``h\\x00h\\x01R`` is the call."""
    return args + b'q\x01' + named(module, name) + b'q\x00'


_CALL = b'h\x00h\x01R'
_REBUILT = ('torch._utils', '_rebuild_tensor_v2')
_CUBE = b'(' + b'K\x01' * 64 + b't'
#: Name to a function that makes the pickle.
HUNGRY: dict[str, Callable[[], bytes]] = {
    'sets': many(b'\x8f', 19_000_000),
    'dicts': many(b'}', 19_000_000),
    'dicts of one entry': many(b'}NNs', 4_900_000),
    'sets of one member': many(b'\x8f(N\x90', 4_900_000),
    'lists': many(b']', 19_000_000),
    'lists of one item': many(b']Na', 6_000_000),
    'tuples': many(b'N\x85', 9_900_000),
    'long tuples': many(b'(t', 9_900_000),
    'frozen sets': many(b'(N\x91', 6_000_000),
    'nested tuples': lambda: proto(b'N' + b'\x85' * 19_000_000),
    'nested lists': lambda: proto(b'(' * 19_000_000 + b'l'),
    'marks': lambda: proto(b'(' * 19_000_000),
    'floats': many(b'G' + struct.pack('>d', 1.5), 19_000_000),
    'integers': many(number(2**60), 19_000_000),
    'texts': many(short('a'), 19_000_000),
    'bytes': many(b'C\x01a', 19_000_000),
    'long text': lambda: proto(text(250_000_000)),
    'long texts': many(text(1_000_000), 240),
    'memo': lambda: proto(b'N' + b''.join(b'r' + struct.pack('<I', i) for i in range(19_000_000))),
    'memos by number': lambda: proto(b'N' + b'\x94' * 19_000_000),
    'names': many(named('a', 'b'), 19_000_000),
    'names of text': many(b'h\x00h\x00\x93', 6_000_000, short('a') + b'q\x00'),
    'stand-ins': many(b'h\x00)R', 6_000_000, named('a', 'B') + b'q\x00'),
    'stand-ins of one entry': many(b'h\x00)RNNs', 3_000_000, named('a', 'B') + b'q\x00'),
    'stand-ins by INST': many(b'(ia\nB\n', 9_000_000),
    'empty dicts by name': many(b'h\x00)R', 6_000_000, named('collections', 'OrderedDict') + b'q\x00'),
    'empty sets by name': many(b'h\x00)R', 6_000_000, named('builtins', 'set') + b'q\x00'),
    'copies of a list': many(_CALL, 4000, called('builtins', 'list', b'(' + b'N' * 100_000 + b'l\x85')),
    'copies of a set': many(
        _CALL, 4000, called('builtins', 'set', b'(' + b''.join(map(number, range(10_000))) + b'\x91\x85')),
    'storages': dropped(b'h\x00Q', 6_000_000, STORAGE[:-1] + b'q\x00'),
    'tensors': many(_CALL, 6_000_000, called(*_REBUILT, tensor()[len(named(*_REBUILT)) : -1])),
    'tensors of many dimensions': dropped(
        _CALL, 4_900_000, called(*_REBUILT, tensor(shape=_CUBE, stride=_CUBE)[len(named(*_REBUILT)) : -1])),
    'one entry again and again': lambda: proto(b'}' + b'K\x00Ns' * 6_000_000),
    'one item again and again': lambda: proto(b']' + b'Na' * 9_000_000),
    'tuple keys of one hash': keys(equal_tuples),
    'numbers that collide': keys(lambda: map(number, chained_numbers())),
    'floats that collide': keys(lambda: (b'G' + struct.pack('>d', value) for value in chained_numbers())),
}  # fmt: skip
