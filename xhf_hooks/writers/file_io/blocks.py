"""Several threads write each byte once, at its place: for tensors that need not be gathered.

A file is cut into blocks of :data:`BLOCK_NBYTES`. A thread fills a buffer with the contents of one block, casting them,
and writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from xhf_hooks.errors import IncompleteError
from xhf_hooks.planning.types import Placement, SavePlan
from xhf_hooks.writers.file_io.output_file import OutputFile, create_file

BLOCK_NBYTES = 4 * 2**20


@dataclass(frozen=True)
class Part:
    """Consecutive bytes of one file that come from one tensor, or from the header.

    Attributes:
        placement: The tensor's placement; None for the header.
        read: The source tensor to read.
    """

    start: int
    end: int
    placement: Placement | None = None
    read: str = ''


@dataclass(frozen=True)
class Block:
    """Up to :data:`BLOCK_NBYTES` of one file from ``start``, a multiple of that. Parts may have gaps between them."""

    file: str
    start: int
    parts: tuple[Part, ...]


def cut_into_blocks(plan: SavePlan) -> Iterator[Block]:
    """Blocks of the headers and of sliced tensors; gathered tensors are left out."""
    plain: dict[str, list[Part]] = {file.name: [Part(0, len(file.header))] for file in plan.files}
    for group in plan.sliced:
        for place in group.placements:
            plain[place.file].append(Part(place.offset, place.offset + place.nbytes, place, group.reads[0].name))
    for file, parts in plain.items():
        filling: list[Part] = []
        for part in sorted(parts, key=lambda part: part.start):
            start = part.start
            while start < part.end:
                if filling and start // BLOCK_NBYTES != filling[0].start // BLOCK_NBYTES:
                    yield _block(file, filling)
                    filling = []
                end = min(part.end, start - start % BLOCK_NBYTES + BLOCK_NBYTES)
                filling.append(replace(part, start=start, end=end))
                start = end
        if filling:
            yield _block(file, filling)


def _block(file: str, parts: list[Part]) -> Block:
    return Block(file, parts[0].start - parts[0].start % BLOCK_NBYTES, tuple(parts))


class BlockFile:
    """A new file of known size. Several threads write to it at once, each its own bytes, and read it back.

    Raises:
        OSError: The file exists, or cannot be created.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        create_file(path, b'', nbytes)
        self._file = OutputFile(path)
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError:
            self._file.close()
            raise

    def write_block(self, block: Block, buffer: memoryview) -> None:
        """Write the parts of a block; the buffer starts with the byte at ``block.start``."""
        for start, end in _runs(block.parts):
            self.write(start, buffer[start - block.start : end - block.start])

    def write(self, start: int, data: memoryview) -> None:
        """Write bytes of any length."""
        self._file.write(data, start)

    def finish(self, fsync: bool) -> None:
        """Flush the file if ``fsync`` is set."""
        if fsync:
            self._file.fsync()

    def require_block(self, block: Block, buffer: memoryview) -> None:
        """Compare the parts of a block with what the file holds.

        Raises:
            IncompleteError: They differ.
        """
        for start, end in _runs(block.parts):
            self.require(start, buffer[start - block.start : end - block.start])

    def require(self, start: int, data: memoryview) -> None:
        """Compare bytes with what the file holds, a block at a time.

        Raises:
            IncompleteError: They differ.
        """
        for position in range(0, data.nbytes, BLOCK_NBYTES):
            expected = data[position : position + BLOCK_NBYTES]
            if os.pread(self._fd, expected.nbytes, start + position) != expected:
                raise IncompleteError(
                    f'{self.path}: read back, bytes {start + position} to {start + position + expected.nbytes} are not '
                    f'those that were written; the disk may be failing. Convert again, to another disk'
                )

    def drop_cache(self) -> None:
        """Drop the file from the page cache, so that the next reads come from the disk."""
        self._file.fsync()
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file, in any state."""
        os.close(self._fd)
        self._file.close()


def _runs(parts: tuple[Part, ...]) -> Iterator[tuple[int, int]]:
    """Join parts without gaps between them."""
    start, end = parts[0].start, parts[0].end
    for part in parts[1:]:
        if part.start != end:
            yield start, end
            start = part.start
        end = part.end
    yield start, end
