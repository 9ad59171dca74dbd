"""Sources in files: read any slice of any tensor and cast it, a megabyte at a time.

Files are read, not mapped. If a file shrinks or its disk fails, reading raises an error; a mapped page would raise
SIGBUS, which ends the process and leaves staging behind.
"""

from __future__ import annotations

import math
import os
import threading
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from xhf_hooks.errors import ChangedError, CheckpointError
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.base import Source

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Piece:
    """Consecutive row-major elements of a tensor, and their place in a file.

    Attributes:
        offset: Offset in ``file``, in bytes.
        dtype: Safetensors dtype of the elements in the file.
        shape, stride: Set only for a tensor that was saved as a strided view, such as a transpose. The piece is then
            the whole tensor, and ``offset`` is that of element (0, 0, ...). Strides are in elements.
    """

    file: Path
    offset: int
    dtype: str
    numel: int
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True)
class Region:
    """Pieces of one dtype that make up a tensor of ``shape``."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, and where its values are.

    Attributes:
        dtype: The dtype of training.
        trained: Pieces with the trained values. They may be the pieces of the fp32 master, to be cast.
        master: Pieces of the fp32 master copy; None if there is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: tuple[Piece, ...]
    master: tuple[Piece, ...] | None = None
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


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
    ) -> None:
        """Fill ``out`` (flat) from the tensor that the pieces make up, beginning with element ``start``.

        Args:
            through: Round to this dtype first.

        Raises:
            CheckpointError: A file is missing or cannot be read.
            ChangedError: A file has become shorter.
        """
        done = 0
        for piece, first, count in _ranges(pieces, start, out.numel()):
            target = out[done : done + count]
            dtype = TORCH_DTYPES[piece.dtype]
            if dtype == target.dtype and through in (None, dtype) and piece.stride is None:
                part = target
                self._fill(piece, first, part)
            else:
                part = self._elements(piece, first, count)
                target.copy_(part if through in (None, part.dtype, target.dtype) else part.to(through))
            done += count

    def _elements(self, piece: Piece, first: int, count: int) -> torch.Tensor:
        """A copy of the elements, in this thread's buffer or in new memory."""
        if piece.stride is not None and piece.shape is not None:
            return self._strided(piece, piece.stride, piece.shape, first, count)
        if not hasattr(self._own, 'buffer'):
            self._own.buffer = torch.empty(_CHUNK * _WIDEST, dtype=torch.uint8)
        dtype = TORCH_DTYPES[piece.dtype]
        part = self._own.buffer[: count * dtype.itemsize].view(dtype)
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


class FileSource(Source):
    """A source in files. Conversions read it with several threads at once."""

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Never: this source is not made from a live model."""
        return False

    @abstractmethod
    def read_into(self, name: str, start: int, out: memoryview, dtype: str, *, use_fp32_master: bool) -> None:
        """Fill ``out`` with the elements from ``start`` on, cast."""

    @abstractmethod
    def stored_nbytes(self, names: Collection[str], *, use_fp32_master: bool) -> int:
        """Number of bytes to read from the files for these tensors."""


class JoinedSource(FileSource):
    """Tensors of several sources, renamed.

    Args:
        tensors: Maps each spec to the source that holds the tensor and to its name there.
    """

    def __init__(self, tensors: Mapping[TensorSpec, tuple[FileSource, str]]) -> None:
        self._specs = list(tensors)
        self._places = {spec.name: place for spec, place in tensors.items()}

    def specs(self) -> list[TensorSpec]:
        return list(self._specs)

    def read_into(self, name: str, start: int, out: memoryview, dtype: str, *, use_fp32_master: bool) -> None:
        source, there = self._places[name]
        source.read_into(there, start, out, dtype, use_fp32_master=use_fp32_master)

    def stored_nbytes(self, names: Collection[str], *, use_fp32_master: bool) -> int:
        return sum(
            source.stored_nbytes([there], use_fp32_master=use_fp32_master)
            for source, there in (self._places[name] for name in names)
        )

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], use_fp32_master: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        found = {}
        for name in wanted:
            source, there = self._places[name]
            with source.gathered([there], wanted=[there], use_fp32_master=use_fp32_master) as tensors:
                found[name] = tensors[there]
        yield found


def renamed(spec: TensorSpec, names: Sequence[str]) -> TensorSpec:
    """The spec with other names: the first becomes its name, the others its aliases."""
    return replace(spec, name=names[0], aliases=tuple(names[1:]))


class StoredSource(FileSource):
    """Reads slices of files and casts them; holds no tensors.

    Runs on: one process, several that received it by fork or pickle, or several threads.
    """

    def __init__(self) -> None:
        self._reader = PieceReader()
        self._tensors: dict[str, StoredTensor] = {}

    def pieces(self, name: str, *, use_fp32_master: bool) -> tuple[Piece, ...]:
        """The pieces of a tensor; concatenated, they are the row-major tensor.

        Args:
            use_fp32_master: Prefer the fp32 master. Otherwise the pieces give the training dtype: 16-bit weights where
                the files have them (stages 0 to 2), else fp32 slices to be cast (stage 3).
        """
        tensor = self._tensors[name]
        return tensor.master if use_fp32_master and tensor.master is not None else tensor.trained

    def stored_nbytes(self, names: Collection[str], *, use_fp32_master: bool) -> int:
        return sum(piece.nbytes for name in names for piece in self.pieces(name, use_fp32_master=use_fp32_master))

    def read_into(self, name: str, start: int, out: memoryview, dtype: str, *, use_fp32_master: bool) -> None:
        """Cast elements from ``start`` on into ``out``, as many as fit. Needs a few MB of memory.

        With ``use_fp32_master=True`` values are rounded once, from the master. Otherwise they are rounded to the
        training dtype first, as the hook saves them.

        Args:
            out: Writable bytes, for example of a mapped file.
            dtype: Safetensors dtype to write.

        Raises:
            CheckpointError: A file can no longer be read.
        """
        if not len(out):
            return
        target = torch.frombuffer(out, dtype=TORCH_DTYPES[dtype])
        self._read(name, start, target, use_fp32_master=use_fp32_master)

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], use_fp32_master: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Whole tensors in new memory, for outputs that ``combine`` makes from several tensors."""
        tensors = {}
        for name in names:
            if name in wanted:
                stored = self._tensors[name]
                dtype = 'F32' if use_fp32_master and stored.master is not None else stored.dtype
                tensors[name] = torch.empty(stored.shape, dtype=TORCH_DTYPES[dtype])
                self._read(name, 0, tensors[name].view(-1), use_fp32_master=use_fp32_master)
        yield tensors

    def _read(self, name: str, start: int, out: torch.Tensor, *, use_fp32_master: bool) -> None:
        stored = self._tensors[name]
        if not use_fp32_master or stored.master is None:
            self._reader.read_into(stored.trained, start, out, TORCH_DTYPES[stored.dtype])
        else:
            self._reader.read_into(stored.master, start, out)
