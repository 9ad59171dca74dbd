"""Writes an object to a store: bytes in order, split into parts, only a few of which are in memory."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from xhf_hooks.stores.senders import Senders

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from typing_extensions import Buffer

#: Number of parts that are being filled or sent.
PARTS_IN_MEMORY = 2


class Parts(Protocol):
    """How a store takes the parts of one object."""

    def send(self, number: int, data: bytearray) -> None:
        """Store a part; numbers count from 0. Runs on: one of the threads that send."""

    def finish(self, n_parts: int, rest: bytearray) -> str | None:
        """Make the object visible, with a last part that may be empty; returns its checksum if there is one."""

    def discard(self) -> None:
        """Discard all parts."""


class StoredObject:
    """An object that one thread writes in order and others send. It is not visible before :meth:`commit`.

    Args:
        told: Returns a context that turns errors of libraries into StoreError; entered around each call of theirs.
        at_once: How many parts are sent at the same time; 1 sends them in order.
        senders: Threads that send; None starts some for this object.
        n_parts: Number of parts in memory, including the one that is being filled.

    Attributes:
        checksum: After :meth:`commit`, the store's checksum of what was sent; None if it reports none.
    """

    def __init__(
        self,
        parts: Parts,
        told: Callable[[], AbstractContextManager[None]],
        part_nbytes: int,
        at_once: int,
        senders: Senders | None = None,
        n_parts: int = PARTS_IN_MEMORY,
    ) -> None:
        self.part_nbytes, self.nbytes = part_nbytes, 0
        self.checksum: str | None = None
        self._parts, self._told, self._at_once = parts, told, at_once
        self._own_senders = Senders(min(at_once, n_parts)) if senders is None else None
        self._senders = senders or self._own_senders
        self._room = threading.Semaphore(n_parts - 1)  # one is being filled
        self._lock = threading.Condition()
        self._todo: deque[tuple[int, bytearray]] = deque()
        self._n_sending = self._n_parts = 0
        self._error: Exception | None = None
        self._filled = bytearray()

    def write(self, data: Buffer) -> None:
        """Accept bytes. Waits while there is no memory for another part.

        Raises:
            StoreError: An earlier part could not be sent.
        """
        view = memoryview(data).cast('B')
        self.nbytes += len(view)
        while len(view):
            taken = min(len(view), self.part_nbytes - len(self._filled))
            self._filled += view[:taken]
            view = view[taken:]
            if len(self._filled) == self.part_nbytes:
                with self._lock:
                    self._todo.append((self._n_parts, self._filled))
                    self._submit()
                self._n_parts += 1
                self._room.acquire()
                self._filled = bytearray()
                self._raise()

    def commit(self) -> None:
        """Send the rest and make the object visible.

        Raises:
            StoreError: Something was not sent, so the object does not exist.
        """
        self._wait_until_sent()
        try:
            self._raise()
            with self._told():
                self.checksum = self._parts.finish(self._n_parts, self._filled)
        except Exception:
            self.discard()
            raise
        self._end()

    def discard(self) -> None:
        """Discard what was written. Never raises: leftovers are found as unfinished uploads."""
        with self._lock:
            self._todo.clear()
        self._wait_until_sent()
        self._end()
        with contextlib.suppress(Exception), self._told():
            self._parts.discard()

    def _end(self) -> None:
        self._filled = bytearray()
        if self._own_senders is not None:
            self._own_senders.close()
            self._own_senders = None

    def _wait_until_sent(self) -> None:
        with self._lock:
            while self._todo or self._n_sending:
                self._lock.wait()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _submit(self) -> None:
        """Called with the lock held."""
        while self._todo and self._n_sending < self._at_once:
            self._n_sending += 1
            self._senders.submit(partial(self._send, *self._todo.popleft()))

    def _send(self, number: int, data: bytearray) -> None:
        """Runs on: a thread that sends."""
        try:
            if self._error is None:
                with self._told():
                    self._parts.send(number, data)
        except Exception as error:  # raised by write() or commit()
            self._error = error
        del data
        with self._lock:
            self._n_sending -= 1
            self._submit()
            self._lock.notify_all()
        self._room.release()


class SequentialParts:
    """Parts that fsspec writes in order, for any kind of store."""

    def __init__(self, file_system: AbstractFileSystem, path: str, part_nbytes: int, *, makes_folders: bool) -> None:
        self._fs, self._path, self._part_nbytes = file_system, path, part_nbytes
        self._makes_folders = makes_folders
        self._file: Any = None

    def send(self, number: int, data: bytearray) -> None:
        if self._file is None:
            if self._makes_folders:
                self._fs.makedirs(self._fs._parent(self._path), exist_ok=True)
            self._file = self._fs.open(self._path, 'wb', block_size=self._part_nbytes)
        self._file.write(data)

    def finish(self, n_parts: int, rest: bytearray) -> str | None:
        if self._file is None and not self._makes_folders:
            self._fs.pipe_file(self._path, bytes(rest))
            return None
        self.send(n_parts, rest)
        self._file.close()
        self._file = None
        return None

    def discard(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        from fsspec.spec import AbstractBufferedFile

        if not isinstance(file, AbstractBufferedFile):  # a file of a file system, which exists since it was opened
            file.close()
            self._fs.rm_file(self._path)
            return
        with contextlib.suppress(Exception):
            file.discard()
        file.closed = True  # closing would make the object visible
