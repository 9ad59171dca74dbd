"""Records of where the bytes of tensors are in files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.format.safetensors import DTYPE_NBYTES


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
