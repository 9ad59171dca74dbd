"""Reads a file from several threads: memory-mapped where possible.

A mapping avoids a copy. Unreadable bytes raise an OSError either way.
"""

from __future__ import annotations

import os
from pathlib import Path

from xhf_hooks.files.mapped_file import map_or_none
from xhf_hooks.files.regular_files import open_regular_fd


class FileReader:
    """Reads a file, which stays open until :meth:`close`.

    Args:
        nbytes: Size of the file.
        from_disk: Drop the file's clean pages from the page cache first; for checks in a training run.

    Raises:
        OSError: It is not a regular file, or cannot be opened.
    """

    def __init__(self, path: Path, nbytes: int, *, from_disk: bool = False) -> None:
        self._fd = open_regular_fd(path)
        self._mapped = None
        if from_disk:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            self._mapped = map_or_none(self._fd, nbytes)

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
