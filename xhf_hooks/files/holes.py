"""Where a file has holes: ranges that were never written, take no room on the disk, and read as zeros.

A file of a terabyte may be one hole. Such ranges need not be read; a real one is often what a broken download has left.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence

Range = tuple[int, int]


def find_holes(fd: int, nbytes: int, at_least: int) -> list[Range]:
    """Start and end of each hole, in order; none where the file system does not tell.

    Args:
        nbytes: Size of the file.
        at_least: Bytes of a hole that is worth knowing.
    """
    found: list[Range] = []
    position, nbytes = 0, min(nbytes, os.fstat(fd).st_size)  # if it became shorter, reading it will tell
    while position < nbytes:
        try:
            start = os.lseek(fd, position, os.SEEK_HOLE)
            if start >= nbytes:
                break
            position = _next_data(fd, start, nbytes)
        except OSError:  # not known here
            break
        if position - start >= at_least:
            found.append((start, position))
    return found


def _next_data(fd: int, start: int, nbytes: int) -> int:
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # none up to the end
            return nbytes
        raise


def within(holes: Sequence[Range], start: int, end: int) -> Iterator[Range]:
    """The holes in ``start`` to ``end``, cut to it. ``holes``: in order, apart from each other."""
    for first, last in holes[max(0, bisect_right(holes, (start, start)) - 1) :]:
        if first >= end:
            return
        if last > start:
            yield max(first, start), min(last, end)


def in_both(one: Sequence[Range], two: Sequence[Range]) -> list[Range]:
    """What is in a range of both."""
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
