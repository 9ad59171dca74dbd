"""Host memory that is reused as soon as nothing refers to it."""

from __future__ import annotations

import queue
import weakref

import numpy as np
import torch

from xhf_hooks.concurrency.host_snapshot import host_memory


class BufferPool:
    """Buffers of one size. Used by: one thread that takes them, and any threads that drop them.

    Fresh pages are expensive, so buffers are reused. The pool grows to as many buffers as are in use at once; the
    caller must limit that. :meth:`take` never waits, so a reference that is kept too long, such as in an error, cannot
    cause a deadlock.

    Args:
        nbytes: Size of each buffer.
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
