"""Sources in files: any slice of any tensor, cast, without holding the tensor.

The files are mapped (:mod:`.mapped_files`). If one shrinks or its disk fails while it is converted, the process ends
with SIGBUS; what it leaves is swept by the next conversion, as after a kill.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.base import Source

if TYPE_CHECKING:
    from torch import nn

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
        master_lost: See :class:`TensorSpec`.
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
        """What it is."""
        return TensorSpec(self.name, self.shape, self.dtype, self.aliases, self.master is not None, self.master_lost)

    def pieces(self, use_fp32_master: bool) -> Pieces:
        """The pieces to read; concatenated, they are the row-major tensor."""
        return self.master if use_fp32_master and self.master is not None else self.trained

    def read_into(self, start: int, out: torch.Tensor, *, use_fp32_master: bool = False) -> None:
        """Cast elements from ``start`` on into ``out``, as many as fit.

        With ``use_fp32_master=True`` values are rounded once, from the master. Otherwise they are rounded to the
        training dtype first, as the hook saves them.
        """
        from_master = use_fp32_master and self.master is not None
        through = None if from_master else TORCH_DTYPES[self.dtype]
        done = 0
        for part in _parts(self.pieces(use_fp32_master), start, len(out)):
            target = out[done : done + len(part)]
            target.copy_(part if through in (None, part.dtype, target.dtype) else part.to(through))
            done += len(part)
        if done < len(out):
            raise CheckpointError(f'{self.name}: expected elements {start} to {start + len(out)}, found {done} of them')


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


class StoredSource(Source):
    """Tensors in files. Runs on: one process, in any number of threads."""

    def __init__(self, tensors: Iterable[StoredTensor]) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Never: this source is not made from a live model."""
        return False

    def specs(self) -> list[TensorSpec]:
        """The stored tensors in state-dict order, under their first names."""
        return [tensor.spec for tensor in self.tensors.values()]

    def stored_nbytes(self, names: Collection[str], *, use_fp32_master: bool) -> int:
        """Number of bytes to read from the files for these tensors."""
        return sum(piece.nbytes for name in names for piece in self.tensors[name].pieces(use_fp32_master))

    def read_into(self, name: str, start: int, out: memoryview, dtype: str, *, use_fp32_master: bool) -> None:
        """:meth:`StoredTensor.read_into` for bytes.

        Args:
            out: Writable bytes.
            dtype: Safetensors dtype to write.
        """
        if len(out):
            target = torch.frombuffer(out, dtype=TORCH_DTYPES[dtype])
            self.tensors[name].read_into(start, target, use_fp32_master=use_fp32_master)

    @contextmanager
    def gathered(
        self, names: Sequence[str], *, wanted: Collection[str], use_fp32_master: bool
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Whole tensors in new memory, for outputs that ``combine`` makes from several tensors."""
        found = {}
        for name in wanted:
            stored = self.tensors[name]
            dtype = 'F32' if use_fp32_master and stored.master is not None else stored.dtype
            found[name] = torch.empty(math.prod(stored.shape), dtype=TORCH_DTYPES[dtype])
            stored.read_into(0, found[name], use_fp32_master=use_fp32_master)
            found[name] = found[name].view(stored.shape)
        yield found
