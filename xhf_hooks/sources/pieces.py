"""Where the bytes of tensors lie in files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.format.safetensors import DTYPE_NBYTES


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a tensor, row-major, as they lie in a file.

    Attributes:
        offset: Bytes from the start of ``file``.
        dtype: Safetensors dtype of the elements in the file.
        shape, stride: Only for a tensor that was saved as a strided view (a transpose, for example): the
            piece is then the whole tensor, ``offset`` that of element (0, 0, ...). Strides in elements.
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
    """Pieces that make up a tensor of ``shape``, all of one dtype."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint and where its values are.

    Attributes:
        dtype: As trained.
        trained: Pieces that give the values as trained; they may be of the fp32 master, whose cast they are.
        master: Pieces of the fp32 master copy; None when there is none.
        copy: Where its values are once more, in fp32: the master, or of fp32 training the optimizer's; None if
            ``trained`` are the only ones.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: tuple[Piece, ...]
    master: tuple[Piece, ...] | None = None
    aliases: tuple[str, ...] = ()
    copy: tuple[Piece, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)
