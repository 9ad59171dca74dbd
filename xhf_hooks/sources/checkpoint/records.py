"""What is known of a checkpoint on disk: where it is, and where each tensor's bytes lie in its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xhf_hooks.format.safetensors import DTYPE_NBYTES


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint recognised by the names of its files; none has been opened yet.

    Attributes:
        given: What the user named.
        path: The checkpoint itself: DeepSpeed's tag folder, or one file.
        layout: ``'mmengine'`` (a tag folder ``iter_N.pth`` or ``epoch_N.pth``), ``'deepspeed'`` (``latest`` or a
            tag folder of any other name), ``'trainer'`` (``checkpoint-N``, transformers or Axolotl),
            ``'accelerate'`` (``pytorch_model``), ``'universal'`` (what DeepSpeed's ``ds_to_universal.py`` has made),
            ``'dcp'`` (torch.distributed.checkpoint), ``'fsdp'`` (``rank0.pth`` ... of MMEngine's FSDPStrategy), or
            ``'file'`` (one ``.pth`` with all weights).
        model_files: ``*_model_states.pt`` in rank order (one at stages 0 to 2), ``rank0.pth`` ... likewise, the
            ``.distcp`` files in the order of their names, or the one file.
        optim_files: ``*_optim_states.pt`` in rank order; only of DeepSpeed's own layouts.
        parameter_files: By name of a parameter, its fp32 values; only of ``'universal'``.
    """

    given: Path
    path: Path
    layout: str
    model_files: tuple[Path, ...]
    optim_files: tuple[Path, ...] = ()
    parameter_files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of all these files."""
        files = (*self.model_files, *self.optim_files, *self.parameter_files.values())
        return sum(file.stat().st_size for file in files)


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
    aliases: tuple[str, ...] = field(default=())
    copy: tuple[Piece, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)
