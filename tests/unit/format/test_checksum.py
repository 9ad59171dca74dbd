"""Checksums of concatenations, of any size; test_properties combines those of small pieces."""

from __future__ import annotations

import zlib

from xhf_hooks.format import checksum


def test_pieces_larger_than_four_gigabytes():
    """Zeros leave a checksum of zeros before them alone: combining is a matter of the size."""
    size, half = 2**33, zlib.crc32(bytes(2**20))
    whole, step = half, 2**20
    while step < size:
        whole = checksum.combine(whole, whole, step)
        step *= 2
    assert whole == checksum.combine(0, whole, size)
    assert checksum.combine(checksum.crc32(b'a'), whole, size) != checksum.combine(checksum.crc32(b'b'), whole, size)
