"""Who writes what, and the choice of that for a run."""

from __future__ import annotations

import logging
from enum import Enum
from pathlib import Path

from xhf_hooks.distributed.collective import Collective
from xhf_hooks.distributed.shared_filesystem import is_shared
from xhf_hooks.errors import OptionError
from xhf_hooks.writers.store import StoreWriter
from xhf_hooks.writers.writer import Writer

#: Value of the option ``writer`` to the name of the writer for stores.
_STORE_WRITERS = {'auto': 'store', 'parallel': 'store', 'stream': 'store_from_rank0'}


class WhoWrites(Enum):
    """Who writes what: the values of the option ``writer``, and those that it stands for if ``out_dir`` is a URL."""

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
    STORE = 'store'
    STORE_FROM_RANK0 = 'store_from_rank0'

    @property
    def all_ranks(self) -> bool:
        """Every rank writes, so all ranks must see the folder."""
        return self in (WhoWrites.POSITIONAL, WhoWrites.PARALLEL, WhoWrites.STORE)

    @property
    def writes_local_shards(self) -> bool:
        """Every rank writes its own slices where possible, into all files. If False, each file has one writer."""
        return self is WhoWrites.POSITIONAL

    @property
    def receives_local_shards(self) -> bool:
        """Every rank sends its own slices where possible to the rank that writes the tensor."""
        return self not in (WhoWrites.POSITIONAL, WhoWrites.GATHER)

    @property
    def front_to_back(self) -> bool:
        """The writer cannot seek, so the plan must deliver each file from its first byte to its last."""
        return self in (WhoWrites.STORE, WhoWrites.STORE_FROM_RANK0)

    @property
    def writer(self) -> type[Writer]:
        """What writes."""
        return StoreWriter if self.front_to_back else Writer


def choose_store_writer(option: str) -> str:
    """Resolve the option ``writer`` if the output goes to an object store.

    Raises:
        OptionError: The writer supports only files.
    """
    if option not in _STORE_WRITERS:
        raise OptionError('writer', f'one of {tuple(_STORE_WRITERS)} when out_dir is a URL', option)
    return _STORE_WRITERS[option]


def choose_writer(log: logging.Logger | logging.LoggerAdapter, option: str, probe: Path, collective: Collective) -> str:
    """Resolve the option ``writer`` for the file system of the output folder. Runs on: all ranks.

    Args:
        probe: Path of a test file beside the output folder, with a name that was never used before.
    """
    wanted = 'positional' if option == 'auto' else option
    if not WhoWrites(wanted).all_ranks or is_shared(probe, collective):
        return wanted
    log.warning(
        f'not all ranks see {probe.parent}, so rank 0 writes: the writer is stream, not {wanted}. '
        f'To let every rank write, set out_dir to a folder on a shared file system'
    )
    return 'stream'
