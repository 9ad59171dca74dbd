"""Who writes what, and the choice of that for a run."""

from __future__ import annotations

import contextlib
import logging
from enum import Enum
from pathlib import Path

from xhf_hooks.collective import Collective
from xhf_hooks.errors import TargetError
from xhf_hooks.writers.output_file import OutputFile, create_file


def all_ranks_see(probe: Path, collective: Collective) -> bool:
    """Rank 0 makes the file ``probe``, and all ranks open it. Runs on: all ranks.

    The inode number must be equal on all ranks: writers identify files by it (writers/output_file.py). NFS, Lustre,
    CephFS, MooseFS and others use the server's number on every host; some FUSE file systems make up their own.

    Args:
        probe: A name that was never used before; rank 0's is used.

    Raises:
        AgreedError: Rank 0 cannot write there.
    """
    made = None
    with collective.stage('preflight'):
        if collective.rank == 0:
            try:
                probe.parent.mkdir(parents=True, exist_ok=True)
                made = probe.name, create_file(probe, b'probe', 5)
            except OSError as error:
                raise TargetError(
                    f'{probe.parent} cannot be written: {error}; set out_dir to a folder that can'
                ) from error
    name, identity = collective.broadcast(made)
    is_missed = False
    try:
        OutputFile(probe.with_name(name), identity).close()  # hosts may mount the folder at different paths
    except (OSError, TargetError):
        is_missed = True
    is_missed = collective.any(is_missed)
    with collective.stage('preflight'):
        if collective.rank == 0:
            with contextlib.suppress(OSError):  # the next run removes it
                probe.unlink()
    return not is_missed


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


def choose_writer(log: logging.Logger | logging.LoggerAdapter, option: str, probe: Path, collective: Collective) -> str:
    """Resolve the option ``writer`` for the file system of the output folder. Runs on: all ranks.

    Args:
        probe: Path of a test file beside the output folder, with a name that was never used before.
    """
    wanted = 'positional' if option == 'auto' else option
    if not WhoWrites(wanted).all_ranks or all_ranks_see(probe, collective):
        return wanted
    log.warning(
        f'not all ranks see {probe.parent}, so rank 0 writes: the writer is stream, not {wanted}. '
        f'To let every rank write, set out_dir to a folder on a shared file system'
    )
    return 'stream'
