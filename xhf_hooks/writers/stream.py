"""Rank 0 writes, in a background thread, while the next bucket is gathered."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path

from xhf_hooks.records import Chunk, SavePlan, WriteReceipt
from xhf_hooks.registry import WRITERS
from xhf_hooks.writers.base import Writer


@WRITERS.register_module(name='stream')
class StreamWriter(Writer):
    """Writes each chunk at its offset; holds at most ``pending_nbytes`` that are not on their way to disk.

    Args:
        pending_nbytes: Bytes that may wait; :meth:`write` waits for room beyond that. A chunk larger than
            this is accepted when nothing else waits.
    """

    def __init__(self, pending_nbytes: int) -> None:
        self._limit = pending_nbytes
        self._pending = 0
        self._room = threading.Condition()
        self._queue: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._fds: dict[str, int] = {}
        self._receipts: list[WriteReceipt] = []
        self._thread: threading.Thread | None = None

    def open(self, plan: SavePlan, folder: Path, rank: int) -> None:
        for file in plan.files:
            if file.owner != rank:
                continue
            fd = os.open(folder / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            self._fds[file.name] = fd
            os.ftruncate(fd, file.nbytes)
            _write_all(fd, memoryview(file.header), 0)
            self._receipts.append(WriteReceipt(file.name, file.nbytes))
        if self._fds:
            self._thread = threading.Thread(target=self._work, name='xhf-stream-writer', daemon=True)
            self._thread.start()

    def write(self, chunk: Chunk) -> None:
        nbytes = chunk.data.nbytes
        with self._room:
            self._room.wait_for(lambda: self._error or not self._pending or self._pending + nbytes <= self._limit)
            if self._error:
                raise self._error
            self._pending += nbytes
        self._queue.put(chunk)

    def finish(self) -> list[WriteReceipt]:
        self._stop()
        if self._error:
            raise self._error
        return self._receipts

    def abort(self) -> None:
        self._error = self._error or OSError('the save was given up')
        self._stop()

    def _stop(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        error = None
        while self._fds:
            try:
                os.close(self._fds.popitem()[1])
            except OSError as caught:
                error = caught
        self._error = self._error or error

    def _work(self) -> None:
        while (chunk := self._queue.get()) is not None:
            error = None
            if self._error is None:
                try:
                    _write_all(self._fds[chunk.placement.file], chunk.data, chunk.placement.offset)
                except Exception as caught:  # the thread must live on, or write() would wait for ever
                    error = caught
                    if isinstance(error, OSError):
                        error.filename = chunk.placement.file
            nbytes = chunk.data.nbytes
            del chunk  # before room is announced: its memory must be free by then
            with self._room:
                self._error = self._error or error
                self._pending -= nbytes
                self._room.notify()


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:], offset + done)
