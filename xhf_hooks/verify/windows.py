"""Two tensors side by side, a window at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.verify.model_reader import ModelReader
from xhf_hooks.verify.rounding import Workspace

#: Elements computed with at once: so many that threads seldom wait for each other's hold on the interpreter.
PIECE_ELEMENTS = 1 << 18
_WINDOW_ELEMENTS = 1 << 19  # read at once
_WIDEST = max(DTYPE_NBYTES.values())


class Windows:
    """Gives each thread its buffers.

    Attributes:
        alone: Lock of those who hold whole tensors.
    """

    def __init__(self) -> None:
        self.alone = threading.Lock()
        self._own = threading.local()

    @property
    def workspace(self) -> Workspace:
        """Of this thread."""
        if not hasattr(self._own, 'workspace'):
            self._own.workspace = Workspace(PIECE_ELEMENTS)
        return self._own.workspace

    def between(
        self, a: ModelReader, b: ModelReader, one: str, two: str, start: int, end: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Elements ``start`` to ``end`` of both, not to be written to; each is gone when the next is asked for."""
        for first in range(start, end, _WINDOW_ELEMENTS):
            last = min(first + _WINDOW_ELEMENTS, end)
            yield self._window(a, one, 0, first, last), self._window(b, two, 1, first, last)
            for reader, name in ((a, one), (b, two)):
                width = DTYPE_NBYTES[reader.tensors[name].dtype]
                reader.forget(name, first * width, last * width)

    def _window(self, reader: ModelReader, name: str, side: int, first: int, last: int) -> torch.Tensor:
        dtype = reader.tensors[name].dtype
        width = DTYPE_NBYTES[dtype]
        data = reader.view(name, first * width, last * width)
        if data is None:
            if not hasattr(self._own, 'data'):
                self._own.data = [memoryview(bytearray(_WINDOW_ELEMENTS * _WIDEST)) for _ in range(2)]
            data = self._own.data[side][: (last - first) * width]
            reader.read(name, first * width, data)
        return torch.frombuffer(data, dtype=TORCH_DTYPES[dtype])
