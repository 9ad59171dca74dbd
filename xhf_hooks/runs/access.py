"""Before training: which ranks can write into the folder of a run, and whether the run may use it."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from xhf_hooks.errors import RanksDifferError, TargetError
from xhf_hooks.files.output_file import FileIdentity, OutputFile, create_file
from xhf_hooks.format.text import some
from xhf_hooks.places.checkpoint_folder import TEMPORARY, CheckpointFolder
from xhf_hooks.places.file_system import new_name
from xhf_hooks.planning.write_strategy import WriteStrategy
from xhf_hooks.ranks.collective import Collective

#: After each attempt to remove a file that could not be written: rclone's mounts send it after it was closed, and it
#: comes back.
_PAUSES_SECS = (0.1, 0.2, 0.4, 0.4)


def choose_strategy(log: logging.LoggerAdapter, option: str, folder: Path, collective: Collective) -> WriteStrategy:
    """Choose which rank writes what, from the option ``writer`` and what ranks see of the folder. Runs on: all ranks.

    Rank 0 first writes a small file there as it will write weights, whatever the writer is.

    Raises:
        AgreedError: Rank 0 cannot write there.
        RanksDifferError: Ranks were given different folders. One folder may have another path on each host, but not
            another name, and every rank must then see what rank 0 writes there.
    """
    wanted = WriteStrategy.POSITIONAL if option == 'auto' else WriteStrategy(option)
    paths, folder_of_rank0 = {folder}, collective.from_rank0('preflight', lambda: folder)
    if collective.vote_any(folder != folder_of_rank0, 'preflight'):
        paths = {*collective.from_all_ranks('preflight', lambda: folder)}
    elif not wanted.all_ranks_write:
        collective.from_rank0('preflight', lambda: folder.with_name(_write_probe(folder)[0]).unlink())
        return wanted
    if len({path.name for path in paths}) == 1 and all_ranks_see(folder, collective):
        return wanted
    if len(paths) > 1:  # rank 0 would save into its folder, and the other ranks would log that theirs has the save
        raise RanksDifferError(
            f'out_dir differs between ranks: {some(sorted(map(str, paths)))}. All ranks of a job save one model, so '
            f'give all the same folder; to train several models, start the ranks of each as a job of their own'
        )
    log.warning(
        f'not all ranks see {folder.parent}, so rank 0 writes: the writer is stream, not {wanted.value}. '
        f'To let every rank write, set out_dir to a folder on a shared file system'
    )
    return WriteStrategy.STREAM


def all_ranks_see(folder: Path, collective: Collective) -> bool:
    """Whether all ranks can open a file that rank 0 makes next to the folder. Runs on: all ranks.

    The inode number must be equal on all ranks: writers identify files by it (files/output_file.py). NFS, Lustre,
    CephFS, MooseFS and others use the server's number on every host; some FUSE file systems make up their own.

    Raises:
        AgreedError: Rank 0 cannot write there.
    """

    name, identity = collective.from_rank0('preflight', lambda: _write_probe(folder))
    probe = folder.with_name(name)  # hosts may mount the folder at different paths
    is_missed = False
    try:
        OutputFile.open(probe, identity).close()
    except (OSError, TargetError):
        is_missed = True
    is_missed = collective.vote_any(is_missed, 'preflight')
    with collective.stage('preflight'):
        if collective.rank == 0:
            with contextlib.suppress(OSError):  # the next run removes it
                probe.unlink()
    return not is_missed


def _write_probe(folder: Path) -> tuple[str, FileIdentity]:
    """Write a small file next to the folder, in the same way as weights: at its full size first, then at offsets.

    Returns its name, and what identifies it.

    Some mounts of object stores take files only from front to back.

    Raises:
        TargetError: That cannot be done there; nothing is left.
    """
    probe = new_name(folder, 'shared')
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        identity = create_file(probe, b'probe', 2 * len(b'probe'))
        fd = os.open(probe, os.O_WRONLY)  # once more, as a rank that writes does
        try:
            identity.require(fd, probe)
            os.pwrite(fd, b'probe', len(b'probe'))
            os.fsync(fd)
        finally:
            os.close(fd)
    except (OSError, TargetError) as error:
        for pause_secs in _PAUSES_SECS:
            with contextlib.suppress(OSError):
                probe.unlink()
            time.sleep(pause_secs)
        raise TargetError(f'{probe.parent} cannot be written: {error}; set out_dir to a folder that can') from error
    return probe.name, identity


def lock_targets(
    log: logging.LoggerAdapter,
    targets: Sequence[CheckpointFolder],
    nbytes: int,
    bases: Sequence[str],
    *,
    remove_leftovers_in: Path | None = None,
    may_replace: bool = True,
) -> None:
    """Lock and recover the targets of a run, and check that saves of ``nbytes`` fit. Runs on: rank 0.

    Args:
        targets: The target of the newest save, then the extra ones, such as the best.
        bases: Folders or hub names of the models that the run starts from.
        remove_leftovers_in: A work_dir; leftovers of killed runs under its other timestamps are removed.
        may_replace: Whether saves may replace saves that were there before the run.

    Raises:
        TargetError: A folder cannot be used, or the disk is too small.
    """
    for target in targets:
        target.lock_and_recover(bases, may_replace=may_replace)
        if remove_leftovers_in is not None and target.lock.works_across_hosts:
            what = f'{remove_leftovers_in}: what killed runs left there could not be cleaned up'
            with target.siblings.warn_instead_of_raising(what):
                sweep_dead_runs(log, remove_leftovers_in, target.name, bases)
    targets[0].require_disk_space(nbytes)


def sweep_dead_runs(log: logging.LoggerAdapter, work_dir: Path, name: str, bases: Iterable[str | Path] = ()) -> None:
    """Recover or delete what killed runs left under the timestamps of a work_dir. Skips live runs, by their locks.

    Args:
        name: The name of their saves, such as ``hf_model``.
        bases: As in :func:`lock_targets`.
    """
    for run in sorted({path.parent for path in work_dir.glob(f'*/.{glob.escape(name)}.*-*')}):
        left = CheckpointFolder(run / name, max_keep=-1, warn=log.warning)
        with left.siblings.warn_instead_of_raising(f'{run}: what a killed run left there could not be cleaned up'):
            left.siblings.guard(bases)
            if run.is_symlink() or not left.lock.acquire():
                continue
            try:
                left.recover()
            finally:
                left.unlock()
            if not left.siblings.find(*TEMPORARY):
                log.info(f'removed what a killed run left in {run}')
