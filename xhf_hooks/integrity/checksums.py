"""CRC-32 of files and of the tensors in them, in one pass by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.format import checksum
from xhf_hooks.format.nonfinite import count_non_finite
from xhf_hooks.format.safetensors import Header
from xhf_hooks.integrity.file_reader import FileReader

#: Bytes per read, a multiple of every element size; a job reads several windows.
WINDOW_NBYTES = 1 << 20
_WINDOWS_PER_JOB = 16


@dataclass
class FileSums:
    """The checksums of one file.

    Attributes:
        crc32: CRC-32 of the file.
        tensors: CRC-32 of each tensor.
        non_finite: Number of infinite and NaN elements, for tensors that have any; {} if not counted.
        error: Why the file could not be read; the other fields are then empty.
    """

    crc32: int = 0
    tensors: dict[str, int] = field(default_factory=dict)
    non_finite: dict[str, int] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class FileToRead:
    """A file to read; with a header, each tensor gets a checksum of its own."""

    path: Path
    nbytes: int
    header: Header | None = None
    count_non_finite: bool = False


@dataclass
class _Part:
    """At most a window of consecutive bytes: of one tensor, of the header, or of a file without header."""

    tensor: str | None
    dtype: str
    start: int
    end: int
    crc32: int = 0
    non_finite: int = 0


def sum_files(
    files: Sequence[FileToRead],
    threads: WorkerThreads,
    *,
    drop_cache: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[FileSums]:
    """Read all files and compute their checksums.

    Args:
        threads: Each has a buffer of one window.
        drop_cache: Read from the disk; see ``from_disk`` of :class:`.FileReader`.
        on_progress: Called in this thread with bytes done and total bytes.

    Returns:
        The checksums, in the order of ``files``.
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
        for first in range(0, len(windows), _WINDOWS_PER_JOB):
            yield partial(summing.read, windows[first : first + _WINDOWS_PER_JOB], buffers)


class _Buffers(threading.local):
    """Per thread: the buffer for one window."""

    def __init__(self) -> None:
        self.window = memoryview(bytearray(WINDOW_NBYTES))


class _Summing:
    """The state of one file."""

    def __init__(self, file: FileToRead) -> None:
        self._file, self.sums = file, FileSums()
        self._parts: list[_Part] = []
        self._reader: FileReader | None = None

    def open(self, opened: ExitStack, drop_cache: bool) -> list[list[_Part]]:
        """Open the file and cut it into windows of consecutive parts; [] if it cannot be opened."""
        try:
            self._reader = FileReader(self._file.path, self._file.nbytes, from_disk=drop_cache)
        except OSError as error:
            self.sums.error = error.strerror
            return []
        opened.callback(self._reader.close)
        self._parts = list(_parts(self._file))
        windows: list[list[_Part]] = []
        room = 0
        for part in self._parts:
            nbytes = part.end - part.start
            if nbytes > room:
                windows.append([])
                room = WINDOW_NBYTES
            windows[-1].append(part)
            room -= nbytes
        return windows

    def read(self, windows: Sequence[Sequence[_Part]], buffers: _Buffers) -> int:
        """Read some windows; returns the bytes done. Runs on: a worker thread."""
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
        """Combine the checksums of the parts, after all were read."""
        sums, header = self.sums, self._file.header
        if sums.error is not None:
            return sums
        sums.tensors = {entry.name: 0 for entry in header.entries} if header is not None else {}
        for part in self._parts:
            nbytes = part.end - part.start
            sums.crc32 = checksum.combine(sums.crc32, part.crc32, nbytes)
            if part.tensor is not None:
                sums.tensors[part.tensor] = checksum.combine(sums.tensors[part.tensor], part.crc32, nbytes)
            if part.tensor is not None and part.non_finite:
                sums.non_finite[part.tensor] = sums.non_finite.get(part.tensor, 0) + part.non_finite
        return sums


def _parts(file: FileToRead) -> Iterator[_Part]:
    """The parts in file order, none of them empty."""
    header = file.header
    segments: list[tuple[str | None, str, int, int]] = [(None, '', 0, header.data_start if header else file.nbytes)]
    if header is not None:
        segments += [(entry.name, entry.dtype, entry.start, entry.end) for entry in header.entries]
    for name, dtype, start, end in segments:
        for at in range(start, end, WINDOW_NBYTES):
            yield _Part(name, dtype, at, min(at + WINDOW_NBYTES, end))
