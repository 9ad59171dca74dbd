"""Who writes what."""

from __future__ import annotations

from enum import Enum


class WhoWrites(Enum):
    """Who writes what: the values of the option ``writer``."""

    #: Every rank writes its own slices at their places in the files: no gather, no copy, no network. Only tensors that
    #: must be complete before they are written are gathered: merged ones, or those on NVMe.
    POSITIONAL = 'positional'
    #: Each file has one owner, which writes it, and the other ranks send it their slices: for storage where several
    #: writers of one file slow each other down (Lustre stripes, NFS). There are no more writers than files.
    PARALLEL = 'parallel'
    #: Rank 0 writes, and the other ranks send it their slices.
    STREAM = 'stream'
    #: Every rank receives every tensor, and rank 0 writes: for engines whose partitions cannot be read.
    GATHER = 'gather'

    @property
    def all_ranks(self) -> bool:
        """Every rank writes, so all ranks must see the folder."""
        return self in (WhoWrites.POSITIONAL, WhoWrites.PARALLEL)

    @property
    def writes_local_shards(self) -> bool:
        """Every rank writes its own slices where possible, into all files. If False, each file has one writer."""
        return self is WhoWrites.POSITIONAL

    @property
    def receives_local_shards(self) -> bool:
        """Every rank sends its own slices where possible to the rank that writes the tensor."""
        return self not in (WhoWrites.POSITIONAL, WhoWrites.GATHER)
