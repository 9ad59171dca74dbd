"""Finds holes in files: ranges that were never written, occupy no disk space and read as zeros.

Holes need not be read. In a weight file, they are often the result of a broken download.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence

Range = tuple[int, int]


def find_holes(fd: int, nbytes: int, at_least: int) -> list[Range]:
    """Start and end of each hole, in order; [] if the file system does not support it.

    Args:
        nbytes: Size of the file.
        at_least: Smallest hole to report, in bytes.
    """
    found: list[Range] = []
    position, nbytes = 0, min(nbytes, os.fstat(fd).st_size)  # if it was truncated, reading it raises
    while position < nbytes:
        try:
            start = os.lseek(fd, position, os.SEEK_HOLE)
            if start >= nbytes:
                break
            position = _next_data(fd, start, nbytes)
        except OSError:  # not supported
            break
        if position - start >= at_least:
            found.append((start, position))
    return found


def _next_data(fd: int, start: int, nbytes: int) -> int:
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a hole up to the end
            return nbytes
        raise


def within(holes: Sequence[Range], start: int, end: int) -> Iterator[Range]:
    """The intersections of ``holes`` (sorted, disjoint) with ``start`` to ``end``."""
    for first, last in holes[max(0, bisect_right(holes, (start, start)) - 1) :]:
        if first >= end:
            return
        if last > start:
            yield max(first, start), min(last, end)


def in_both(one: Sequence[Range], two: Sequence[Range]) -> list[Range]:
    """The intersections of two sorted lists of ranges."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(two):
        start, end = max(one[i][0], two[j][0]), min(one[i][1], two[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < two[j][1]:
            i += 1
        else:
            j += 1
    return found
