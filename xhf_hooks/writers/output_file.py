"""One file being written, at any offsets."""

from __future__ import annotations

import os
from pathlib import Path

from xhf_hooks.writers.write_behind import WriteBehind

_PART_NBYTES = 8 * 2**20


def create_file(path: Path, header: bytes, nbytes: int) -> None:
    """Make a new file of a known size, with nothing in it yet but its header.

    Raises:
        OSError: The file exists, or cannot be made.
    """
    with path.open('xb', buffering=0) as file:
        os.ftruncate(file.fileno(), nbytes)
        _write_all(file.fileno(), memoryview(header), 0)


class OutputFile:
    """A file that exists. Used by: any number of threads and ranks, each for bytes of its own.

    Args:
        write_behind: Do not leave to :meth:`fsync` what the disk can do before.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, *, write_behind: bool = True) -> None:
        self._fd = os.open(path, os.O_WRONLY)
        self._behind = WriteBehind(self._fd) if write_behind else None

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        for start in range(0, data.nbytes, _PART_NBYTES):
            part = data[start : start + _PART_NBYTES]
            _write_all(self._fd, part, offset + start)
            if self._behind is not None:
                self._behind.wrote(offset + start, part.nbytes)

    def fsync(self) -> None:
        """Return when everything is on the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close it, whatever state it is in."""
        os.close(self._fd)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:], offset + done)
