"""What disk and loopback allow: moves as many bytes as a save, and does nothing else."""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from bench.ways import FLOOR, FLOOR_ALL, FLOOR_ALL_FSYNC, FLOOR_FSYNC, FLOOR_GATHER, FLOOR_SENT

_BLOCK_NBYTES = 16 * 2**20
#: Buffers that are received and not yet written.
_N_BUFFERS = 3
_DIRECT_ALIGNMENT = 4096


class Floors:
    """The floors. Runs on: all ranks.

    Bytes come from memory as large as the model, since a save does not find its bytes in the CPU cache, either.
    """

    def __init__(self, nbytes: int, bucket_nbytes: int) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._share = nbytes // self._world_size
        self._bucket_nbytes = bucket_nbytes
        # Anonymous mapped memory is page-aligned, as O_DIRECT requires
        self._data = memoryview(mmap.mmap(-1, nbytes if self._rank == 0 else self._share))
        torch.frombuffer(self._data, dtype=torch.uint8).fill_(1)

    def ways(self) -> dict[str, Callable[[Path], None]]:
        """The floors by name; each writes into a folder that does not exist yet."""
        return {
            FLOOR: self._on_one_rank,
            FLOOR_ALL: self._on_all_ranks,
            FLOOR_GATHER: self._all_gathered,
            FLOOR_SENT: self._gloo,
            FLOOR_FSYNC: partial(self._on_one_rank, fsync=True),
            FLOOR_ALL_FSYNC: partial(self._on_all_ranks, fsync=True),
        }

    def _on_one_rank(self, folder: Path, fsync: bool = False) -> None:
        if self._rank == 0:
            folder.mkdir(parents=True)
            _write(folder / 'bytes', self._data, fsync)

    def _on_all_ranks(self, folder: Path, fsync: bool = False) -> None:
        """Each process writes its part into a separate file."""
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f'bytes{self._rank}', self._data[: self._share], fsync)

    def _all_gathered(self, _: Path) -> None:
        """What XTuner and other peers wait for: every process gets everything, a bucket at a time."""
        bucket = torch.empty(self._bucket_nbytes // self._world_size * self._world_size, dtype=torch.uint8)
        share = torch.frombuffer(self._data, dtype=torch.uint8)[: self._share]
        for part in share.split(len(bucket) // self._world_size):
            dist.all_gather_into_tensor(bucket[: len(part) * self._world_size], part)

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


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    for start, nbytes in _blocks(len(data), _BLOCK_NBYTES):
        done = 0
        while done < nbytes:
            done += os.pwrite(fd, data[start + done : start + nbytes], offset + start + done)


def _write(path: Path, data: memoryview, fsync: bool) -> None:
    """Make a file. With fsync, O_DIRECT writes all but the end; of several methods this was the fastest."""
    aligned = len(data) - len(data) % _DIRECT_ALIGNMENT if fsync else 0
    if aligned:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        _write_at(fd, data[:aligned], 0)
        os.close(fd)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    _write_at(fd, data[aligned:], aligned)
    if fsync:
        os.fsync(fd)
    os.close(fd)
