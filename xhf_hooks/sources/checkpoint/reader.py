"""Reads pieces through mmap and casts them on the way, a few MB at a time."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from xhf_hooks.dtypes import TORCH_DTYPES
from xhf_hooks.errors import CheckpointError
from xhf_hooks.safetensors_format import DTYPE_NBYTES
from xhf_hooks.sources.checkpoint.records import Piece, StoredTensor

#: Elements that are cast at once: small enough to stay in a core's cache.
_CHUNK = 1 << 18


class PieceReader:
    """Maps files when they are first read, and keeps them mapped. Any number of threads may read."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[PieceReader], tuple[()]]:
        """Another process maps the files itself."""
        return PieceReader, ()

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
            through: Round to this element type first.
            beside: A tensor whose fp32 copy the pieces are: what is read, rounded, must be its values as trained.

        Returns:
            How many finite elements became infinite.

        Raises:
            CheckpointError: A file is gone, or shorter than it was; or two files disagree.
        """
        overflows = 0
        done = 0
        for part in self._parts(pieces, start, out.numel()):
            target = out[done : done + part.numel()]
            source = part if through in (None, part.dtype, target.dtype) else part.to(through)
            target.copy_(source)
            overflows += _overflows(part, target)
            if beside is not None:
                self._require_rounded(part, start + done, beside)
            done += part.numel()
        return overflows

    def _require_rounded(self, copy: torch.Tensor, start: int, tensor: StoredTensor) -> None:
        """The copy from element ``start`` on, rounded, are the tensor's values as trained."""
        done = 0
        for trained in self._parts(tensor.trained, start, copy.numel()):
            rounded = copy[done : done + trained.numel()].to(trained.dtype)
            if not _same_bits(rounded, trained):
                ends = accumulate(piece.numel for piece in tensor.copy or ())
                piece = next(p for p, end in zip(tensor.copy or (), ends, strict=True) if end > start + done)
                raise CheckpointError(
                    f'{piece.file}: {tensor.name} is not what {tensor.trained[0].file.name} says: '
                    f'of another iteration, or of another rank; put the files of one save together'
                )
            done += trained.numel()

    def _parts(self, pieces: Sequence[Piece], start: int, numel: int) -> Iterator[torch.Tensor]:
        """Views of the files, or small copies, of at most ``_CHUNK`` elements."""
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
                yield self._elements(piece, start - begin, count)
                start += count
            index += 1

    def _elements(self, piece: Piece, first: int, count: int) -> torch.Tensor:
        if piece.stride is None or piece.shape is None:
            return self._view(piece, first, count)
        # A strided view: the rows that the elements are in, made contiguous
        row = piece.numel // piece.shape[0]
        top, bottom = first // row, -(-(first + count) // row)
        span = 1 + sum((size - 1) * step for size, step in zip(piece.shape, piece.stride, strict=True))
        whole = self._view(piece, 0, span).as_strided(piece.shape, piece.stride)
        return whole[top:bottom].reshape(-1)[first - top * row :][:count]

    def _view(self, piece: Piece, first: int, count: int) -> torch.Tensor:
        data = self._map(piece.file)
        offset = piece.offset + first * DTYPE_NBYTES[piece.dtype]
        if offset + count * DTYPE_NBYTES[piece.dtype] > len(data):
            raise CheckpointError(
                f'{piece.file}: has become shorter while it was read; convert a copy that nobody writes'
            )
        return torch.frombuffer(data, dtype=TORCH_DTYPES[piece.dtype], count=count, offset=offset)

    def _map(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                try:
                    with file.open('rb') as opened:
                        # A private mapping that is never written to: torch warns of read-only ones
                        self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
                except OSError as error:
                    raise CheckpointError(f'{file}: cannot be read any more ({error.strerror})') from error
            return self._maps[file]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of 16-bit or fp32 numbers; not-a-numbers are alike."""
    bits = torch.int32 if one.dtype == torch.float32 else torch.int16
    if torch.equal(one.view(bits), other.view(bits)):
        return True
    differ = one.view(bits) != other.view(bits)
    return bool((one[differ].isnan() & other[differ].isnan()).all())


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
