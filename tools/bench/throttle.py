"""Limits what a process writes or sends: the speed that a share gives one client, or an uplink."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

#: Bytes handed to the kernel at once: with smaller pieces, waiting costs more than sending.
_PIECE_NBYTES = 256 * 1024
#: What a client of a share has under way while its process waits for a core, such as 16 requests of NFS.
_REQUESTS_NBYTES = 16 * 2**20
#: What the kernel sends while a process waits for a core: a fraction of Linux's largest send buffer (tcp_wmem).
_BUFFER_NBYTES = 2**20


class Throttle:
    """Limits a rate, and counts bytes in ``nbytes``.

    A process that was late may catch up with what a buffer behind it holds, such as that of a socket. Idle time does
    not allow a longer burst.
    """

    def __init__(self, nbytes_per_sec: float, buffer_nbytes: int) -> None:
        self._rate, self._buffered_secs = nbytes_per_sec, buffer_nbytes / nbytes_per_sec
        self._lock = threading.Lock()
        self._due = 0.0
        self.nbytes = 0

    def limited(self, write: Callable[..., int]) -> Callable[..., int]:
        """A function that waits as long as its bytes would have taken, after those of other threads."""

        def write_and_wait(*args: Any) -> int:
            nbytes = write(*args)
            with self._lock:
                self.nbytes += nbytes
                self._due = max(self._due, time.perf_counter() - self._buffered_secs) + nbytes / self._rate
                wait = self._due - time.perf_counter()
            time.sleep(max(0.0, wait))
            return nbytes

        return write_and_wait


@contextmanager
def limited_writes(nbytes_per_sec: float) -> Iterator[None]:
    """Throttle this process's positional writes, which all weights use."""
    limited = Throttle(nbytes_per_sec, _REQUESTS_NBYTES).limited
    with mock.patch('os.pwrite', limited(os.pwrite)), mock.patch('os.pwritev', limited(os.pwritev)):
        yield


@contextmanager
def limited_sending(nbytes_per_sec: float) -> Iterator[Throttle]:
    """Throttle everything that this process sends through Python's sockets, like an uplink."""
    throttle, original = Throttle(nbytes_per_sec, _BUFFER_NBYTES), socket.socket.send
    send = throttle.limited(lambda self, data, *flags: original(self, memoryview(data)[:_PIECE_NBYTES], *flags))

    def send_all(self: socket.socket, data: Any, *flags: int) -> None:
        view = memoryview(data).cast('B')
        while len(view):
            view = view[send(self, view, *flags) :]

    def send_messages(self: socket.socket, buffers: Sequence[Any], *args: Any) -> int:
        return send(self, next((buffer for buffer in buffers if len(buffer)), b''))

    with mock.patch.multiple(socket.socket, create=True, send=send, sendall=send_all, sendmsg=send_messages):
        yield throttle
