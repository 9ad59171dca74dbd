"""Checks that other ranks see the bytes that a rank has written.

A host cannot detect by itself that its caches refer to another file, or that its writes were lost. So each rank keeps
a few bytes of what it writes into every file, and when all ranks have flushed, other ranks read them with their own
descriptors. This finds hosts whose writes are not in the save's files at all. To find single lost bytes, everything
must be read (``verify='full'``).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.errors import IncompleteError
from xhf_hooks.writers.output_file import FileIdentity

_SAMPLE_NBYTES = 64
#: Most files in which one rank checks samples.
_MOST_FILES = 16


@dataclass(frozen=True)
class Sample:
    """Some bytes, not all zero, that one rank has written at offset ``start`` of a file."""

    file: str
    start: int
    data: bytes


class SampleTaker:
    """Keeps two samples per file: from the first piece written and from the last. Used by: one thread."""

    def __init__(self) -> None:
        self._first: dict[str, Sample] = {}
        self._last: dict[str, Sample] = {}

    def see(self, file: str, start: int, piece: memoryview) -> None:
        """Take a sample of a piece that is written at ``start``."""
        middle = max(0, piece.nbytes // 2 - _SAMPLE_NBYTES)
        data = bytes(piece[middle : middle + _SAMPLE_NBYTES])
        if any(data):  # unwritten parts of a file are zeros, too
            found = Sample(file, start + middle, data)
            self._first.setdefault(file, found)
            self._last[file] = found

    def samples(self) -> list[Sample]:
        """All samples taken."""
        return list({sample: None for kept in (self._first, self._last) for sample in kept.values()})


def some_samples(samples: Iterable[Sample], rank: int) -> list[Sample]:
    """Samples of at most :data:`_MOST_FILES` files, different ones on each rank. Opening files is the main cost."""
    by_file = _by_file(samples)
    step = -(-len(by_file) // _MOST_FILES) or 1
    return [sample for name in list(by_file)[rank % step :: step] for sample in by_file[name]]


def require_samples(folder: Path, made: Mapping[str, FileIdentity], samples: Iterable[Sample]) -> None:
    """Check that what other ranks have written and flushed is in the files.

    Raises:
        IncompleteError: A sample is missing.
        TargetError: A file is not the one that rank 0 made.
        OSError: A file cannot be read.
    """
    for name, expected in _by_file(samples).items():
        path = folder / name
        fd = os.open(path, os.O_RDONLY)
        try:
            made[name].require(fd, path)
            for sample in expected:
                # Read from the server or the disk, not from a stale page of this host
                os.posix_fadvise(fd, sample.start, len(sample.data), os.POSIX_FADV_DONTNEED)
                if os.pread(fd, len(sample.data), sample.start) != sample.data:
                    raise IncompleteError(
                        f'{path}: bytes {sample.start} to {sample.start + len(sample.data)}, which another rank has '
                        f'written and flushed, are not what this rank reads there: the file system has lost or '
                        f"misplaced them. Set writer='stream', so that only rank 0 writes"
                    )
        finally:
            os.close(fd)


def _by_file(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    found = defaultdict(list)
    for sample in samples:
        found[sample.file].append(sample)
    return found
