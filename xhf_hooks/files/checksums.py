"""CRC-32 of a file and of the tensors in it, in one pass by several threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.files.manifest import FileRecord, TensorRecord
from xhf_hooks.format import checksum
from xhf_hooks.format.checksum import count_non_finite
from xhf_hooks.format.safetensors import Header
from xhf_hooks.system.files import drop_page_cache, read_ahead
from xhf_hooks.system.threads import WorkerThreads

_WINDOW_NBYTES = 1 << 20  # per read, a multiple of every element size
_PART_NBYTES = 16 * _WINDOW_NBYTES


@dataclass
class _Part:
    """Bytes that one job reads: of one tensor, of the header, or of a file without header."""

    fd: int
    tensor: str | None
    dtype: str
    start: int
    end: int
    crc32: int = 0
    non_finite: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def read(self) -> int:
        """Sum it; returns its bytes. Runs on: a worker thread."""
        read_ahead(self.fd, self.start, self.nbytes)
        buffer = memoryview(bytearray(min(_WINDOW_NBYTES, self.nbytes)))
        for at in range(self.start, self.end, _WINDOW_NBYTES):
            window = buffer[: self.end - at]
            _read_into(self.fd, window, at)
            self.crc32 = checksum.crc32(window, self.crc32)
            self.non_finite += count_non_finite(window, self.dtype)
        return self.nbytes


def sum_file(
    path: Path, header: Header | None, threads: WorkerThreads, *, from_disk: bool, on_read: Callable[[int], None]
) -> FileRecord:
    """Read a file once.

    Args:
        header: Each of its tensors gets a checksum of its own, and a count of infinite and NaN values.
        from_disk: Drop the file's clean pages from the page cache first, to see what the disk has. Values are not
            counted then: a save has counted them in memory.
        on_read: Called in this thread with the bytes of each finished job.

    Raises:
        OSError: It cannot be read, or is shorter than its header says.
    """
    entries = () if header is None else header.entries
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if from_disk:
            drop_page_cache(fd, 0, 0)
        size = os.fstat(fd).st_size
        start = size if header is None else header.data_start
        segments: list[tuple[str | None, str, int, int]] = [(None, '', 0, start)]
        segments += [(entry.name, '' if from_disk else entry.dtype, entry.start, entry.end) for entry in entries]
        parts = [
            _Part(fd, name, dtype, at, min(at + _PART_NBYTES, end))
            for name, dtype, start, end in segments
            for at in range(start, end, _PART_NBYTES)
        ]
        for nbytes in threads.run(part.read for part in parts):
            on_read(nbytes)
    finally:
        os.close(fd)
    crc, tensors = 0, {entry.name: TensorRecord(0, 0) for entry in entries}
    for part in parts:
        crc = checksum.combine(crc, part.crc32, part.nbytes)
        if part.tensor is not None:
            before = tensors[part.tensor]
            summed = checksum.combine(before.crc32, part.crc32, part.nbytes)
            tensors[part.tensor] = TensorRecord(summed, before.non_finite + part.non_finite)
    return FileRecord(size, crc, tensors)


def _read_into(fd: int, out: memoryview, start: int) -> None:
    while len(out):
        nbytes = os.preadv(fd, [out], start)
        if not nbytes:
            raise OSError(f'the file ends at byte {start}: it was truncated while it was read')
        out, start = out[nbytes:], start + nbytes
