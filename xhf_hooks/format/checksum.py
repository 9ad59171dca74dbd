"""CRC-32 (as in zlib, gzip and PNG) of bytes in memory, and of concatenations.

With isal (ISA-L) it is several times faster than with zlib. Both release the GIL for more than 5 kB.
"""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

try:
    from isal import isal_zlib
except ImportError:
    isal_zlib = None

if TYPE_CHECKING:
    from typing_extensions import Buffer

_HEX = re.compile(r'[0-9a-f]{8}')
_POLYNOMIAL = 0xEDB88320  # of CRC-32; the highest power is the lowest bit
_crc32 = (isal_zlib or zlib).crc32


def crc32(data: Buffer, value: int = 0) -> int:
    """Checksum of ``data``; ``value`` is the checksum of preceding bytes."""
    return _crc32(data, value)


def combine(first: int, second: int, second_nbytes: int) -> int:
    """Checksum of a concatenation, from both checksums and the size of the second part."""
    return _combine(first, second, second_nbytes)


def shift(crc: int, nbytes: int) -> int:
    """What bytes with this checksum add (by XOR) to that of a text in which ``nbytes`` more bytes follow them."""
    return _combine(crc, 0, nbytes)


def combine_in_python(first: int, second: int, second_nbytes: int) -> int:
    """What :func:`combine` is without isal; Python's zlib lacks it.

    Source: ``crc32.c`` of zlib 1.3, ``crc32_combine``: ``first`` times x to the number of bits that follow it.
    """
    return _multiply(_power(8 * second_nbytes), first) ^ second


@lru_cache(maxsize=1024)  # many tensors of a model have one size
def _power(exponent: int) -> int:
    """x to the ``exponent``, modulo the polynomial."""
    product = 1 << 31  # 1
    for number in range(exponent.bit_length()):
        if exponent >> number & 1:
            product = _multiply(_square(number), product)
    return product


@lru_cache(maxsize=64)
def _square(number: int) -> int:
    """x, squared ``number`` times."""
    return _multiply(_square(number - 1), _square(number - 1)) if number else 1 << 30


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, modulo the polynomial."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


_combine = getattr(isal_zlib, 'crc32_combine', combine_in_python)


def to_hex(crc: int) -> str:
    """Eight hexadecimal digits, as ``crc32`` and ``rhash`` print them."""
    return f'{crc:08x}'


def from_hex(text: str) -> int:
    """The inverse of :func:`to_hex`.

    Raises:
        ValueError: Not eight lower-case hexadecimal digits.
    """
    if not _HEX.fullmatch(text):
        raise ValueError(f'expected a CRC-32 of eight hexadecimal digits, found {text[:80]!r}')
    return int(text, 16)
