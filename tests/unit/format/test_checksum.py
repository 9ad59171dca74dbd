"""Our CRC-32 is zlib's, whole or in pieces."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from xhf_hooks.format import checksum


@given(st.binary(), st.binary())
def test_it_is_zlibs(first, second):
    assert checksum.crc32(first) == zlib.crc32(first)
    assert checksum.crc32(memoryview(second), checksum.crc32(first)) == zlib.crc32(first + second)


@given(st.binary(), st.binary(), st.binary())
def test_pieces_make_the_whole(one, two, three):
    tail = checksum.combine(checksum.crc32(two), checksum.crc32(three), len(three))
    assert checksum.combine(checksum.crc32(one), tail, len(two + three)) == zlib.crc32(one + two + three)


def test_pieces_larger_than_four_gigabytes():
    """Zeros leave a checksum of zeros before them alone: combining is a matter of the size."""
    size, half = 2**33, zlib.crc32(bytes(2**20))
    whole, step = half, 2**20
    while step < size:
        whole = checksum.combine(whole, whole, step)
        step *= 2
    assert whole == checksum.combine(0, whole, size)
    assert checksum.combine(checksum.crc32(b'a'), whole, size) != checksum.combine(checksum.crc32(b'b'), whole, size)
