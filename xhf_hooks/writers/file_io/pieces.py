"""Cuts a chunk into pieces that fit the CPU cache; each is counted, checksummed and written before the next.

Medians with two ranks and one file of 0.85 GB on ext4, without fsync: 0.092 s. Pieces that begin anywhere: 0.103 s with
2 MB, 0.121 s with 256 KB, 0.100 s with 8 MB. On XFS: 0.046 s instead of 0.058 s. Only one process at a time writes to a
file, so a faster write helps all ranks. Probably the page cache needs fewer folios for data that begins and ends on
such a boundary.
"""

from __future__ import annotations

from collections.abc import Iterator

PIECE_NBYTES = 2**20
#: Size of the largest element.
_ELEMENT_NBYTES = 8


def pieces(data: memoryview, offset: int) -> Iterator[memoryview]:
    """Cut at file offsets that are multiples of :data:`PIECE_NBYTES`, always between two elements.

    Args:
        data: Whole elements.
        offset: Offset of the data in the file.
    """
    start, end = 0, -offset % PIECE_NBYTES // _ELEMENT_NBYTES * _ELEMENT_NBYTES or PIECE_NBYTES
    while start < data.nbytes:
        yield data[start:end]
        start, end = end, end + PIECE_NBYTES
