"""Checksums of files and of the tensors in them: every byte that was written is read once, by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.files.holes import Range, within
from xhf_hooks.format import checksum
from xhf_hooks.format.nonfinite import count_non_finite
from xhf_hooks.format.safetensors import DTYPE_NBYTES, Header
from xhf_hooks.integrity.file_reader import FileReader

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


@dataclass
class _Part:
    """Bytes of the header (or of a whole file without tensors), or of one tensor: at most a window, or a hole."""

    tensor: str | None
    dtype: str
    start: int
    end: int
    is_hole: bool = False
    crc32: int = 0
    non_finite: int = 0


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
        drop_cache: Have everything from the disk; see :class:`.FileReader`.
        on_progress: Called in this thread with bytes done and bytes in all.

    Returns:
        One for each file, in the same order.
    """
    summings = [_Summing(file) for file in files]
    total, done = sum(file.nbytes for file in files), 0
    with ExitStack() as opened:
        for nbytes in threads.run(_jobs(summings, opened, drop_cache)):
            done += nbytes
            if on_progress is not None:
                on_progress(done, total)
    return [summing.finish() for summing in summings]


def _jobs(summings: Sequence[_Summing], opened: ExitStack, drop_cache: bool) -> Iterator[Callable[[], int]]:
    buffers = _Buffers()
    for summing in summings:
        windows = summing.open(opened, drop_cache)
        yield partial(int, summing.sums.hole_nbytes)  # done without reading
        for first in range(0, len(windows), _WINDOWS_PER_JOB):
            yield partial(summing.read, windows[first : first + _WINDOWS_PER_JOB], buffers)


class _Buffers(threading.local):
    """Each thread's own, for a window."""

    def __init__(self) -> None:
        self.window = memoryview(bytearray(WINDOW_NBYTES))


class _Summing:
    """One file on its way."""

    def __init__(self, file: FileToRead) -> None:
        self._file, self.sums = file, FileSums()
        self._parts: list[_Part] = []
        self._reader: FileReader | None = None

    def open(self, opened: ExitStack, drop_cache: bool) -> list[list[_Part]]:
        """What to read: consecutive parts, together at most :data:`WINDOW_NBYTES`; none of a file that is not there."""
        try:
            self._reader = FileReader(self._file.path, self._file.nbytes, from_disk=drop_cache)
        except OSError as error:
            self.sums.error = error.strerror
            return []
        opened.callback(self._reader.close)
        self._parts = list(_parts(self._file, self._reader.holes))
        windows: list[list[_Part]] = []
        room = 0
        for part in self._parts:
            nbytes = part.end - part.start
            if part.is_hole:
                self.sums.hole_nbytes += nbytes
                room = 0
                continue
            if nbytes > room:
                windows.append([])
                room = WINDOW_NBYTES
            windows[-1].append(part)
            room -= nbytes
        return windows

    def read(self, windows: Sequence[Sequence[_Part]], buffers: _Buffers) -> int:
        """Runs on: a thread. Bytes done."""
        nbytes = 0
        try:
            for window in windows:
                first, end = window[0].start, window[-1].end
                with self._reader.view(first, end, buffers.window) as view:
                    for part in window:
                        with view[part.start - first : part.end - first] as data:
                            part.crc32 = checksum.crc32(data)
                            if self._file.count_non_finite:
                                part.non_finite = count_non_finite(data, part.dtype)
                nbytes += end - first
            self._reader.forget(windows[0][0].start, windows[-1][-1].end)
        except OSError as error:
            self.sums.error = self.sums.error or error.strerror or str(error)
        return nbytes

    def finish(self) -> FileSums:
        """When all has been read."""
        sums, header = self.sums, self._file.header
        if sums.error is not None:
            return sums
        sums.tensors = {entry.name: 0 for entry in header.entries} if header is not None else {}
        for part in self._parts:
            nbytes = part.end - part.start
            crc = checksum.crc32_of_zeros(nbytes) if part.is_hole else part.crc32
            sums.crc32 = checksum.combine(sums.crc32, crc, nbytes)
            if part.tensor is not None:
                sums.tensors[part.tensor] = checksum.combine(sums.tensors[part.tensor], crc, nbytes)
            if part.tensor is not None and part.non_finite:
                sums.non_finite[part.tensor] = sums.non_finite.get(part.tensor, 0) + part.non_finite
        return sums


def _parts(file: FileToRead, holes: Sequence[Range]) -> Iterator[_Part]:
    """All parts in their order; none is empty."""
    header = file.header
    segments: list[tuple[str | None, str, int, int]] = [(None, '', 0, header.data_start if header else file.nbytes)]
    if header is not None:
        segments += [(entry.name, entry.dtype, entry.start, entry.end) for entry in header.entries]
    for name, dtype, start, end in segments:
        position, width = start, DTYPE_NBYTES.get(dtype, 1)
        for first, last in (*within(holes, start, end), (end, end)):
            # Holes are of pages, and what is counted is of whole elements
            first += (start - first) % width
            last -= (last - start) % width
            if last < first:
                continue
            for at in range(position, first, WINDOW_NBYTES):
                yield _Part(name, dtype, at, min(at + WINDOW_NBYTES, first))
            if last > first:
                yield _Part(name, dtype, first, last, is_hole=True)
            position = last
