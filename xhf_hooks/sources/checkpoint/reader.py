"""Reads pieces and casts them on the way, a MB at a time.

They are read, not mapped: where a file shrinks, or its disk fails, reading is an error, and a mapped page is a signal
that ends the process with staging left behind.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from xhf_hooks.dtypes import TORCH_DTYPES
from xhf_hooks.errors import ChangedError, CheckpointError
from xhf_hooks.regular_files import open_regular_fd
from xhf_hooks.safetensors_format import DTYPE_NBYTES
from xhf_hooks.sources.checkpoint.records import Piece
from xhf_hooks.verify.mapped import MappedFile, map_or_none

#: Elements that are cast at once: small enough to stay in a core's cache.
_CHUNK = 1 << 18
_WIDEST = max(DTYPE_NBYTES.values())


class PieceReader:
    """Opens files when they are first read, and keeps them open. Any number of threads may read."""

    def __init__(self) -> None:
        self._files: dict[Path, _OpenFile] = {}
        self._lock = threading.Lock()
        self._own = threading.local()

    def __reduce__(self) -> tuple[type[PieceReader], tuple[()]]:
        """Another process opens the files itself."""
        return PieceReader, ()

    def read_into(
        self, pieces: Sequence[Piece], start: int, out: torch.Tensor, through: torch.dtype | None = None
    ) -> int:
        """Fill ``out`` (flat) with the elements from ``start`` on of what the pieces make up together.

        Args:
            through: Round to this element type first.

        Returns:
            How many finite elements became infinite.

        Raises:
            CheckpointError: A file is gone, or cannot be read.
            ChangedError: It is shorter than it was.
        """
        overflows = 0
        done = 0
        for piece, first, count in _ranges(pieces, start, out.numel()):
            target = out[done : done + count]
            done += count
            dtype = TORCH_DTYPES[piece.dtype]
            if dtype == target.dtype and through in (None, dtype) and piece.stride is None:
                self._fill(piece, first, target)
                continue
            part = self._elements(piece, first, count)
            target.copy_(part if through in (None, part.dtype, target.dtype) else part.to(through))
            overflows += _overflows(part, target)
        return overflows

    def _elements(self, piece: Piece, first: int, count: int) -> torch.Tensor:
        """A copy, in this thread's buffer or of its own."""
        if piece.stride is not None and piece.shape is not None:
            return self._strided(piece, piece.stride, piece.shape, first, count)
        if not hasattr(self._own, 'buffer'):
            self._own.buffer = torch.empty(_CHUNK * _WIDEST, dtype=torch.uint8)
        dtype = TORCH_DTYPES[piece.dtype]
        part = self._own.buffer[: count * dtype.itemsize].view(dtype)
        self._fill(piece, first, part)
        return part

    def _fill(self, piece: Piece, first: int, out: torch.Tensor) -> None:
        """Read the elements from ``first`` on, as they are in the file."""
        data = memoryview(out.view(torch.uint8).numpy())
        offset = piece.offset + first * DTYPE_NBYTES[piece.dtype]
        fd = self._open(piece.file).fd
        while len(data):
            try:
                count = os.preadv(fd, [data], offset)
            except OSError as error:
                raise CheckpointError(f'{piece.file}: cannot be read any more ({error.strerror})') from error
            if not count:
                raise _changed(piece.file)
            data, offset = data[count:], offset + count

    def _strided(
        self, piece: Piece, stride: tuple[int, ...], shape: tuple[int, ...], first: int, count: int
    ) -> torch.Tensor:
        """The rows that the elements are in, made contiguous. They lie all over the piece, which is mapped for that."""
        row = piece.numel // shape[0]
        top, bottom = first // row, -(-(first + count) // row)
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        mapped, dtype = self._open(piece.file).mapped(), TORCH_DTYPES[piece.dtype]
        if mapped is None:
            whole = torch.empty(span, dtype=dtype)
            self._fill(piece, 0, whole)
        else:
            end = piece.offset + span * dtype.itemsize
            try:
                whole = torch.frombuffer(mapped.view(piece.offset, end), dtype=dtype)
            except (OSError, ValueError) as error:  # ValueError: fewer bytes than that
                raise _changed(piece.file) from error
        return whole.as_strided(shape, stride)[top:bottom].reshape(-1)[first - top * row :][:count]

    def _open(self, file: Path) -> _OpenFile:
        with self._lock:
            if file not in self._files:
                try:
                    self._files[file] = _OpenFile(open_regular_fd(file))
                except OSError as error:
                    raise CheckpointError(f'{file}: cannot be read any more ({error.strerror})') from error
            return self._files[file]


class _OpenFile:
    """A descriptor that is closed when nobody refers to it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._mapped: MappedFile | None = None

    def mapped(self) -> MappedFile | None:
        if self._mapped is None:
            self._mapped = map_or_none(self.fd, os.fstat(self.fd).st_size)
        return self._mapped

    def __del__(self) -> None:
        os.close(self.fd)


def _ranges(pieces: Sequence[Piece], start: int, numel: int) -> Iterator[tuple[Piece, int, int]]:
    """Where the elements from ``start`` on are: piece, first element in it, how many; at most ``_CHUNK`` at once."""
    starts = [0, *accumulate(piece.numel for piece in pieces)]
    if start < 0 or start + numel > starts[-1]:
        raise CheckpointError(f'elements {start} to {start + numel} wanted of {starts[-1]}')
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


def _changed(file: Path) -> ChangedError:
    return ChangedError(f'{file}: has become shorter while it was read; convert a copy that nobody writes')


def _overflows(source: torch.Tensor, target: torch.Tensor) -> int:
    """Finite elements of ``source`` that are infinite in ``target``."""
    if not (source.is_floating_point() and target.is_floating_point()):
        return 0
    largest = torch.finfo(target.dtype).max
    if largest >= torch.finfo(source.dtype).max:
        return 0
    low, high = torch.aminmax(source)
    if -largest <= low and high <= largest:  # several times faster than to look for infinities
        return 0
    return int(target.isinf().sum()) - int(source.isinf().sum())
