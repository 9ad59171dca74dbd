"""What disk and loopback allow: moves as many bytes as a save, and does nothing else."""

from __future__ import annotations

import mmap
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from bench.ways import (
    BY,
    FLOOR,
    FLOOR_ALL,
    FLOOR_ALL_FSYNC,
    FLOOR_FSYNC,
    FLOOR_GATHER,
    FLOOR_SENT,
    FLUSHERS,
    SENDERS,
)
from xhf_hooks.writers.output_file import WriteBehind

_BLOCK_NBYTES = 16 * 2**20
_SOCKET_BLOCK_NBYTES = 4 * 2**20
#: Buffers that gloo's way has received and not yet written.
_N_BUFFERS = 3
_DIRECT_ALIGNMENT = 4096


class Floors:
    """The floors. Runs on: all ranks, every method.

    Bytes come from memory as large as the model, since a save does not find its bytes in the CPU cache, either.
    """

    def __init__(self, nbytes: int, bucket_nbytes: int) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._share = nbytes // self._world_size
        self._bucket_nbytes = bucket_nbytes
        self._connections: list[socket.socket] = []
        # Anonymous mapped memory is page-aligned, as O_DIRECT requires
        self._data = memoryview(mmap.mmap(-1, nbytes if self._rank == 0 else self._share))
        torch.frombuffer(self._data, dtype=torch.uint8).fill_(1)

    def ways(self) -> dict[str, Callable[[Path], None]]:
        """The floors by name; each writes into a folder that does not exist yet."""
        ways: dict[str, Callable[[Path], None]] = {
            FLOOR: self._on_one_rank,
            FLOOR_ALL: self._on_all_ranks,
            FLOOR_GATHER: self._all_gathered,
        }
        ways.update(
            {f'{FLOOR_SENT}{BY}{how}': send for how, send in zip(SENDERS, (self._gloo, self._sockets), strict=True)}
        )
        for how in FLUSHERS:
            ways[f'{FLOOR_FSYNC}{BY}{how}'] = lambda folder, how=how: self._on_one_rank(folder, how)
            ways[f'{FLOOR_ALL_FSYNC}{BY}{how}'] = lambda folder, how=how: self._on_all_ranks(folder, how)
        return ways

    def _on_one_rank(self, folder: Path, how: str = '') -> None:
        if self._rank == 0:
            folder.mkdir(parents=True)
            _write(folder / 'bytes', self._data, how)

    def _on_all_ranks(self, folder: Path, how: str = '') -> None:
        """Each process writes its part into a separate file."""
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f'bytes{self._rank}', self._data[: self._share], how)

    def _all_gathered(self, _: Path) -> None:
        """What XTuner and other peers wait for: every process gets everything, a bucket at a time."""
        bucket = torch.empty(self._bucket_nbytes // self._world_size * self._world_size, dtype=torch.uint8)
        share = torch.frombuffer(self._data, dtype=torch.uint8)[: self._share]
        for part in share.split(len(bucket) // self._world_size):
            dist.all_gather_into_tensor(bucket[: len(part) * self._world_size], part)

    def _sockets(self, folder: Path) -> None:
        """On rank 0, a thread for each other rank receives and writes, while rank 0 writes its own share."""
        connections = self._connect()
        if self._rank:
            connections[0].sendall(self._data)
        else:
            with _new_file(folder) as fd:

                def receive(number: int) -> None:
                    buffer = memoryview(bytearray(_SOCKET_BLOCK_NBYTES))
                    for at, nbytes in _blocks(self._share, _SOCKET_BLOCK_NBYTES):
                        got = 0
                        while got < nbytes:
                            n = connections[number].recv_into(buffer[got:nbytes], 0, socket.MSG_WAITALL)
                            if not n:
                                raise ConnectionError('the other process has ended')
                            got += n
                        os.pwrite(fd, buffer[:nbytes], (number + 1) * self._share + at)

                threads = [threading.Thread(target=receive, args=(n,)) for n in range(len(connections))]
                for thread in threads:
                    thread.start()
                _write_at(fd, self._data[: self._share], 0)
                for thread in threads:
                    thread.join()

    def _connect(self) -> list[socket.socket]:
        """Connect rank 0 with each other rank; connections stay open, so that wire.py can count their bytes."""
        if self._connections:
            return self._connections
        address: list[tuple[str, int] | None] = [None]
        if self._rank:
            dist.broadcast_object_list(address, 0)
            self._connections.append(socket.create_connection(address[0]))
            return self._connections
        with socket.create_server(('127.0.0.1', 0)) as server:
            address[0] = server.getsockname()
            dist.broadcast_object_list(address, 0)
            self._connections += [server.accept()[0] for _ in range(self._world_size - 1)]
        return self._connections

    def _gloo(self, folder: Path) -> None:
        """A thread writes received bytes while more are received."""
        blocks = list(_blocks(self._share, _BLOCK_NBYTES))
        if self._rank:
            share = torch.frombuffer(self._data, dtype=torch.uint8)
            for at, nbytes in blocks:
                dist.send(share[at : at + nbytes], 0)
            return
        with _new_file(folder) as fd:
            free: queue.Queue[torch.Tensor] = queue.Queue()
            full: queue.Queue[tuple[torch.Tensor, int, int] | None] = queue.Queue()
            for _ in range(_N_BUFFERS):
                free.put(torch.empty(_BLOCK_NBYTES, dtype=torch.uint8))

            def write() -> None:
                _write_at(fd, self._data[: self._share], 0)
                while (filled := full.get()) is not None:
                    buffer, nbytes, offset = filled
                    os.pwrite(fd, memoryview(buffer.numpy())[:nbytes], offset)
                    free.put(buffer)

            thread = threading.Thread(target=write)
            thread.start()
            for at, nbytes in blocks:  # from all ranks in turns, so that all send at once
                for sender in range(1, self._world_size):
                    buffer = free.get()
                    dist.recv(buffer[:nbytes], sender)
                    full.put((buffer, nbytes, sender * self._share + at))
            full.put(None)
            thread.join()


@contextmanager
def _new_file(folder: Path) -> Iterator[int]:
    """A new file in a new folder, open while the block runs."""
    folder.mkdir(parents=True)
    fd = os.open(folder / 'bytes', os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        yield fd
    finally:
        os.close(fd)


def _blocks(nbytes: int, block_nbytes: int) -> Iterator[tuple[int, int]]:
    """Start and size of each block."""
    for start in range(0, nbytes, block_nbytes):
        yield start, min(block_nbytes, nbytes - start)


def _write_at(fd: int, data: memoryview, offset: int, wrote: Callable[[int, int], None] | None = None) -> None:
    for start, nbytes in _blocks(len(data), _BLOCK_NBYTES):
        done = 0
        while done < nbytes:
            done += os.pwrite(fd, data[start + done : start + nbytes], offset + start + done)
        if wrote is not None:
            wrote(offset + start, nbytes)


def _write(path: Path, data: memoryview, how: str = '') -> None:
    """Make a file; ``how`` is one of FLUSHERS, or '' for no fsync."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    direct = how == 'O_DIRECT'
    fd = os.open(path, flags | (os.O_DIRECT if direct else 0))
    try:
        aligned = len(data) - len(data) % _DIRECT_ALIGNMENT if direct else len(data)
        _write_at(fd, data[:aligned], 0, WriteBehind(fd).wrote if how == 'sync_file_range' else None)
        if how:
            os.fsync(fd)
    finally:
        os.close(fd)
    if aligned < len(data):
        fd = os.open(path, os.O_WRONLY)
        _write_at(fd, data[aligned:], aligned)
        os.fsync(fd)
        os.close(fd)
