"""That the bytes of a save are where they should be, seen by a rank that did not write them.

A host whose caches name another file, or whose writes went nowhere, believes in what it has written. So each rank
keeps a few bytes of what it writes into every file, and when all have flushed, other ranks look for them, by a
descriptor of their own. That finds a host whose writes are not in the save's files at all; a few bytes that went
missing somewhere are found by reading everything, which is ``verify='full'``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.errors import IncompleteError
from xhf_hooks.writers.file_io.output_file import FileIdentity

_SAMPLE_NBYTES = 64
#: Of one rank.
_MOST_FILES = 16


@dataclass(frozen=True)
class Sample:
    """Some bytes that one rank has written at ``start`` of a file, not all of them zero."""

    file: str
    start: int
    data: bytes


class SampleTaker:
    """Keeps two samples for each file: of the first piece written, and of the last. Used by: one thread."""

    def __init__(self) -> None:
        self._first: dict[str, Sample] = {}
        self._last: dict[str, Sample] = {}

    def see(self, file: str, start: int, piece: memoryview) -> None:
        """A piece is written at ``start``."""
        middle = max(0, piece.nbytes // 2 - _SAMPLE_NBYTES)
        data = bytes(piece[middle : middle + _SAMPLE_NBYTES])
        if any(data):  # zeros are what a file has where nothing was written
            found = Sample(file, start + middle, data)
            self._first.setdefault(file, found)
            self._last[file] = found

    def samples(self) -> list[Sample]:
        """What was kept."""
        return list({sample: None for kept in (self._first, self._last) for sample in kept.values()})


def some_samples(samples: Iterable[Sample], rank: int) -> list[Sample]:
    """Those of at most :data:`_MOST_FILES` files, of others for each rank: opening files is what looking costs."""
    by_file = _by_file(samples)
    step = -(-len(by_file) // _MOST_FILES) or 1
    return [sample for name in list(by_file)[rank % step :: step] for sample in by_file[name]]


def require_samples(folder: Path, made: Mapping[str, FileIdentity], samples: Iterable[Sample]) -> None:
    """Look for what other ranks have written and flushed.

    Raises:
        IncompleteError: It is not there.
        TargetError: A file is not the one that rank 0 made.
        OSError: A file cannot be read.
    """
    for name, expected in _by_file(samples).items():
        path = folder / name
        fd = os.open(path, os.O_RDONLY)
        try:
            made[name].require(fd, path)
            for sample in expected:
                # From the server or the disk, where a page of ours is older
                os.posix_fadvise(fd, sample.start, len(sample.data), os.POSIX_FADV_DONTNEED)
                if os.pread(fd, len(sample.data), sample.start) != sample.data:
                    raise IncompleteError(
                        f'{path}: bytes {sample.start} to {sample.start + len(sample.data)}, which another rank has '
                        f'written and flushed, are not what this rank reads there: the file system has lost or '
                        f"misplaced them. Set writer='stream', with which rank 0 alone writes"
                    )
        finally:
            os.close(fd)


def _by_file(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    found = defaultdict(list)
    for sample in samples:
        found[sample.file].append(sample)
    return found
