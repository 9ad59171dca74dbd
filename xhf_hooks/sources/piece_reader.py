"""Reads pieces of tensors from files and casts them, a megabyte at a time.

Files are read, not mapped. If a file shrinks or its disk fails, reading raises an error; a mapped page would raise
SIGBUS, which ends the process and leaves staging behind.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from xhf_hooks.errors import ChangedError, CheckpointError
from xhf_hooks.format.dtypes import TORCH_DTYPES, count_overflows
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.sources.pieces import Piece

#: Elements that are cast at once: few enough to stay in a core's cache.
_CHUNK = 1 << 18
_WIDEST = max(DTYPE_NBYTES.values())


class PieceReader:
    """Opens files on first read and keeps them open. Any number of threads may read."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._own = threading.local()
        self._whole_lock = threading.Lock()
        self._last_whole: tuple[Piece, torch.Tensor] | None = None

    def __reduce__(self) -> tuple[type[PieceReader], tuple[()]]:
        """Pickle without open files: each process opens its own."""
        return PieceReader, ()

    def __del__(self) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def read_into(
        self,
        pieces: Sequence[Piece],
        start: int,
        out: torch.Tensor,
        through: torch.dtype | None = None,
    ) -> int:
        """Fill ``out`` (flat) from the tensor that the pieces make up, beginning with element ``start``.

        Args:
            through: Round to this dtype first.

        Returns:
            The number of finite elements that became infinite.

        Raises:
            CheckpointError: A file is missing or cannot be read.
            ChangedError: A file has become shorter.
        """
        overflows = 0
        done = 0
        for piece, first, count in _ranges(pieces, start, out.numel()):
            target = out[done : done + count]
            dtype = TORCH_DTYPES[piece.dtype]
            if dtype == target.dtype and through in (None, dtype) and piece.stride is None:
                part = target
                self._fill(piece, first, part)
            else:
                part = self._elements(piece, first, count, 'part')
                target.copy_(part if through in (None, part.dtype, target.dtype) else part.to(through))
                overflows += count_overflows(part, target)
            done += count
        return overflows

    def _elements(self, piece: Piece, first: int, count: int, buffer: str) -> torch.Tensor:
        """A copy of the elements, in this thread's buffer with that name or in new memory."""
        if piece.stride is not None and piece.shape is not None:
            return self._strided(piece, piece.stride, piece.shape, first, count)
        if not hasattr(self._own, buffer):
            setattr(self._own, buffer, torch.empty(_CHUNK * _WIDEST, dtype=torch.uint8))
        dtype = TORCH_DTYPES[piece.dtype]
        part = getattr(self._own, buffer)[: count * dtype.itemsize].view(dtype)
        self._fill(piece, first, part)
        return part

    def _fill(self, piece: Piece, first: int, out: torch.Tensor) -> None:
        """Read elements from ``first`` on, without a cast."""
        data = memoryview(out.view(torch.uint8).numpy())
        offset = piece.offset + first * DTYPE_NBYTES[piece.dtype]
        fd = self._open(piece.file)
        while len(data):
            try:
                count = os.preadv(fd, [data], offset)
            except OSError as error:
                raise CheckpointError(f'{piece.file}: can no longer be read ({error.strerror})') from error
            if not count:
                raise ChangedError(
                    f'{piece.file}: became shorter while it was read; convert a copy that no process writes to'
                )
            data, offset = data[count:], offset + count

    def _strided(
        self, piece: Piece, stride: tuple[int, ...], shape: tuple[int, ...], first: int, count: int
    ) -> torch.Tensor:
        """The rows that contain the elements, made contiguous. The whole piece is read, and kept for the next rows."""
        with self._whole_lock:
            if self._last_whole is None or self._last_whole[0] != piece:
                self._last_whole = None  # free it before the next one is allocated
                span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
                data = torch.empty(span, dtype=TORCH_DTYPES[piece.dtype])
                self._fill(piece, 0, data)
                self._last_whole = piece, data
            whole = self._last_whole[1].as_strided(shape, stride)
        row = piece.numel // shape[0]
        top, bottom = first // row, -(-(first + count) // row)
        return whole[top:bottom].reshape(-1)[first - top * row :][:count]

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._fds:
                try:
                    self._fds[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(f'{file}: can no longer be read ({error.strerror})') from error
            return self._fds[file]


def _ranges(pieces: Sequence[Piece], start: int, numel: int) -> Iterator[tuple[Piece, int, int]]:
    """Locate elements from ``start`` on: piece, first element in it, and count, which is at most ``_CHUNK``."""
    starts = [0, *accumulate(piece.numel for piece in pieces)]
    if start < 0 or start + numel > starts[-1]:
        raise CheckpointError(f'expected elements {start} to {start + numel}, found only {starts[-1]}')
    index = bisect_right(starts, start) - 1
    end = start + numel
    while start < end:
        piece, begin = pieces[index], starts[index]
        stop = min(end, begin + piece.numel)
        while start < stop:
            count = min(_CHUNK, stop - start)
            yield piece, start - begin, count
            start += count
        index += 1
