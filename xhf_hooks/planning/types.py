"""The frozen records that flow through a save, in the order in which they appear.

Only names, numbers and text live here: no tensor, no torch. Dtypes are the codes of the
safetensors format (``'BF16'``, ``'F32'``, ``'I64'`` ...), see :mod:`xhf_hooks.format.safetensors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from xhf_hooks.format.safetensors import DTYPE_NBYTES

#: Turns the gathered tensors of a :class:`Group` (source name -> tensor) into its outputs (HF name -> tensor).
Combine = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class TensorSpec:
    """A full, unpartitioned tensor of a source.

    Attributes:
        aliases: The other names of the same parameter (tied weights), found by identity.
        has_master: Whether an fp32 master copy exists, as it does for trained 16-bit parameters.
        master_lost: A 16-bit tensor of a checkpoint that was trained, or may have been, and has none there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    has_master: bool = False
    master_lost: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True)
class FileSet:
    """Files that one loader reads together; a save splits, names and indexes each set on its own.

    Attributes:
        folder: Relative to the checkpoint, with slashes; ``''`` is the checkpoint itself.
        stem: ``'model'`` gives ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on.
        may_split: Whether the loader accepts several files and an index.
    """

    folder: str = ''
    stem: str = 'model'
    may_split: bool = True

    def path(self, name: str) -> str:
        """A file of the set, relative to the checkpoint."""
        return f'{self.folder}/{name}' if self.folder else name


@dataclass(frozen=True)
class ExportEntry:
    """A tensor that goes out: its name and shape in the folder, and what must be read to make it.

    Entries that come out of one ``combine`` share the object, and are made together. ``None`` means
    that the single read is the entry, apart from the dtype.

    Attributes:
        source_offset: Where ``combine`` only cuts a run of elements out of the single read, as an expert out of fused
            ones: the element with which it begins. None: what ``combine`` makes must be made.
    """

    hf_name: str
    shape: tuple[int, ...]
    dtype: str
    reads: tuple[str, ...]
    combine: Combine | None = None
    file_set: FileSet = FileSet()
    source_offset: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True)
class Placement:
    """Where one output tensor lies: ``nbytes`` at ``offset`` (bytes from the start of ``file``).

    Attributes:
        owner: The rank that writes it, unless every rank writes its own slice.
        source_offset: The element of the group's only read with which it begins; None if it is no run of elements.
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
    def run(self) -> range:
        """Its elements among those of the group's only read, if it is a run of them."""
        first = self.source_offset or 0
        return range(first, first + math.prod(self.shape))


@dataclass(frozen=True)
class Group:
    """Tensors that must be gathered together, because the outputs are made of all of them.

    Attributes:
        spread: Of the only read, where each rank has a part of it or all.
    """

    reads: tuple[TensorSpec, ...]
    placements: tuple[Placement, ...]
    combine: Combine | None
    spread: Spread | None = None

    @property
    def portions(self) -> list[Portion]:
        """Each output, with what each rank has of it; none where that is not known."""
        if self.spread is None:
            return []
        return [Portion(self.reads[0], place, self.spread.within(place.run)) for place in self.placements]

    @property
    def is_contiguous(self) -> bool:
        """Whether any slice of any output can be made of the same slice of the only read."""
        return all(placement.source_offset is not None for placement in self.placements)

    @property
    def read_nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.reads)


@dataclass(frozen=True)
class Bucket:
    """Groups that are gathered at once."""

    groups: tuple[Group, ...]

    @property
    def read_nbytes(self) -> int:
        return sum(group.read_nbytes for group in self.groups)

    @property
    def read_names(self) -> tuple[str, ...]:
        return tuple(spec.name for group in self.groups for spec in group.reads)


