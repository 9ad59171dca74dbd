"""CRC-32 of a file and of the tensors in it, in one pass by several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from xhf_hooks.format import checksum
from xhf_hooks.format.checksum import count_non_finite
from xhf_hooks.format.safetensors import Header
from xhf_hooks.threads import WorkerThreads

_WINDOW_NBYTES = 1 << 20  # per read, a multiple of every element size
_PART_NBYTES = 16 * _WINDOW_NBYTES


@dataclass
class FileSums:
    """The checksums of one file.

    Attributes:
        tensors: CRC-32 of each tensor; {} for a file without a header.
        non_finite: Number of infinite and NaN elements, for tensors that have any; {} if not counted.
    """

    crc32: int = 0
    tensors: dict[str, int] = field(default_factory=dict)
    non_finite: dict[str, int] = field(default_factory=dict)


@dataclass
class _Part:
    """Bytes that one job reads: of one tensor, of the header, or of a file without header."""

    tensor: str | None
    dtype: str
    start: int
    end: int
    crc32: int = 0
    non_finite: int = 0


def sum_file(
    path: Path,
    header: Header | None,
    threads: WorkerThreads,
    *,
    count: bool,
    from_disk: bool,
    on_read: Callable[[int], None],
) -> FileSums:
    """Read a file once.

    Args:
        header: Each of its tensors gets a checksum of its own.
        count: Count infinite and NaN values.
        from_disk: Drop the file's clean pages from the page cache first, to see what the disk has.
        on_read: Called in this thread with the bytes of each finished job.

    Raises:
        OSError: It cannot be read, or is shorter than its header says.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if from_disk:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        parts = list(_parts(os.fstat(fd).st_size, header))
        for nbytes in threads.run(partial(_read, fd, part, count=count) for part in parts):
            on_read(nbytes)
    finally:
        os.close(fd)
    sums = FileSums(tensors={entry.name: 0 for entry in header.entries} if header is not None else {})
    for part in parts:
        nbytes = part.end - part.start
        sums.crc32 = checksum.combine(sums.crc32, part.crc32, nbytes)
        if part.tensor is not None:
            sums.tensors[part.tensor] = checksum.combine(sums.tensors[part.tensor], part.crc32, nbytes)
            if part.non_finite:
                sums.non_finite[part.tensor] = sums.non_finite.get(part.tensor, 0) + part.non_finite
    return sums


def _parts(nbytes: int, header: Header | None) -> Iterator[_Part]:
    """The parts in file order, none of them empty."""
    segments: list[tuple[str | None, str, int, int]] = [(None, '', 0, header.data_start if header else nbytes)]
    segments += [(entry.name, entry.dtype, entry.start, entry.end) for entry in (header.entries if header else ())]
    for name, dtype, start, end in segments:
        for at in range(start, end, _PART_NBYTES):
            yield _Part(name, dtype, at, min(at + _PART_NBYTES, end))


def _read(fd: int, part: _Part, *, count: bool) -> int:
    """Sum a part; returns its bytes. Runs on: a worker thread."""
    nbytes = part.end - part.start
    os.posix_fadvise(fd, part.start, nbytes, os.POSIX_FADV_WILLNEED)
    buffer = memoryview(bytearray(min(_WINDOW_NBYTES, nbytes)))
    for at in range(part.start, part.end, _WINDOW_NBYTES):
        window = buffer[: part.end - at]
        read_into(fd, window, at)
        part.crc32 = checksum.crc32(window, part.crc32)
        if count:
            part.non_finite += count_non_finite(window, part.dtype)
    return nbytes


def read_into(fd: int, out: memoryview, start: int) -> None:
    """Fill ``out`` with the bytes of a file from ``start`` on.

    Raises:
        OSError: They cannot be read, or the file is too short.
    """
    while len(out):
        nbytes = os.preadv(fd, [out], start)
        if not nbytes:
            raise OSError(f'the file ends at byte {start}: it was truncated while it was read')
        out, start = out[nbytes:], start + nbytes
