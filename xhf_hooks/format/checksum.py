"""CRC-32 (as in zlib, gzip and PNG) of bytes and of concatenations, and counts of infinities and NaNs in them.

isal (ISA-L) is several times faster than zlib. It releases the GIL for more than 5 kB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib

_READ_NBYTES = 2**20


#: Checksum of bytes; a second argument is the checksum of preceding bytes.
crc32 = isal_zlib.crc32
#: Checksum of a concatenation, from both checksums and the size of the second part.
combine = isal_zlib.crc32_combine


def to_hex(crc: int) -> str:
    """Eight hexadecimal digits, as ``crc32`` and ``rhash`` print them."""
    return f'{crc:08x}'


def from_hex(text: str) -> int:
    """The inverse of :func:`to_hex`."""
    return int(text, 16)


#: Dtype to (unsigned word, mask without the sign bit, smallest masked value that is not finite, sign bit or 0).
#: E4M3 and E8M0 have no infinity and one NaN; C64 is two F32.
_FORMATS: dict[str, tuple[type[np.unsignedinteger[Any]], int, int, int]] = {
    'BF16': (np.uint16, 0x7FFF, 0x7F80, 1 << 15),
    'F16': (np.uint16, 0x7FFF, 0x7C00, 1 << 15),
    'F32': (np.uint32, 0x7FFFFFFF, 0x7F800000, 1 << 31),
    'C64': (np.uint32, 0x7FFFFFFF, 0x7F800000, 1 << 31),
    'F64': (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000, 1 << 63),
    'F8_E5M2': (np.uint8, 0x7F, 0x7C, 1 << 7),
    'F8_E4M3': (np.uint8, 0x7F, 0x7F, 1 << 7),
    'F8_E8M0': (np.uint8, 0xFF, 0xFF, 0),
}
_WORDS = 1 << 19  # per pass, so that they stay in the CPU cache


def count_non_finite(data: memoryview | bytearray | bytes, dtype: str) -> int:
    """Number of infinite or NaN words in ``data``; 0 for integers. A complex number is two words.

    Args:
        data: Contiguous bytes of complete elements.
    """
    if dtype not in _FORMATS:
        return 0
    kind, mask, least, sign = _FORMATS[dtype]
    words = np.frombuffer(data, kind)
    return sum(_count(words[start : start + _WORDS], mask, least, sign) for start in range(0, len(words), _WORDS))


def _count(words: np.ndarray, mask: int, least: int, sign: int) -> int:
    """Usually, two fast maxima of positive and of negative numbers show that there are none."""
    if words.max() < sign + least and (not sign or words.view(f'i{words.itemsize}').max() < least):
        return 0
    return int(np.count_nonzero((words & words.dtype.type(mask)) >= least))


def file_size_and_crc32(path: Path) -> tuple[int, int]:
    """Bytes of a file, and their CRC-32."""
    nbytes = found = 0
    with path.open('rb', buffering=0) as file:
        while data := file.read(_READ_NBYTES):
            nbytes, found = nbytes + len(data), crc32(memoryview(data), found)
    return nbytes, found


def line_checksums(lines: Sequence[str]) -> np.ndarray:
    """Eight bytes for each line."""
    digests = [hashlib.blake2b(line.encode(), digest_size=8).digest() for line in lines]
    return np.frombuffer(b''.join(digests), np.int64)


def first_difference(one: np.ndarray, other: np.ndarray) -> int:
    """The number of the first element that differs, or that only one of two arrays has; -1 if they are equal."""
    n_both = min(len(one), len(other))
    differing = np.flatnonzero(one[:n_both] != other[:n_both])
    if differing.size:
        return int(differing[0])
    return n_both if len(one) != len(other) else -1
