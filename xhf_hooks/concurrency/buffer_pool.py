"""Host memory that is reused as soon as nothing refers to it."""

from __future__ import annotations

import queue
import weakref

import numpy as np
import torch

from xhf_hooks.concurrency.host_snapshot import host_memory


class BufferPool:
    """Buffers of one size. Used by: one thread that takes them, and any that drop what they were given.

    Fresh pages are expensive. There are as many buffers as are in use at once, which is for those to bound who take
    them; nobody waits here, so nobody waits for ever because something still refers to one, as an error may.

    Args:
        nbytes: Of each.
        count: That many exist from the beginning.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self._nbytes = nbytes
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(host_memory(nbytes))

    def take(self) -> np.ndarray:
        """A buffer as bytes. It comes back when this array, and all arrays and views made of it, are gone."""
        try:
            block = self._free.get_nowait()
        except queue.Empty:
            block = host_memory(self._nbytes)
        array = block.numpy()
        weakref.finalize(array, self._free.put, block).atexit = False
        return array
