"""The frozen records that describe parts of a save. Those that describe a whole save are in :mod:`.plan`.

Dtypes are safetensors codes (``'BF16'``, ``'F32'``, ``'I64'`` ...),
see :mod:`xhf_hooks.format.safetensors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from xhf_hooks.format.index import WEIGHTS_SUFFIX
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.planning.spread import Spread

#: Makes the outputs of a :class:`Group` (HF name -> tensor) from its gathered tensors (source name -> tensor).
Combine = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class TensorSpec:
    """A full, unpartitioned tensor of a source.

    A save is planned again if the specs are not equal to those of its plan, and the plan's digest, which ranks compare,
    has them as text. So a field must not change during training, nor differ between ranks.

    Attributes:
        aliases: Other names of the same parameter (tied weights), found by identity.
        has_master: Whether an fp32 master copy exists, as for trained 16-bit parameters.
        from_master: Whether a save reads that copy; then ``dtype`` is that of the copy.
        master_lost: Whether a 16-bit tensor was, or may have been, trained, but no master of it can be read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    has_master: bool = False
    from_master: bool = False
    master_lost: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_NBYTES[self.dtype]

    def of_master(self) -> TensorSpec:
        """The spec of its fp32 master copy."""
        return replace(self, dtype='F32', from_master=True)


@dataclass(frozen=True)
class FileSet:
    """Files that one loader reads together. A save splits, names and indexes each set separately.

    Attributes:
        folder: Path relative to the checkpoint, with slashes; ``''`` is the checkpoint itself.
        stem: ``'model'`` gives ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on.
        may_split: Whether the loader accepts several files and an index.
    """

    folder: str = ''
    stem: str = 'model'
    may_split: bool = True

    @property
    def whole_file(self) -> str:
        """The path of the only file, if the set is not split."""
        return self.path(self.stem + WEIGHTS_SUFFIX)

    def path(self, name: str) -> str:
        """The path of a file of the set, relative to the checkpoint."""
        return f'{self.folder}/{name}' if self.folder else name


@dataclass(frozen=True)
class StoredBytes:
    """Where the bytes of a tensor are stored: ``start`` is their offset in the safetensors file at ``path``.

    Ranks on different hosts may have the same file at different paths.
    """

    path: str = field(repr=False, compare=False)
    start: int


@dataclass(frozen=True)
class ExportEntry:
    """An output tensor: its name and shape in the folder, and the source tensors it is made from.

    Entries with the same ``combine`` object are made together. If ``combine`` is None, the entry is the single source
    tensor, cast to the output dtype; or it is copied from the base (``copied_from``).

    Attributes:
        source_offset: Index of the first element if ``combine`` only cuts consecutive elements out of the single
            source tensor, such as one expert out of fused experts. None if ``combine`` must be called, or is None.
        copied_from: Bytes of the base model's files that are copied as they are; then ``reads`` is empty. None if the
            entry is made of source tensors.
    """

    hf_name: str
    shape: tuple[int, ...]
    dtype: str
    reads: tuple[str, ...]
    combine: Combine | None = None
    file_set: FileSet = FileSet()
    source_offset: int | None = None
    copied_from: StoredBytes | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True)
class Placement:
    """Where one output tensor lies: ``nbytes`` at ``offset`` (bytes from the start of ``file``).

    Attributes:
        owner: The rank that writes it, unless every rank writes its own slice.
        source_offset: Index of its first element in the group's only source tensor: 0 for an entry without ``combine``.
            None if ``combine`` must be called.
    """

    hf_name: str
    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    nbytes: int
    owner: int = 0
    source_offset: int | None = None

    @property
    def source_range(self) -> range:
        """The placement's elements in the group's only source tensor, if there is a ``source_offset``."""
        first = self.source_offset or 0
        return range(first, first + math.prod(self.shape))


@dataclass(frozen=True)
class CopiedTensor:
    """An output tensor that its owner copies from a file of the base model, without other ranks."""

    placement: Placement
    source: StoredBytes


@dataclass(frozen=True)
class Group:
    """Source tensors that are needed together to make the outputs in ``placements``.

    Attributes:
        spread: Which elements of the only source tensor each rank holds; None if it is gathered.
    """

    reads: tuple[TensorSpec, ...]
    placements: tuple[Placement, ...]
    combine: Combine | None = field(repr=False)
    spread: Spread | None = None

    @property
    def is_contiguous(self) -> bool:
        """Whether each output is a range of consecutive elements of the only source tensor."""
        return all(placement.source_offset is not None for placement in self.placements)

    @property
    def owners(self) -> set[int]:
        """The ranks that write the outputs."""
        return {placement.owner for placement in self.placements}

    @property
    def read_nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.reads)


@dataclass(frozen=True)
class Chunk:
    """Bytes of one placement, in host memory on the rank that writes them.

    Attributes:
        start: Offset of the first byte in the placement.
    """

    placement: Placement
    data: memoryview
    start: int = 0


@dataclass(frozen=True)
class WrittenTensor:
    """A completely written placement: CRC-32 of its bytes and number of its NaN and infinite values."""

    placement: Placement
    crc32: int
    non_finite: int


@dataclass(frozen=True)
class Step:
    """The point in training that a save belongs to: ``number`` epochs or iterations, and the finished iterations.

    Attributes:
        epochs_done: Epochs done by then, with a fraction, where the trainer counts them so.
    """

    unit: str
    number: int
    iteration: int
    epochs_done: float | None = field(default=None, compare=False)

    @classmethod
    def of_iteration(cls, number: int, epochs_done: float | None = None) -> Step:
        """The step of a save that is known by its iteration."""
        return cls('iter', number, number, epochs_done)

    @property
    def label(self) -> str:
        return f'{self.unit}_{self.number}'


@dataclass(frozen=True)
class SaveCost:
    """The cost of a save. Memory is the extra anonymous memory of the busiest rank, in bytes.

    Attributes:
        seconds: Time from the start of the save to its commit; of ``save_hf``, from the start of the call.
        stalled_secs: How long training stood still; less than ``seconds`` for a background save.
        stage_secs: Seconds by stage, in order, including the time spent waiting for other ranks.
    """

    nbytes: int
    seconds: float
    stalled_secs: float
    peak_extra_nbytes: int
    stage_secs: Mapping[str, float] = field(default_factory=dict)

    @property
    def gbytes_per_sec(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed save, with what the log reports about it.

    Attributes:
        path: Where it is: the target's folder, unless foreign files had that name.
        target_name: The name of the target's folder, such as 'hf_model_best'.
    """

    path: Path
    target_name: str
    step: Step
    cost: SaveCost
    warnings: tuple[str, ...] = ()