@dataclass(frozen=True)
class Spread:
    """Which elements of a tensor each rank has: consecutive ones, rank 0 the first.

    Every engine cuts something flat into equal parts: a parameter (ZeRO-3), rows (FSDP2), or a flat buffer in which
    the tensor is one of many (FSDP1, the fp32 masters of ZeRO 1 and 2).

    Attributes:
        numel: Elements of the tensor.
        each: Elements of what is cut that a rank has.
        skipped: Elements of what is cut that lie before this tensor.
        on_every_rank: Every rank has all of the tensor; these are their shares where all write or send.
    """

    numel: int
    each: int
    skipped: int = 0
    on_every_rank: bool = False

    def held_by(self, rank: int) -> range:
        """The elements of the tensor that a rank has."""
        first = rank * self.each - self.skipped
        start, end = (min(max(0, at), self.numel) for at in (first, first + self.each))
        return range(start, end)

    @property
    def holders(self) -> range:
        """The ranks that have any."""
        if not self.numel:
            return range(0)
        return range(self.skipped // self.each, -(-(self.skipped + self.numel) // self.each))

    def within(self, run: range) -> Spread:
        """That of a run of its elements, counted from the beginning of the run."""
        return replace(self, numel=len(run), skipped=self.skipped + run.start)

    def read_by(self, rank: int) -> Spread:
        """All of it is what this rank has."""
        return Spread(self.numel, max(1, self.numel), rank * max(1, self.numel))


@dataclass(frozen=True)
class Portion:
    """What travels to the owner of an output tensor at once: of each rank's elements, part ``number`` of ``count``.

    Attributes:
        read: What the tensor is a run of elements of.
        spread: Of the elements of the placement.
        run: Instead of a part of what each rank has, these elements, whoever has them.
    """

    read: TensorSpec
    placement: Placement
    spread: Spread
    number: int = 0
    count: int = 1
    run: range | None = None

    @property
    def holders(self) -> range:
        """The ranks that something comes from, and perhaps others."""
        return self.spread.holders if self.run is None else self.spread.within(self.run).holders

    def held_by(self, rank: int) -> range:
        """The elements of the placement that come from a rank."""
        held = self.spread.held_by(rank)
        if self.run is not None:
            start = min(max(held.start, self.run.start), self.run.stop)
            return range(start, max(start, min(held.stop, self.run.stop)))
        start, end = (held.start + len(held) * part // self.count for part in (self.number, self.number + 1))
        return range(start, end)

    def nbytes_of(self, rank: int) -> int:
        """How many bytes come from a rank, cast."""
        return len(self.held_by(rank)) * self.width

    @property
    def most_nbytes(self) -> int:
        """No less than what comes from all ranks, without a look at each."""
        if self.run is not None:
            return len(self.run) * self.width
        rounded = len(self.spread.holders) * self.width if self.count > 1 else 0
        return -(-self.placement.nbytes // self.count) + rounded

    @property
    def width(self) -> int:
        """Bytes of an element in the file."""
        return DTYPE_NBYTES[self.placement.dtype]


@dataclass(frozen=True)
class Round:
    """Portions that travel at once: from each rank one message to each owner.

    A message is what :meth:`message` lists, one after the other.
    """

    portions: tuple[Portion, ...]

    @property
    def owners(self) -> list[int]:
        """The ranks that receive."""
        return sorted({portion.placement.owner for portion in self.portions})

    def for_owner(self, owner: int) -> list[Portion]:
        """What an owner gets."""
        return [portion for portion in self.portions if portion.placement.owner == owner]

    def message(self, sender: int, owner: int) -> list[Portion]:
        """Portions of which a rank sends something to an owner, in their order in the message."""
        return [portion for portion in self.for_owner(owner) if portion.held_by(sender)]

    def outgoing(self, sender: int) -> dict[int, int]:
        """Bytes of the message from a rank to each other rank that gets one."""
        nbytes: dict[int, int] = {}
        for portion in self.portions:
            owner, found = portion.placement.owner, portion.nbytes_of(sender)
            if owner != sender and found:
                nbytes[owner] = nbytes.get(owner, 0) + found
        return nbytes

    def incoming(self, owner: int) -> dict[int, int]:
        """Bytes of the message to a rank from each other rank that sends one."""
        nbytes: dict[int, int] = {}
        for portion in self.for_owner(owner):
            for sender in portion.holders:
                found = portion.nbytes_of(sender)
                if sender != owner and found:
                    nbytes[sender] = nbytes.get(sender, 0) + found
        return nbytes

    def most_incoming_nbytes(self, owner: int) -> int:
        """No less than all of these together, without a look at each rank."""
        found = 0
        for portion in self.for_owner(owner):
            found += portion.most_nbytes - portion.nbytes_of(owner)
        return found


@dataclass(frozen=True)
class OutputFile:
    """One safetensors file, named relative to the checkpoint: its header bytes and whole size."""

    name: str
    header: bytes
    nbytes: int


@dataclass(frozen=True)
class SavePlan:
    """Everything about a save that can be known before a tensor is touched.

    Attributes:
        sliced: Groups in runs of which every rank writes its own slice; they need no gathering.
        rounds: What ranks have in slices that travel to an owner.
        buckets: All other groups.
        indexes: Content of each index file (``model.safetensors.index.json``); a set of one file has none.
        digest: Hash of all the above; equal on all ranks, or the save does not start.
    """

    files: tuple[OutputFile, ...]
    sliced: tuple[Group, ...]
    rounds: tuple[Round, ...]
    buckets: tuple[Bucket, ...]
    indexes: dict[str, dict[str, Any]]
    digest: str

    @property
    def sent(self) -> list[Placement]:
        """What travels to its owner."""
        return [p.placement for at_once in self.rounds for p in at_once.portions if p.number == 0]

    @property
    def gathered(self) -> list[Group]:
        """The groups of all buckets."""
        return [group for bucket in self.buckets for group in bucket.groups]

    @property
    def placements(self) -> list[Placement]:
        in_groups = (p for group in (*self.sliced, *self.gathered) for p in group.placements)
        return [*self.sent, *in_groups]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def largest_bucket_nbytes(self) -> int:
        return max((bucket.read_nbytes for bucket in self.buckets), default=0)


@dataclass(frozen=True)
class Chunk:
    """Bytes of one placement, in host memory, on the rank that writes them.

    Attributes:
        start: Where in the placement they begin, in bytes.
        overflows: Finite elements that a cast made infinite.
    """

    placement: Placement
    data: memoryview
    start: int = 0
    overflows: int = 0


@dataclass(frozen=True)
class WriteReceipt:
    """Consecutive bytes of one tensor that one rank has written.

    Attributes:
        start: Where in the tensor they begin, in bytes.
        crc32: Of the bytes, taken from memory before they were written.
        non_finite: NaN and infinite values among them.
    """

    file: str
    hf_name: str
    start: int
    nbytes: int
    crc32: int
    non_finite: int


@dataclass(frozen=True)
class WrittenTensor:
    """All of a placement, written: CRC-32 of its bytes and count of its NaN and infinite values."""

    placement: Placement
    crc32: int
    non_finite: int


@dataclass(frozen=True)
class Step:
    """What a save belongs to: ``number`` iterations or epochs, and always the iterations done."""

    unit: str
    number: int
    iteration: int

    @property
    def label(self) -> str:
        return f'{self.unit}_{self.number}'


@dataclass(frozen=True)
class SaveCost:
    """What a save cost. Memory is the extra anonymous memory of the busiest rank, in bytes.

    Attributes:
        seconds: From its begin to its commit; of ``save_hf`` from the call on.
        stalled_secs: For how long training stood still; less than ``seconds`` for a save in the background.
        stage_secs: Seconds by stage, in their order, waiting for other ranks included. The first of ``save_hf`` is
            'prepare': connecting, planning, claiming the folder, a trial of the files around the weights.
        free_before_nbytes: Free on the disk when the save began, on rank 0.
        free_after_nbytes: And when it was committed, and older ones deleted.
    """

    nbytes: int
    seconds: float
    stalled_secs: float
    peak_extra_nbytes: int
    overflows: int
    stage_secs: Mapping[str, float] = field(default_factory=dict)
    free_before_nbytes: int | None = None
    free_after_nbytes: int | None = None

    @property
    def gbytes_per_sec(self) -> float:
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed save, and what the log should say about it.

    Attributes:
        path: Its folder; its URL where it is in a store.
    """

    path: Path | str
    step: Step
    cost: SaveCost
    warnings: tuple[str, ...] = ()
