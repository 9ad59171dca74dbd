"""Reads a file from several threads: memory-mapped where possible.

A mapping avoids a copy. Unreadable bytes raise an OSError either way.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from xhf_hooks.files.holes import Range, find_holes
from xhf_hooks.files.mapped_file import map_or_none
from xhf_hooks.files.regular_files import open_regular_fd
from xhf_hooks.format.text import size_text

_LEAST_HOLE_NBYTES = 1 << 20


class Reader(Protocol):
    """Reads bytes of a file from several threads; :class:`FileReader` is one."""

    holes: list[Range]

    def view(self, start: int, end: int, buffer: memoryview) -> memoryview:
        """See :meth:`FileReader.view`."""

    def forget(self, start: int, end: int) -> None:
        """See :meth:`FileReader.forget`."""

    def close(self) -> None:
        """See :meth:`FileReader.close`."""


class OpenReader(Protocol):
    """Opens a reader, with the arguments of :class:`FileReader`. The path may stand for a file stored elsewhere."""

    def __call__(self, path: Path, nbytes: int, *, from_disk: bool = False) -> Reader: ...


class FileReader:
    """Reads a file, which stays open until :meth:`close`.

    Args:
        nbytes: Size of the file.
        from_disk: Drop the file's clean pages from the page cache first and read everything, holes included; for
            checks in a training run.

    Attributes:
        holes: Byte ranges that were never written. They are zeros and need not be read.

    Raises:
        OSError: It is not a regular file, or cannot be opened.
    """

    def __init__(self, path: Path, nbytes: int, *, from_disk: bool = False) -> None:
        self._fd = open_regular_fd(path)
        self.holes: list[Range] = []
        self._mapped = None
        if from_disk:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            self._mapped = map_or_none(self._fd, nbytes)
            self.holes = find_holes(self._fd, nbytes, _LEAST_HOLE_NBYTES)

    def view(self, start: int, end: int, buffer: memoryview) -> memoryview:
        """The bytes from ``start`` to ``end``, in the mapping or in ``buffer``. Release the view before the next call.

        Raises:
            OSError: They cannot be read, or the file is too short.
        """
        if self._mapped is not None:
            return self._mapped.view(start, end)
        room = out = buffer[: end - start]
        while len(room):
            count = os.preadv(self._fd, [room], start)
            if not count:
                raise OSError(f'the file ends at byte {start}: it was truncated while it was read')
            room, start = room[count:], start + count
        return out

    def forget(self, start: int, end: int) -> None:
        """Release the memory of these bytes; they are not needed again soon."""
        if self._mapped is not None:
            self._mapped.forget(start, end)

    def close(self) -> None:
        """Close the file, once all views have been released."""
        if self._mapped is not None:
            self._mapped.close()
        os.close(self._fd)


def describe_holes(name: str, hole_nbytes: int, nbytes: int) -> str:
    """A note about a file of ``nbytes`` that has holes."""
    return f'{name}: {size_text(hole_nbytes)} of {size_text(nbytes)} are holes: never written, and read as zeros'
