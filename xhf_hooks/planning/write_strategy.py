"""Which rank writes what: the values of the option ``writer``, an input of the plan."""

from __future__ import annotations

from enum import Enum


class WriteStrategy(Enum):
    """Which rank writes which bytes, and how it gets the bytes that other ranks hold."""

    #: Every rank writes its own slices at their places in the files: no gather, no copy, no network. Only tensors that
    #: must be complete before they are written are gathered, such as merged ones.
    POSITIONAL = 'positional'
    #: Each file has one owner, which writes it, and the other ranks send it their slices: for storage where several
    #: writers of one file slow each other down (Lustre stripes, NFS). There are no more owners than files.
    PARALLEL = 'parallel'
    #: Rank 0 writes, and the other ranks send it their slices.
    STREAM = 'stream'
    #: Every rank receives every tensor, and rank 0 writes: for engines whose partitions cannot be read.
    GATHER = 'gather'

    @property
    def all_ranks_write(self) -> bool:
        """If True, all ranks must see the folder. If False, rank 0 writes."""
        return self in (WriteStrategy.POSITIONAL, WriteStrategy.PARALLEL)

    @property
    def in_place(self) -> bool:
        """Whether ranks write their own slices where possible, into all files. If False, each file has one owner."""
        return self is WriteStrategy.POSITIONAL

    @property
    def reads_slices(self) -> bool:
        """Whether slices are read where possible, to be written or sent. If False, whole tensors are gathered."""
        return self is not WriteStrategy.GATHER
