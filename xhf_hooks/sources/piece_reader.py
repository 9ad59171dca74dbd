"""Reads pieces and casts them on the way, a MB at a time.

They are read, not mapped: where a file shrinks, or its disk fails, reading is an error, and a mapped page is a signal
that ends the process with staging left behind.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path

import torch

from xhf_hooks.errors import ChangedError, CheckpointError
from xhf_hooks.files.regular_files import open_regular_fd
from xhf_hooks.format.dtypes import TORCH_DTYPES, count_overflows
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.sources.pieces import Piece, StoredTensor

#: Elements that are cast at once: small enough to stay in a core's cache.
_CHUNK = 1 << 18
#: Of a transpose, for example. A larger one is read in as many small reads as it has runs.
_MOST_WHOLE_NBYTES = 10**9
_WIDEST = max(DTYPE_NBYTES.values())


class PieceReader:
    """Opens files when they are first read, and keeps them open. Any number of threads may read."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._own = threading.local()
        self._whole_lock = threading.Lock()
        self._last_whole: tuple[Piece, torch.Tensor] | None = None

    def __reduce__(self) -> tuple[type[PieceReader], tuple[()]]:
        """Another process opens the files itself."""
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
        *,
        beside: StoredTensor | None = None,
    ) -> int:
        """Fill ``out`` (flat) with the elements from ``start`` on of what the pieces make up together.

        Args:
            through: Round to this dtype first.
            beside: A tensor whose fp32 copy the pieces are: what is read, rounded, must be its values as trained.

        Returns:
            How many finite elements became infinite.

        Raises:
            CheckpointError: A file is gone, or cannot be read; or two files disagree.
            ChangedError: It is shorter than it was.
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
            if beside is not None:
                self._require_rounded(part, start + done, beside)
            done += count
        return overflows

    def _require_rounded(self, copy: torch.Tensor, start: int, tensor: StoredTensor) -> None:
        """The copy from element ``start`` on, rounded, are the tensor's values as trained."""
        done = 0
        for piece, first, count in _ranges(tensor.trained, start, copy.numel()):
            trained = self._elements(piece, first, count, 'trained')
            rounded = copy[done : done + count].to(trained.dtype)
            if not _same_bits(rounded, trained):
                ends = accumulate(piece.numel for piece in tensor.copy or ())
                wrong = next(p for p, end in zip(tensor.copy or (), ends, strict=True) if end > start + done)
                raise CheckpointError(
                    f'{wrong.file}: {tensor.name} is not what {tensor.trained[0].file.name} says: '
                    f'of another iteration, or of another rank; put the files of one save together'
                )
            done += count

    def _elements(self, piece: Piece, first: int, count: int, buffer: str) -> torch.Tensor:
        """A copy, in this thread's buffer of that name or of its own."""
        if piece.stride is not None and piece.shape is not None:
            return self._strided(piece, piece.stride, piece.shape, first, count)
        if not hasattr(self._own, buffer):
            setattr(self._own, buffer, torch.empty(_CHUNK * _WIDEST, dtype=torch.uint8))
        dtype = TORCH_DTYPES[piece.dtype]
        part = getattr(self._own, buffer)[: count * dtype.itemsize].view(dtype)
        self._fill(piece, first, part)
        return part

    def _fill(self, piece: Piece, first: int, out: torch.Tensor) -> None:
        """Read the elements from ``first`` on, as they are in the file."""
        data = memoryview(out.view(torch.uint8).numpy())
        offset = piece.offset + first * DTYPE_NBYTES[piece.dtype]
        fd = self._open(piece.file)
        while len(data):
            try:
                count = os.preadv(fd, [data], offset)
            except OSError as error:
                raise CheckpointError(f'{piece.file}: cannot be read any more ({error.strerror})') from error
            if not count:
                raise ChangedError(
                    f'{piece.file}: has become shorter while it was read; convert a copy that nobody writes'
                )
            data, offset = data[count:], offset + count

    def _strided(
        self, piece: Piece, stride: tuple[int, ...], shape: tuple[int, ...], first: int, count: int
    ) -> torch.Tensor:
        """The rows that the elements are in, made contiguous; of a transpose they lie all over the piece."""
        row = piece.numel // shape[0]
        top, bottom = first // row, -(-(first + count) // row)
        whole = self._whole(piece, _span(shape, stride))
        if whole is not None:
            return whole.as_strided(shape, stride)[top:bottom].reshape(-1)[first - top * row :][:count]
        rows = torch.empty((bottom - top, *shape[1:]), dtype=TORCH_DTYPES[piece.dtype])
        by_stride = sorted(range(len(shape)), key=lambda axis: stride[axis], reverse=True)
        steps, ordered = [stride[axis] for axis in by_stride], rows.permute(by_stride)
        sizes = list(ordered.shape)
        n_outer = len(sizes)  # of the axes, so many are walked, and what they leave is read at once
        while n_outer and _span(sizes[n_outer - 1 :], steps[n_outer - 1 :]) <= _CHUNK:
            n_outer -= 1
        run = torch.empty(_span(sizes[n_outer:], steps[n_outer:]), dtype=rows.dtype)
        for index in product(*map(range, sizes[:n_outer])):
            offset = top * stride[0] + sum(i * step for i, step in zip(index, steps, strict=False))
            self._fill(piece, offset, run)
            ordered[index] = run.as_strided(sizes[n_outer:], steps[n_outer:])
        return rows.reshape(-1)[first - top * row :][:count]

    def _whole(self, piece: Piece, numel: int) -> torch.Tensor | None:
        """All that a piece spans, kept for whoever reads it next; None if that is too much, or mostly not its own."""
        dtype = TORCH_DTYPES[piece.dtype]
        if numel * dtype.itemsize > _MOST_WHOLE_NBYTES or numel > 4 * piece.numel:
            return None
        with self._whole_lock:
            if self._last_whole is None or self._last_whole[0] != piece:
                self._last_whole = None  # before the next takes memory
                data = torch.empty(numel, dtype=dtype)
                self._fill(piece, 0, data)
                self._last_whole = piece, data
            return self._last_whole[1]

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._fds:
                try:
                    self._fds[file] = open_regular_fd(file)
                except OSError as error:
                    raise CheckpointError(f'{file}: cannot be read any more ({error.strerror})') from error
            return self._fds[file]


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


def _span(sizes: Sequence[int], steps: Sequence[int]) -> int:
    """Elements from the first to the last of a strided view."""
    return 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of 16-bit or fp32 numbers; not-a-numbers are alike."""
    bits = torch.int32 if one.dtype == torch.float32 else torch.int16
    if torch.equal(one.view(bits), other.view(bits)):
        return True
    differ = one.view(bits) != other.view(bits)
    return bool((one[differ].isnan() & other[differ].isnan()).all())
