"""Checks that all ranks see the same folder, with the same inode numbers."""

from __future__ import annotations

import os
from pathlib import Path

from xhf_hooks.distributed.collective import Collective
from xhf_hooks.errors import TargetError


def is_shared(probe: Path, collective: Collective) -> bool:
    """Rank 0 writes the file ``probe``, and all ranks look for it. Runs on: all ranks.

    The inode number must be equal on all ranks: writers identify files by it (writers/output_file.py). NFS, Lustre,
    CephFS, MooseFS and others use the server's number on every host; some FUSE file systems make up their own.

    Args:
        probe: A name that was never used before; rank 0's is used.

    Raises:
        AgreedError: Rank 0 cannot write there.
    """
    probe = probe.with_name(collective.broadcast(probe.name))  # hosts may mount the folder at different paths
    number = None
    with collective.stage('preflight'):
        if collective.rank == 0:
            number = _write_probe(probe)
    number = collective.broadcast(number)
    is_missed = collective.any(not _sees(probe, number))
    with collective.stage('preflight'):
        if collective.rank == 0:
            probe.unlink(missing_ok=True)
    return not is_missed


def _sees(probe: Path, number: int) -> bool:
    try:
        with probe.open() as file:
            return file.read() == probe.name and os.fstat(file.fileno()).st_ino == number
    except OSError:
        return False


def _write_probe(probe: Path) -> int:
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text(probe.name)
        return probe.stat().st_ino
    except OSError as error:
        raise TargetError(f'{probe.parent} cannot be written: {error}; set out_dir to a folder that can') from error
