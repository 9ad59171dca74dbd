"""A file whose bytes several threads look at: mapped where that is possible, else read.

Mapping saves the time of a copy. Reading, no failing disk turns into a signal that ends the process. What cannot be
read is an error either way.
"""

from __future__ import annotations

import os
from pathlib import Path

from xhf_hooks.files.holes import Range, find_holes
from xhf_hooks.files.mapped_file import map_or_none
from xhf_hooks.files.regular_files import open_regular_fd

_LEAST_HOLE_NBYTES = 1 << 20


class FileReader:
    """Open until :meth:`close`.

    Args:
        nbytes: Size of the file.
        from_disk: Read, and ask the system to take from the disk what it holds in memory (as far as it is written
            there), holes, too, which is left to the disk to say; for use in a training run.

    Attributes:
        holes: What was never written, from and to: zeros, which need not be read.

    Raises:
        OSError: It is no regular file, or cannot be opened.
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
        """The bytes from ``start`` to ``end``, where they lie or in ``buffer``. Release it before the next.

        Raises:
            OSError: They cannot be read, or the file ends before.
        """
        if self._mapped is not None:
            return self._mapped.view(start, end)
        room = out = buffer[: end - start]
        while len(room):
            count = os.preadv(self._fd, [room], start)
            if not count:
                raise OSError(f'the file ends at byte {start}: it became shorter')
            room, start = room[count:], start + count
        return out

    def forget(self, start: int, end: int) -> None:
        """These bytes are not needed again soon."""
        if self._mapped is not None:
            self._mapped.forget(start, end)

    def close(self) -> None:
        """Close it; views of it are released before."""
        if self._mapped is not None:
            self._mapped.close()
        os.close(self._fd)
