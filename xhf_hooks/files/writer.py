"""Writes chunks into the planned files, in a background thread while the next ones are made or arrive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from xhf_hooks.files.output_file import FileIdentity, OutputFile, create_file
from xhf_hooks.files.tally import Tally
from xhf_hooks.format.checksum import count_non_finite, crc32
from xhf_hooks.planning.plan import SavePlan
from xhf_hooks.planning.types import Chunk
from xhf_hooks.system.threads import lower_priority

#: Small enough for a processor's cache: each piece is counted, checksummed and written before the next.
PIECE_NBYTES = 2**20
#: Size of the largest element.
_ELEMENT_NBYTES = 8
#: Chunks go to the thread in batches of so many bytes or chunks: a change of threads takes longer than a small write.
_BATCH_NBYTES, _BATCH_LENGTH = 2**16, 64


class Writer:
    """Writes each chunk at its offset. Any number of ranks may write into the same files.

    A save calls :meth:`create` on rank 0 and broadcasts the result. Then it calls on each rank :meth:`open`,
    :meth:`write` any number of times, :meth:`finish`, and, however it ended, :meth:`abort`. One writer serves one save
    after another. Used by: one thread at a time.

    Args:
        pending_nbytes: Limit of waiting bytes, beyond which :meth:`write` blocks. A larger chunk is accepted when
            nothing else waits.
        in_background: Whether training goes on meanwhile and must not be slowed down.
        stays_cached: Leave the files in the page cache, for somebody who reads them at once.
    """

    def __init__(self, pending_nbytes: int, *, in_background: bool = False, stays_cached: bool = False) -> None:
        self._limit_nbytes = pending_nbytes
        self._in_background = in_background
        self._stays_cached = stays_cached
        self._folder = Path()
        self._made: Mapping[str, FileIdentity] = {}
        self._files: dict[str, OutputFile] = {}  # each is opened at its first chunk
        self._opened = ExitStack()
        self._is_closed = False
        self._tally = Tally([])
        self._error: Exception | None = None
        self._batches: queue.SimpleQueue[list[Chunk] | None] = queue.SimpleQueue()  # None ends the thread
        self._batch: list[Chunk] = []  # not handed to the thread yet
        self._batch_nbytes = 0
        self._batch_limit_nbytes = min(_BATCH_NBYTES, pending_nbytes // _BATCH_LENGTH)  # small beside what may wait
        self._changed = threading.Condition()  # of what follows, and of the error
        self._n_pending = self._pending_nbytes = 0

    def start(self) -> Writer:
        """Start the thread; returns this writer. Call it before training: a process that exits can start no thread."""
        threading.Thread(target=self._work, name='xhf-writer', daemon=True).start()
        return self

    def create(self, plan: SavePlan, staging: Path) -> dict[str, FileIdentity]:
        """Create the planned files with their headers, and reserve their disk space. Runs on: rank 0.

        Returns:
            File name to identity, with which other ranks check that they open the same files.
        """
        return {file.name: create_file(staging / file.name, file.header, file.nbytes) for file in plan.files}

    def open(self, plan: SavePlan, staging: Path, made: Mapping[str, FileIdentity]) -> None:
        """Begin to write into the created files.

        Raises:
            OSError: The writer is closed: nobody would write.
        """
        if self._is_closed:
            raise OSError('the writer is closed, and no save can use it')
        self.abort()
        self._folder = staging
        self._made = made
        self._tally = Tally(plan.placements)
        self._error = None

    def write(self, chunk: Chunk) -> None:
        """Accept a chunk. May wait for free memory first, and may return before the chunk is on disk.

        Raises:
            OSError: This or an earlier chunk could not be written.
            TargetError: A file is not the one that rank 0 made.
        """
        self._batch.append(chunk)
        self._batch_nbytes += chunk.data.nbytes
        if self._batch_nbytes >= self._batch_limit_nbytes or len(self._batch) == _BATCH_LENGTH:
            self._hand_over_batch()

    def finish(self) -> Tally:
        """Wait for all chunks, flush the files to the disk and close them; returns what this rank has written.

        Raises:
            OSError: A chunk could not be written.
            TargetError: A file is not the one that rank 0 made.
        """
        self._hand_over_batch()
        self._wait()
        if self._error is not None:
            raise self._error
        for file in self._files.values():
            file.fsync()
        self._opened.close()
        tally = self._tally
        self.abort()
        return tally

    def abort(self) -> None:
        """Drop pending chunks and close the files. Never raises."""
        self._error = self._error or OSError('the save was abandoned')
        self._batch, self._batch_nbytes = [], 0
        self._wait()
        with suppress(OSError):
            self._opened.close()
        self._files = {}
        # The thread keeps this writer, and an error's traceback would keep the model
        self._error, self._tally = OSError('no save is open'), Tally([])

    def close(self) -> None:
        """End the thread. Never raises."""
        self._is_closed = True
        self._batches.put(None)

    def _hand_over_batch(self) -> None:
        """Let the thread write what was accepted, once there is room."""
        batch, nbytes = self._batch, self._batch_nbytes
        self._batch, self._batch_nbytes = [], 0

        def can_go_on() -> bool:
            has_room = not self._n_pending or self._pending_nbytes + nbytes <= self._limit_nbytes
            return has_room or self._error is not None

        with self._changed:
            self._changed.wait_for(can_go_on)
            if self._error is not None:
                raise self._error
            self._n_pending += 1
            self._pending_nbytes += nbytes
        self._batches.put(batch)

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._n_pending)

    def _work(self) -> None:
        if self._in_background:
            lower_priority()
        while (batch := self._batches.get()) is not None:
            error = None
            if self._error is None:
                try:
                    self._write_each(batch)
                except Exception as caught:  # the thread must go on, or write() would wait forever
                    error = caught
            nbytes = sum(chunk.data.nbytes for chunk in batch)
            del batch  # frees their memory before write() learns that there is room
            with self._changed:
                self._error = self._error or error
                self._n_pending -= 1
                self._pending_nbytes -= nbytes
                self._changed.notify()
            del error  # or its traceback would keep the model in memory

    def _write_each(self, batch: Iterable[Chunk]) -> None:
        for chunk in batch:
            self._write(chunk)

    def _write(self, chunk: Chunk) -> None:
        placement = chunk.placement
        file = self._file(placement.file)
        offset = placement.offset + chunk.start
        crc = non_finite = 0
        for start, end in cuts(chunk.data.nbytes, offset):
            piece = chunk.data[start:end]
            # Before the write: the checksum is of what was in memory
            crc = crc32(piece, crc)
            non_finite += count_non_finite(piece, placement.dtype)
            if not self._in_background:
                file.write(piece, offset + start)
        if self._in_background:  # in one piece: each direct write waits for the disk
            file.write(chunk.data, offset)
        self._tally.add(placement, chunk.start, chunk.data.nbytes, crc, non_finite)

    def _file(self, name: str) -> OutputFile:
        if name not in self._files:
            how = dict(direct=self._in_background, stays_cached=self._stays_cached)
            file = OutputFile.open(self._folder / name, self._made[name], **how)
            self._opened.callback(file.close)
            self._files[name] = file
        return self._files[name]


def cuts(nbytes: int, offset: int, part_nbytes: int = PIECE_NBYTES) -> Iterator[tuple[int, int]]:
    """Start and end of parts that end at multiples of ``part_nbytes`` in the file, always between two elements.

    Two ranks write one file of 0.85 GB on ext4 in 0.092 s so, and in 0.103 s in parts of 2 MB that begin anywhere.
    Only one process at a time writes to a file, so a faster write helps all ranks.

    Args:
        nbytes: Size of whole elements.
        offset: Their offset in the file.
    """
    start, end = 0, -offset % part_nbytes // _ELEMENT_NBYTES * _ELEMENT_NBYTES or part_nbytes
    while start < nbytes:
        yield start, min(end, nbytes)
        start, end = end, end + part_nbytes
