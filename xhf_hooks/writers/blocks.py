"""Every byte written once, at its place, by several threads: for tensors that need not be gathered.

A file is cut into blocks of :data:`BLOCK_NBYTES`. A thread fills a page-aligned buffer with all that lies in one
block, cast on the way, and writes it past the page cache (O_DIRECT; why, see :mod:`.output_file`). The ragged ends,
where a block is shared with a tensor that is made of others, are kept and written last, through the page cache:
direct and cached writes to one page at the same time would leave either.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.errors import IncompleteError
from xhf_hooks.records import Group, SavePlan

BLOCK_NBYTES = 4 * 2**20
_PAGE_NBYTES = 4096


@dataclass(frozen=True)
class Part:
    """Consecutive bytes of one file that come from one place: a tensor that is read as it is, or the header."""

    start: int
    end: int
    group: Group | None


@dataclass(frozen=True)
class Block:
    """At most :data:`BLOCK_NBYTES` of one file, from ``start`` on, a multiple of that; parts may leave gaps."""

    file: str
    start: int
    parts: tuple[Part, ...]


def cut_into_blocks(plan: SavePlan) -> Iterator[Block]:
    """All that is read as it is, and the headers; not what groups with a ``combine`` make."""
    plain: dict[str, list[Part]] = {file.name: [Part(0, len(file.header), None)] for file in plan.files}
    for bucket in plan.buckets:
        for group in bucket.groups:
            if group.combine is None:
                (place,) = group.placements
                plain[place.file].append(Part(place.offset, place.offset + place.nbytes, group))
    for file, parts in plain.items():
        filling: list[Part] = []
        for part in sorted(parts, key=lambda part: part.start):
            start = part.start
            while start < part.end:
                if filling and start // BLOCK_NBYTES != filling[0].start // BLOCK_NBYTES:
                    yield _block(file, filling)
                    filling = []
                end = min(part.end, start - start % BLOCK_NBYTES + BLOCK_NBYTES)
                filling.append(Part(start, end, part.group))
                start = end
        if filling:
            yield _block(file, filling)


def _block(file: str, parts: list[Part]) -> Block:
    return Block(file, parts[0].start - parts[0].start % BLOCK_NBYTES, tuple(parts))


class BlockBuffer:
    """Page-aligned memory for one block; one for each thread."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BLOCK_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data = memoryview(self._memory)


class BlockFile:
    """A file of a known size that several threads write at once, each its own bytes.

    Raises:
        OSError: The file exists, or cannot be made.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._direct_fd: int | None = None
        self._is_direct = False
        self._ragged: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        try:
            os.ftruncate(self._fd, nbytes)
            self._direct_fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
            self._is_direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:  # which means: this file system has no direct I/O
                self.close()
                raise

    def write_block(self, block: Block, buffer: BlockBuffer) -> None:
        """Write the parts of a block; the buffer begins with the byte at ``block.start``."""
        for start, end in _runs(block.parts):
            self.write(start, buffer.data[start - block.start : end - block.start])

    def write_anywhere(self, offset: int, data: memoryview, buffer: BlockBuffer) -> None:
        """Write bytes of any address and length, through the buffer."""
        done = 0
        while done < data.nbytes:
            position = offset + done
            in_block = position % BLOCK_NBYTES
            count = min(data.nbytes - done, BLOCK_NBYTES - in_block)
            aligned = buffer.data[in_block : in_block + count]
            aligned[:] = data[done : done + count]
            self.write(position, aligned)
            done += count

    def write(self, start: int, data: memoryview) -> None:
        """Write bytes whose address is aligned to a page as ``start`` is."""
        end = start + data.nbytes
        first = start + -start % _PAGE_NBYTES
        last = end - end % _PAGE_NBYTES
        if not self._is_direct:
            self._write_all(start, data)
            return
        if first >= last:
            self._keep(start, data)
            return
        self._keep(start, data[: first - start])
        done = first
        while done < last:
            try:
                done += os.pwrite(self._direct_fd, data[done - start : last - start], done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False  # opened, and yet refused
            if not self._is_direct or done % _PAGE_NBYTES:
                self._write_all(done, data[done - start : last - start])
                break
        self._keep(last, data[last - start :])

    def finish(self, fsync: bool) -> None:
        """Write what was kept, and flush."""
        for start, data in self._ragged:
            self._write_all(start, memoryview(data))
        self._ragged = []
        if fsync:
            os.fsync(self._fd)

    def require_block(self, block: Block, buffer: BlockBuffer) -> None:
        """Compare the parts of a block with what the file holds.

        Raises:
            IncompleteError: They differ.
        """
        for start, end in _runs(block.parts):
            self.require(start, buffer.data[start - block.start : end - block.start])

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
        """Let what is read next come from the disk."""
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close it, whatever state it is in."""
        if self._direct_fd is not None:
            os.close(self._direct_fd)
            self._direct_fd = None
        os.close(self._fd)

    def _keep(self, start: int, data: memoryview) -> None:
        if data.nbytes:
            with self._lock:
                self._ragged.append((start, bytes(data)))

    def _write_all(self, start: int, data: memoryview) -> None:
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._fd, data[done:], start + done)


def _runs(parts: tuple[Part, ...]) -> Iterator[tuple[int, int]]:
    """Parts without a gap between them, together."""
    start, end = parts[0].start, parts[0].end
    for part in parts[1:]:
        if part.start != end:
            yield start, end
            start = part.start
        end = part.end
    yield start, end
