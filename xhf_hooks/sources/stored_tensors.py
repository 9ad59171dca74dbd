"""Tensors in files: any slice of any tensor, cast, without holding the tensor.

The files are mapped (:mod:`.mapped_files`). If one shrinks or its disk fails while it is converted, the process ends
with SIGBUS; what it leaves is swept by the next conversion, as after a kill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.safetensors import read_header
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.mapped_files import MappedFile

#: Consecutive row-major elements of a tensor: flat, or all of it if it was saved as a strided view.
Pieces = tuple[torch.Tensor, ...]
#: Elements that are cast at once: few enough to stay in a core's cache.
_CHUNK = 1 << 18


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a checkpoint, and its values in mapped files.

    Attributes:
        dtype: The dtype of training.
        trained: Pieces with the trained values. They may be the pieces of the fp32 master, to be cast.
        master: Pieces of the fp32 master copy; None if there is none.
        master_lost: See :class:`.TensorSpec`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: Pieces
    master: Pieces | None = None
    aliases: tuple[str, ...] = ()
    master_lost: bool = False

    @property
    def spec(self) -> TensorSpec:
        """The tensor's name, shape and dtype, for a plan."""
        has_master = self.master is not None
        return TensorSpec(
            self.name, self.shape, self.dtype, self.aliases, has_master=has_master, master_lost=self.master_lost
        )

    def pieces(self, from_master: bool) -> Pieces:
        """The pieces to read; concatenated, they are the row-major tensor."""
        return self.master if from_master and self.master is not None else self.trained

    def read_nbytes(self, from_master: bool) -> int:
        """Bytes in files that reading it reads."""
        return sum(piece.nbytes for piece in self.pieces(from_master))

    def read_into(self, start: int, out: torch.Tensor, *, from_master: bool = False) -> None:
        """Cast elements from ``start`` on into ``out``, as many as fit.

        With ``from_master=True`` values are rounded once, from the master. Otherwise they are rounded to the
        training dtype first, as the hook saves them.
        """
        through = None if from_master and self.master is not None else TORCH_DTYPES[self.dtype]
        done = 0
        for part in _parts(self.pieces(from_master), start, len(out)):
            target = out[done : done + len(part)]
            target.copy_(part if through in (None, part.dtype, target.dtype) else part.to(through))
            done += len(part)
        if done < len(out):
            raise CheckpointError(f'{self.name}: expected elements {start} to {start + len(out)}, found {done} of them')

    def whole(self, from_master: bool) -> torch.Tensor:
        """All of it, in new memory."""
        dtype = 'F32' if from_master and self.master is not None else self.dtype
        found = torch.empty(self.shape, dtype=TORCH_DTYPES[dtype])
        self.read_into(0, found.view(-1), from_master=from_master)
        return found


def is_same_value(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors have the same bytes, in the dtype of training."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(*(tensor.whole(False).view(-1).view(torch.uint8) for tensor in (a, b)))


def _parts(pieces: Sequence[torch.Tensor], start: int, numel: int) -> Iterator[torch.Tensor]:
    """Elements from ``start`` on, flat, in parts of at most :data:`_CHUNK`."""
    end = start + numel
    for piece in pieces:
        for first in range(max(0, start), min(end, piece.numel()), _CHUNK):
            yield _elements(piece, first, min(end, piece.numel(), first + _CHUNK))
        start, end = start - piece.numel(), end - piece.numel()
        if end <= 0:
            return


def _elements(piece: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Row-major elements, flat: a view, or of a strided piece a copy of the rows that contain them."""
    if piece.is_contiguous():
        return piece.view(-1)[first:end]
    row = piece.numel() // len(piece)
    top, bottom = first // row, -(-end // row)
    return piece[top:bottom].reshape(-1)[first - top * row : end - top * row]


def tensors_of(file: Path) -> Iterator[StoredTensor]:
    """The tensors of a safetensors file.

    Raises:
        DamagedError: It cannot be read.
        CheckpointError: torch has no dtype for one of them.
    """
    header, mapped = read_header(file), MappedFile.open(file)
    for entry in header.entries:
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(f'{file}: {entry.name} has dtype {entry.dtype}, which torch cannot read')
        values = mapped.tensor(entry.start, entry.shape, TORCH_DTYPES[entry.dtype])
        yield StoredTensor(entry.name, entry.shape, entry.dtype, (values,))
