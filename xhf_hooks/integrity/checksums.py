"""Checksums of files and of the tensors in them: every byte that was written is read once, by several threads.

Files are mapped, which is faster than reading by the time of a copy, or read, which no failing disk turns into a
signal that ends the process. What cannot be read is an error of that file either way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.files.holes import Range, find_holes, within
from xhf_hooks.files.mapped_file import MappedFile, map_or_none
from xhf_hooks.files.regular_files import open_regular_fd
from xhf_hooks.format import checksum
from xhf_hooks.format.nonfinite import count_non_finite
from xhf_hooks.format.safetensors import DTYPE_NBYTES, Header

#: A multiple of every element size. Read at once; a job is several of these.
WINDOW_NBYTES = 1 << 20
_WINDOWS_PER_JOB = 16


@dataclass
class FileSums:
    """What reading a file gave.

    Attributes:
        crc32: Of the whole file.
        tensors: CRC-32 of each tensor's bytes, by name.
        non_finite: Infinite and NaN elements of each tensor that has some, if they were counted.
        hole_nbytes: Never written, and not read: they are zeros.
        error: Why the file could not be read; the rest is then empty.
    """

    crc32: int = 0
    tensors: dict[str, int] = field(default_factory=dict)
    non_finite: dict[str, int] = field(default_factory=dict)
    hole_nbytes: int = 0
    error: str | None = None


@dataclass(frozen=True)
class FileToRead:
    """A file; with its header, its tensors are summed one by one."""

    path: Path
    nbytes: int
    header: Header | None = None
    count_non_finite: bool = False


@dataclass(frozen=True)
class _Segment:
    """The header (or a whole file without tensors), or one tensor."""

    name: str | None
    dtype: str
    start: int
    end: int


@dataclass(frozen=True)
class _Part:
    """Bytes of one segment, at most a window."""

    segment: int
    start: int
    end: int


_PartSum = tuple[_Part, int, int]


def sum_files(
    files: Sequence[FileToRead],
    threads: WorkerThreads,
    *,
    drop_cache: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[FileSums]:
    """Read all files, and sum them up.

    Args:
        threads: The memory is a window for each.
        drop_cache: Read, and ask the system to take from the disk what it holds in memory (as far as it is written
            there), holes, too, which is left to the disk to say; for use in a training run.
        on_progress: Called in this thread with bytes done and bytes in all.

    Returns:
        One for each file, in the same order.
    """
    segments = [_segments(file) for file in files]
    sums = [FileSums() for _ in files]
    parts: list[list[_PartSum]] = [[] for _ in files]
    total, done = sum(file.nbytes for file in files), 0
    with ExitStack() as opened:
        jobs = _jobs(files, segments, sums, opened, drop_cache)
        for number, nbytes, found, error in threads.run(jobs):
            if error is not None:
                sums[number].error = sums[number].error or error
            parts[number] += found
            done += nbytes
            if on_progress is not None:
                on_progress(done, total)
    for number, found in enumerate(parts):
        if sums[number].error is None:
            _put_together(sums[number], segments[number], found)
    return sums


def _jobs(
    files: Sequence[FileToRead],
    segments: Sequence[Sequence[_Segment]],
    sums: Sequence[FileSums],
    opened: ExitStack,
    drop_cache: bool,
) -> Iterator[Callable[[], tuple[int, int, list[_PartSum], str | None]]]:
    buffers = threading.local()
    for number, file in enumerate(files):
        try:
            fd = open_regular_fd(file.path)
        except OSError as error:
            sums[number].error = error.strerror
            continue
        opened.callback(os.close, fd)
        mapped = None
        if drop_cache:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            mapped = map_or_none(fd, file.nbytes)
        if mapped is not None:
            opened.callback(mapped.close)
        holes = [] if drop_cache else find_holes(fd, file.nbytes, WINDOW_NBYTES)
        unwritten: list[_Part] = []
        windows = list(_windows(segments[number], holes, unwritten))
        if unwritten:
            sums[number].hole_nbytes = sum(part.end - part.start for part in unwritten)
            yield partial(_sum_holes, number, unwritten)
        for first in range(0, len(windows), _WINDOWS_PER_JOB):
            job = windows[first : first + _WINDOWS_PER_JOB]
            yield partial(_sum_windows, number, fd, mapped, job, segments[number], file.count_non_finite, buffers)


def _segments(file: FileToRead) -> list[_Segment]:
    if file.header is None:
        return [_Segment(None, '', 0, file.nbytes)]
    return [
        _Segment(None, '', 0, file.header.data_start),
        *(_Segment(entry.name, entry.dtype, entry.start, entry.end) for entry in file.header.entries),
    ]


def _windows(segments: Sequence[_Segment], holes: Sequence[Range], unwritten: list[_Part]) -> Iterator[list[_Part]]:
    """Consecutive parts, together at most :data:`WINDOW_NBYTES`; no part is empty.

    Args:
        unwritten: Gets the parts that lie in holes, of any size.
    """
    window: list[_Part] = []
    nbytes = 0
    for part, is_hole in _parts(segments, holes):
        if window and (is_hole or nbytes + part.end - part.start > WINDOW_NBYTES):
            yield window
            window, nbytes = [], 0
        if is_hole:
            unwritten.append(part)
        else:
            window.append(part)
            nbytes += part.end - part.start
    if window:
        yield window


def _parts(segments: Sequence[_Segment], holes: Sequence[Range]) -> Iterator[tuple[_Part, bool]]:
    """All parts in their order, and whether each is in a hole."""
    for number, segment in enumerate(segments):
        position = segment.start
        width = DTYPE_NBYTES.get(segment.dtype, 1)
        for first, last in (*within(holes, segment.start, segment.end), (segment.end, segment.end)):
            # Holes are of pages, and what is counted is of whole elements
            first += (segment.start - first) % width
            last -= (last - segment.start) % width
            if last < first:
                continue
            for start in range(position, first, WINDOW_NBYTES):
                yield _Part(number, start, min(start + WINDOW_NBYTES, first)), False
            if last > first:
                yield _Part(number, first, last), True
            position = last


def _sum_holes(number: int, parts: Sequence[_Part]) -> tuple[int, int, list[_PartSum], None]:
    """As :func:`_sum_windows`."""
    found = [(part, checksum.crc32_of_zeros(part.end - part.start), 0) for part in parts]
    return number, sum(part.end - part.start for part in parts), found, None


def _sum_windows(
    number: int,
    fd: int,
    mapped: MappedFile | None,
    windows: Sequence[Sequence[_Part]],
    segments: Sequence[_Segment],
    counting: bool,
    buffers: threading.local,
) -> tuple[int, int, list[_PartSum], str | None]:
    """Runs on: a thread. File number, bytes done, sums, error."""
    if not hasattr(buffers, 'data'):
        buffers.data = memoryview(bytearray(WINDOW_NBYTES))
    found: list[_PartSum] = []
    nbytes = 0
    try:
        for window in windows:
            first, end = window[0].start, window[-1].end
            if mapped is None:
                view = buffers.data[: end - first]
                read_exactly(fd, first, view)
            else:
                view = mapped.view(first, end)
            with view:
                for part in window:
                    with view[part.start - first : part.end - first] as data:
                        dtype = segments[part.segment].dtype
                        non_finite = count_non_finite(data, dtype) if counting else 0
                        found.append((part, checksum.crc32(data), non_finite))
            nbytes += end - first
        if mapped is not None:
            mapped.forget(windows[0][0].start, windows[-1][-1].end)
    except OSError as error:
        return number, nbytes, [], error.strerror or str(error)
    return number, nbytes, found, None


def read_exactly(fd: int, offset: int, out: memoryview) -> None:
    """Fill ``out`` from ``offset`` on.

    Raises:
        OSError: The file cannot be read, or ends before.
    """
    while len(out):
        count = os.preadv(fd, [out], offset)
        if not count:
            raise OSError(f'the file ends at byte {offset}: it became shorter')
        out, offset = out[count:], offset + count


def _put_together(sums: FileSums, segments: Sequence[_Segment], parts: list[_PartSum]) -> None:
    parts.sort(key=lambda found: found[0].start)
    crcs = [0] * len(segments)
    for part, crc, non_finite in parts:
        nbytes = part.end - part.start
        crcs[part.segment] = checksum.combine(crcs[part.segment], crc, nbytes)
        sums.crc32 = checksum.combine(sums.crc32, crc, nbytes)
        name = segments[part.segment].name
        if non_finite and name is not None:
            sums.non_finite[name] = sums.non_finite.get(name, 0) + non_finite
    sums.tensors = {segment.name: crc for segment, crc in zip(segments, crcs, strict=True) if segment.name is not None}
