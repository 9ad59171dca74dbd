"""Host memory: for the bytes of a background save, for buffers, and how much of it a save takes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import time
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from xhf_hooks.compat.torch import device_module

#: Small next to a model whose saves take long, large next to the elements of one tensor on one rank (sources/read.py).
_BLOCK_NBYTES = 256 * 2**20
_ALIGNMENT = 64
_PAGE_NBYTES = 4096
#: From this size on, data is aligned as in its file. For smaller data that would waste more than a sixteenth.
_LARGE_NBYTES = 16 * _PAGE_NBYTES


class SnapshotMemory:
    """Memory that is allocated once and reused by every snapshot.

    Fresh pages are expensive, so only :meth:`free` gives them back, after the last save. For tensors on a device memory
    is pinned, and copies run asynchronously until :meth:`synchronize`; for those on the CPU it has huge pages where
    available.

    Large tensors have the same offset within a page as in their file, so that direct I/O can write them from here
    (files/direct.py).
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._index = self._used = 0
        self._copying_from: set[torch.device] = set()

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(block.numel() for block in self._blocks)

    def clear(self) -> None:
        """Start the next snapshot; the previous one is no longer valid."""
        self._index = self._used = 0

    def free(self) -> None:
        """Give the memory back, once nothing else refers to it."""
        self._blocks.clear()
        self.clear()

    def hold(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Copy a tensor that will be written at ``offset`` of a file.

        Returns:
            Its row-major bytes, valid until :meth:`clear`; from a GPU, only after :meth:`synchronize`.
        """
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        room = self._take(flat.numel(), offset, pinned=flat.device.type != 'cpu')
        room.copy_(flat, non_blocking=True)
        self._copying_from.add(flat.device)
        return room

    def synchronize(self) -> None:
        """Wait for all copies, from every device."""
        synchronize(self._copying_from)
        self._copying_from.clear()

    def _take(self, nbytes: int, offset: int, *, pinned: bool) -> torch.Tensor:
        while self._index < len(self._blocks):
            block = self._blocks[self._index]
            start = self._used + _padding(block.data_ptr() + self._used, nbytes, offset)
            if start + nbytes <= block.numel():
                self._used = start + nbytes
                return block[start : self._used]
            self._index, self._used = self._index + 1, 0
        self._blocks.append(host_memory(max(nbytes + _PAGE_NBYTES, _BLOCK_NBYTES), pinned=pinned))
        return self._take(nbytes, offset, pinned=pinned)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until devices have finished their work, on every stream. Work of the host is finished already."""
    for device in devices:
        if device.type not in ('cpu', 'meta'):
            device_module(device).synchronize(device)


def _padding(address: int, nbytes: int, offset: int) -> int:
    """Bytes to skip after an address, for alignment."""
    return (offset - address) % _PAGE_NBYTES if nbytes >= _LARGE_NBYTES else -address % _ALIGNMENT


def host_memory(nbytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Allocate bytes in host memory, in huge pages where available.

    Args:
        pinned: For copies from a device. Called in the thread that trains, whose current device is this rank's. Where
            memory cannot be pinned (a limit, a backend without it), the copies are slower, and a warning says so.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device='cpu')
    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device='cpu', pin_memory=True)
        except RuntimeError as error:  # the same warning is shown once
            warnings.warn(f'host memory cannot be pinned, so copies from the device are slower: {error}', stacklevel=2)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, 'MADV_HUGEPAGE'):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive


class BufferPool:
    """Buffers of one size. Used by: one thread that takes them, and any threads that drop them.

    Fresh pages are expensive, so buffers are reused. The pool grows to as many buffers as are in use at once; the
    caller must limit that. :meth:`take` never waits, so a reference that is kept too long, such as in an error, cannot
    cause a deadlock.

    Args:
        count: Number of buffers to allocate in advance.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self._nbytes = nbytes
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(host_memory(nbytes))

    def take(self) -> np.ndarray:
        """A buffer as bytes. It returns to the pool when this array and all views of it are gone."""
        try:
            block = self._free.get_nowait()
        except queue.Empty:
            block = host_memory(self._nbytes)
        array = block.numpy()
        weakref.finalize(array, self._free.put, block).atexit = False
        return array


_STATM = Path('/proc/self/statm')


class MemoryMeter:
    """Extra anonymous memory since its creation, in bytes. The peak is the largest value that :meth:`sample` saw."""

    #: Asking the kernel takes as long as all else that a save does with a small tensor.
    _interval_secs = 0.005

    def __init__(self) -> None:
        self._start = _anonymous_nbytes()
        self._last, self._next_sample = 0, 0.0
        self.peak_extra_nbytes = 0

    def sample(self) -> int:
        """Extra memory now, or up to 5 ms ago."""
        if (now := time.monotonic()) >= self._next_sample:
            self._next_sample = now + self._interval_secs
            self._last = _anonymous_nbytes() - self._start
            self.peak_extra_nbytes = max(self.peak_extra_nbytes, self._last)
        return self._last


def return_freed_memory() -> None:
    """Return freed memory to the system.

    glibc keeps freed pages in each thread's arena, and gloo's threads have arenas of their own. Without this call, a
    save of many tensors would hold several times the memory that it uses. Does nothing without glibc.
    """
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
    if trim is not None:
        trim(0)


def _anonymous_nbytes() -> int:
    """Resident memory that is neither file pages nor shared (proc(5), statm); 0 where there is no /proc."""
    try:
        content = _STATM.read_text()
    except FileNotFoundError:
        return 0
    _, resident, shared, *_ = content.split()
    return (int(resident) - int(shared)) * os.sysconf('SC_PAGE_SIZE')
