"""Writes an object to a store: bytes in order, split into parts. Only a few parts are in memory."""

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


class _DiscardedError(Exception):
    """Nobody wants the object any more."""


class Parts(Protocol):
    """How a store takes the parts of one object."""

    def send(self, number: int, data: bytearray) -> None:
        """Store a part; numbers count from 0. Runs on: one of the threads that send."""

    def finish(self, n_parts: int, whole: bytearray) -> str | None:
        """Make the object visible; returns its checksum, if any.

        Args:
            whole: The object, if no part was sent; else empty.
        """

    def discard(self) -> None:
        """Discard all parts."""


class StoredObject:
    """Written in order by one thread, sent by others; not visible before :meth:`end`.

    Args:
        told: Returns a context manager that turns errors of libraries into ours; entered around each of their calls.
        at_once: How many parts are sent at the same time; 1 sends them in order.
        senders: Threads that send; None starts some for this object.
        room: Room for parts in memory, including the one being filled; may be shared by objects that are written one
            after the other. None: room for :data:`PARTS_IN_MEMORY` parts of this object.

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
        room: threading.Semaphore | None = None,
    ) -> None:
        self.part_nbytes, self.nbytes = part_nbytes, 0
        self.checksum: str | None = None
        self._parts, self._told, self._at_once = parts, told, at_once
        self._own_senders = Senders(at_once) if senders is None else None
        self._senders = senders or self._own_senders
        self._room = threading.Semaphore(PARTS_IN_MEMORY) if room is None else room
        self._shares_room = room is not None
        self._lock = threading.Condition()
        self._todo: deque[tuple[int, bytearray]] = deque()
        self._n_sending = self._n_parts = 0
        self._error: Exception | None = None
        self._filled: bytearray | None = None  # it holds room for one part
        self._is_ending = self._is_over = False

    def write(self, data: Buffer) -> None:
        """Accept bytes. Waits while there is no room for another part.

        Raises:
            StoreError: An earlier part could not be sent.
        """
        view = memoryview(data).cast('B')
        self.nbytes += len(view)
        while len(view):
            if self._filled is None:
                self._room.acquire()
                self._filled = bytearray()
                self._raise()
            taken = min(len(view), self.part_nbytes - len(self._filled))
            self._filled += view[:taken]
            view = view[taken:]
            if len(self._filled) == self.part_nbytes:
                self._send_filled()

    def end(self) -> None:
        """Send the rest and make the object visible, in the background; :meth:`commit` waits for it."""
        if self._n_parts and self._filled and self._shares_room:
            self._send_filled()
        with self._lock:
            self._is_ending = True
            self._submit()

    def commit(self) -> None:
        """Send the rest and make the object visible.

        Raises:
            StoreError: Something was not sent, so the object does not exist.
        """
        if not self._is_ending:
            self.end()
        self._wait_until_over()
        self._raise()

    def discard(self) -> None:
        """Discard what was written; after :meth:`end` it may be too late.

        Never raises: what remains is later found as an unfinished upload.
        """
        with self._lock:
            self._error = self._error or _DiscardedError()
            while self._todo:
                self._todo.popleft()
                self._room.release()
            while not self._is_ending and self._n_sending:
                self._lock.wait()
        if self._is_ending:
            self._wait_until_over()
        else:
            self._forget()
            self._close_senders()

    def _wait_until_over(self) -> None:
        with self._lock:
            while not self._is_over:
                self._lock.wait()
        self._close_senders()

    def _close_senders(self) -> None:
        if self._own_senders is not None:
            self._own_senders.close()
            self._own_senders = None

    def _forget(self) -> None:
        self._give_room_back()
        with contextlib.suppress(Exception), self._told():
            self._parts.discard()

    def _give_room_back(self) -> None:
        filled, self._filled = self._filled, None
        if filled is not None:
            self._room.release()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _send_filled(self) -> None:
        with self._lock:
            self._todo.append((self._n_parts, self._filled))
            self._n_parts += 1
            self._filled = None
            self._submit()

    def _submit(self) -> None:
        """Called with the lock held."""
        while self._todo and self._n_sending < self._at_once:
            self._n_sending += 1
            number, data = self._todo.popleft()
            self._senders.submit(partial(self._send, number, [data]))
            del data  # now only the job refers to it
        if self._is_ending and not self._todo and not self._n_sending:
            self._senders.submit(self._finish)

    def _send(self, number: int, held: list[bytearray]) -> None:
        """Runs on: a thread that sends. The part is freed before its room is released."""
        data = held.pop()
        try:
            if self._error is None:
                with self._told():
                    self._parts.send(number, data)
        except Exception as error:  # raised by write() or commit()
            self._error = error
        del data
        self._room.release()
        with self._lock:
            self._n_sending -= 1
            self._submit()
            self._lock.notify_all()

    def _finish(self) -> None:
        """Runs on: a thread that sends, once all parts are sent."""
        try:
            if self._error is None:
                n_parts, rest = self._n_parts, self._filled or bytearray()
                with self._told():
                    if n_parts and rest:  # alone, since libraries copy what they send
                        self._parts.send(n_parts, rest)
                        n_parts, rest = n_parts + 1, bytearray()
                    self.checksum = self._parts.finish(n_parts, rest)
        except Exception as error:  # raised by commit()
            self._error = error
        if self._error is not None:
            self._forget()
        self._give_room_back()
        with self._lock:
            self._is_over = True
            self._lock.notify_all()


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

    def finish(self, n_parts: int, whole: bytearray) -> str | None:
        if self._file is None and not self._makes_folders:
            self._fs.pipe_file(self._path, bytes(whole))
            return None
        self.send(n_parts, whole)
        self._file.close()
        self._file = None
        return None

    def discard(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        from fsspec.spec import AbstractBufferedFile

        if not isinstance(file, AbstractBufferedFile):  # a file in a file system: it exists since it was opened
            file.close()
            self._fs.rm_file(self._path)
            return
        with contextlib.suppress(Exception):
            file.discard()
        file.closed = True  # closing would make the object visible
