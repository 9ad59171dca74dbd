"""Rank 0 writes in a background thread while the next slices arrive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xhf_hooks.concurrency.low_priority import lower_priority
from xhf_hooks.format.checksum import crc32
from xhf_hooks.format.nonfinite import count_non_finite
from xhf_hooks.planning.types import Chunk, SavePlan
from xhf_hooks.registry import WRITERS
from xhf_hooks.writers.base import Writer
from xhf_hooks.writers.evidence import Sample, SampleTaker, require_samples
from xhf_hooks.writers.file_io.direct import AlignedBuffer
from xhf_hooks.writers.file_io.output_file import PART_NBYTES, FileIdentity, OutputFile, create_file
from xhf_hooks.writers.file_io.pieces import pieces
from xhf_hooks.writers.tally import Tally


@WRITERS.register_module(name='stream')
class StreamWriter(Writer):
    """Writes each chunk at its offset. At most ``pending_nbytes`` bytes wait to be written.

    Args:
        pending_nbytes: Limit of waiting bytes, beyond which :meth:`write` blocks. A larger chunk is accepted when
            nothing else waits.
        fsync: Flush files to the disk, and drop them from the page cache, before :meth:`finish` returns.
        beside_training: Whether training goes on meanwhile and must not be slowed down.
    """

    receives_local_shards = True

    def __init__(self, pending_nbytes: int, fsync: bool = True, *, beside_training: bool = False) -> None:
        self._limit = pending_nbytes
        self._fsync, self._beside_training = fsync, beside_training
        self._direct = AlignedBuffer(PART_NBYTES) if beside_training else None
        self._pending = 0
        self._room = threading.Condition()
        self._queue: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._folder = Path()
        self._made: Mapping[str, FileIdentity] = {}
        self._taker = SampleTaker()
        self._files: dict[str, Any] = {}  # each is opened at its first chunk
        # Started now, before training goes on: no thread can be started while the process exits
        self._thread: threading.Thread | None = threading.Thread(target=self._work, name='xhf-writer', daemon=True)
        self._thread.start()

    def create(self, plan: SavePlan, place: Path) -> dict[str, FileIdentity]:
        return {file.name: create_file(place / file.name, file.header, file.nbytes) for file in plan.files}

    def open(self, plan: SavePlan, place: Path, made: Mapping[str, FileIdentity]) -> None:
        self._folder, self._made, self._tally = place, made, Tally(plan)

    def look(self, samples: Iterable[Sample]) -> None:
        require_samples(self._folder, self._made, samples)

    def write(self, chunk: Chunk) -> None:
        nbytes = chunk.data.nbytes
        with self._room:
            self._room.wait_for(lambda: self._error or not self._pending or self._pending + nbytes <= self._limit)
            if self._error:
                raise self._error
            self._pending += nbytes
        self._queue.put(chunk)

    def finish(self) -> Tally:
        self._join()
        if not self._error:
            self._flush()
        self._close()
        if self._error:
            raise self._error
        self.samples = self._taker.samples()
        return self._tally

    def abort(self) -> None:
        self._error = self._error or OSError('the save was abandoned')
        self._join()
        self._close()

    def _join(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _close(self) -> None:
        error = None
        while self._files:
            try:
                self._files.popitem()[1].close()
            except OSError as caught:
                error = caught
        self._error = self._error or error

    def _work(self) -> None:
        if self._beside_training:
            lower_priority()
        while (chunk := self._queue.get()) is not None:
            error = None
            if self._error is None:
                try:
                    self._write(chunk)
                except Exception as caught:  # the thread must go on, or write() would wait forever
                    error = caught
                    if isinstance(error, OSError) and error.errno is not None:  # else it would hide the text
                        error.filename = chunk.placement.file
            nbytes = chunk.data.nbytes
            del chunk  # frees its memory before write() learns that there is room
            with self._room:
                self._error = self._error or error
                self._pending -= nbytes
                self._room.notify()

    def _write(self, chunk: Chunk) -> None:
        place = chunk.placement
        file = self._file(place.file)
        start = chunk.start
        for piece in pieces(chunk.data, place.offset + start):
            # Before the write: the checksum is of what was in memory
            self._tally.add(place, start, piece.nbytes, crc32(piece), count_non_finite(piece, place.dtype))
            if not self._beside_training:
                file.write(piece, place.offset + start)
            self._taker.see(place.file, place.offset + start, piece)
            start += piece.nbytes
        if self._beside_training:  # in one piece: each direct write waits for the disk
            file.write(chunk.data, place.offset + chunk.start)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = OutputFile(
                self._folder / name, self._made[name], write_behind=self._fsync, direct=self._direct
            )
        return self._files[name]

    def _flush(self) -> None:
        if self._fsync:
            for file in self._files.values():
                file.fsync()
