"""Commits staging folders and cleans up after killed runs. Runs on: rank 0.

On Linux, one system call exchanges the old and the new folder, so the final name always holds a complete checkpoint.
Where that is not possible (NFS, MooseFS), the old folder is first moved aside, and :meth:`CheckpointFolder.recover`
restores it if the run is killed in between.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xhf_hooks.errors import TargetError
from xhf_hooks.format.safetensors import check_file
from xhf_hooks.format.text import size_text
from xhf_hooks.integrity.check import check_folder
from xhf_hooks.integrity.manifest import Commit, describe_folder, read_commit, write_manifest
from xhf_hooks.places.kept_folder import (
    archive_name,
    archives,
    exchange,
    look_up,
    new_name,
    others_in,
    outdated,
    set_apart,
)
from xhf_hooks.places.lock import Answer, RunLock
from xhf_hooks.places.target import SaveTarget, write_indexes
from xhf_hooks.planning.types import SavePlan, Step, WrittenTensor
from xhf_hooks.threads import WorkerThreads

#: Bytes that names beside the final one add: ``.hf_model.discarded-0123456789ab``, ``hf_model_others_iter_500000``.
_MOST_ADDED_TO_NAME = 24
#: Bytes that paths in the folder add: ``/adapter/model-00001-of-00002.safetensors``, files of remote code.
_MOST_ADDED_TO_PATH = 128


class CheckpointFolder(SaveTarget):
    """The folder of the newest save, such as ``hf_model``, and the older and temporary ones beside it.

    Temporary folders get names that were never used before, so that no host has stale cache entries for them. Before a
    folder is changed, the server is asked what its name refers to (:func:`.kept_folder.look_up`).

    Args:
        final: The name of the newest committed save.
        max_keep: How many saves to keep, including the newest; -1 keeps all.
        fsync: Flush to the disk before the commit. Only the benchmark turns this off.
        elsewhere: How the user chooses another folder, for messages.

    Attributes:
        staging: The folder that is being filled, from :meth:`open_staging` on.
        warnings: Warnings of the last commit or recovery, for the log; :meth:`open_staging` clears them.
    """

    def __init__(self, final: Path, max_keep: int, fsync: bool = True, elsewhere: str = 'set out_dir to') -> None:
        super().__init__(final, max_keep)
        self.fsync = fsync
        self.elsewhere = elsewhere
        self.staging: Path | None = None
        self._lock = RunLock(final)
        self._archived: dict[str, Commit | None] = {}  # by name; each is read once

    def claim(self) -> None:
        """Prepare the folder before training: create the parent, check that it is writable, lock, recover.

        Raises:
            TargetError: It is not writable, has too long a name, is in use by another run, or holds foreign files.
        """
        parent = self.final.parent
        try:
            try:
                parent.mkdir(parents=True, exist_ok=True)
                self._refuse_long_names()
                self._lock.acquire_or_explain(self.final, self.elsewhere)
                probe = new_name(self.final, 'probe')
                probe.write_bytes(b'x')
                probe.unlink()
            except OSError as error:
                raise TargetError(f'{parent} cannot be written: {error}; {self.elsewhere} a folder that can') from error
            self._refuse_foreign()
            self.recover()
        except BaseException:
            self.release()
            raise

    def _refuse_long_names(self) -> None:
        parent, name = self.final.parent, self.final.name
        name_room = os.pathconf(parent, 'PC_NAME_MAX') - _MOST_ADDED_TO_NAME - len(os.fsencode(name))
        path_room = os.pathconf(parent, 'PC_PATH_MAX') - _MOST_ADDED_TO_PATH - len(os.fsencode(self.final))
        excess = -min(name_room, path_room)
        if excess > 0:
            raise TargetError(
                f'{self.final}: the path is {excess} bytes too long for the names that a save adds to it; '
                f'{self.elsewhere} a shorter one'
            )

    def _refuse_foreign(self) -> Commit | None:
        """Returns the save that has the final name, if any.

        Raises:
            TargetError: Something else has that name.
        """
        final, found = self.final, look_up(self.final)
        if found is None:
            return None
        if not stat.S_ISDIR(found.st_mode):
            raise TargetError(
                f'{final} is not a folder, and a save would replace it. Remove it, or {self.elsewhere} another'
            )
        commit = read_commit(final)
        if commit is None and any(final.iterdir()):
            raise TargetError(
                f'{final} holds files that this package did not write, and a save would replace them. '
                f'Move them away, or {self.elsewhere} another'
            )
        return commit

    def recover(self) -> None:
        """Clean up after a killed run: move a complete folder to its name, delete a partial one."""
        for leftover in self._leftovers():
            self._recover(leftover)
        self._delete_discarded()
        for kept in self._unless_live('kept'):  # this run has no readers yet (kept_folder.py)
            shutil.rmtree(kept, ignore_errors=True)
        for probe in self._beside('probe', 'shared', 'lock.clock'):
            probe.unlink(missing_ok=True)
        _fsync(self.final.parent)
        self._delete_outdated()

    def recover_if_dead(self) -> bool:
        """Call :meth:`recover`, unless a live run holds, or may hold, the lock."""
        if self._lock.acquire() is Answer.HELD:
            return False
        try:
            self.recover()
        finally:
            self.release()
        return True

    def _recover(self, leftover: Path) -> None:
        if look_up(leftover) is None:
            return
        saved, is_there = read_commit(leftover), look_up(self.final) is not None
        current = read_commit(self.final) if is_there else None
        if saved is None:  # incomplete, since the manifest is written last
            self._discard(leftover)
        elif not is_there:
            os.rename(leftover, self.final)
        elif current is not None and saved > current:
            self._tidy(self._replace_final(leftover), current, saved)
        else:
            self._tidy(leftover, saved, current)

    def open_staging(self, step: Step | None = None) -> Path:
        self.final.parent.mkdir(parents=True, exist_ok=True)
        for leftover in self._leftovers():  # from a save that failed after its commit
            self._recover(leftover)
        self.warnings = []
        self.staging = new_name(self.final, 'staging')
        self.staging.mkdir()
        return self.staging

    @property
    def token(self) -> str:
        return '' if self.staging is None else self.staging.name

    def place(self, token: str) -> Path:
        return self.final.with_name(token)

    def name_of(self, token: str) -> Path:
        return self.final

    def beside(self, suffix: str) -> CheckpointFolder:
        return CheckpointFolder(self.final.with_name(f'{self.final.name}_{suffix}'), max_keep=1)

    def free_nbytes(self) -> int:
        return shutil.disk_usage(self.final.parent).free

    def require_room(self, nbytes: int) -> int:
        free = self.free_nbytes()
        if free < nbytes:
            fewer = ', or keep fewer with max_keep_ckpts' if self.max_keep > 1 else ''
            raise TargetError(
                f'{self.final.parent} has {size_text(free)} free, and {size_text(nbytes)} are needed; '
                f'free some space, or {self.elsewhere} one on a larger disk{fewer}'
            )
        return free

    def commit(
        self,
        plan: SavePlan,
        tensors: Sequence[WrittenTensor],
        step: Step,
        facts: dict[str, Any],
        verify: str = 'sizes',
        threads: WorkerThreads | None = None,
    ) -> None:
        write_indexes(plan, self.staging)
        for file in plan.files:
            check_file(self.staging / file.name, file.header, file.nbytes)
        before = self._refuse_foreign()
        if self.fsync:
            _fsync_tree(self.staging)
        others = [before] if before else self._archives().values()
        number = 1 + max((commit.number for commit in others), default=0)
        manifest = describe_folder(self.staging, plan, tensors, step, self._numbered(facts, number))
        if verify == 'full':
            check_folder(self.staging, manifest, 'full', threads=threads)
        write_manifest(self.staging, manifest)
        _fsync(self.staging)
        self._publish(Commit(number, step.iteration, step, files=None))
        with contextlib.suppress(OSError):
            self._delete_outdated()

    def abandon(self) -> None:
        if self.staging is None:
            return
        staged, current = read_commit(self.staging), read_commit(self.final)
        if staged and current and staged < current:
            return  # already exchanged: this is the old checkpoint, left to open_staging() or recover()
        shutil.rmtree(self.staging, ignore_errors=True)

    def release(self) -> None:
        self._lock.release()

    def _publish(self, new: Commit) -> None:
        old = self._refuse_foreign()
        if not self.final.exists():
            os.rename(self.staging, self.final)
            _fsync(self.final.parent)
            return
        displaced = self._replace_final(self.staging)
        _fsync(self.final.parent)
        with contextlib.suppress(OSError):  # the new save is committed; the next one cleans up the rest
            self._tidy(displaced, old, new)

    def _replace_final(self, new: Path) -> Path:
        """Give ``new`` the final name; returns the new path of the old folder."""
        if exchange(new, self.final):
            return new
        aside = new_name(self.final, 'previous')
        os.rename(self.final, aside)
        os.rename(new, self.final)
        return aside

    def _tidy(self, displaced: Path, old: Commit | None, new: Commit | None) -> None:
        """Archive or delete a folder that is no longer the newest."""
        if self.max_keep == 1 or old is None or (new is not None and old.step == new.step):
            self._discard(displaced)
        else:
            self._archive(displaced, old)
            _fsync(self.final.parent)

    def _archive(self, folder: Path, commit: Commit) -> None:
        name = self.final.with_name(archive_name(self.final.name, commit.step.label))
        if look_up(name) is not None:
            self._discard(name)
        os.rename(folder, name)
        self._archived[name.name] = commit

    def _archives(self) -> dict[str, Commit]:
        """Older saves by name; foreign folders are left out."""
        parent = self.final.parent
        names = archives(self.final.name, os.listdir(parent))
        for name in names:
            if name not in self._archived and look_up(parent / name) is not None:
                self._archived[name] = read_commit(parent / name)
        return {name: self._archived[name] for name in names if self._archived.get(name) is not None}

    def _delete_outdated(self) -> None:
        if self.max_keep != -1:
            for name in outdated(self._archives(), self.max_keep):
                if look_up(self.final.with_name(name)) is not None:
                    self._discard(self.final.with_name(name))

    def _discard(self, folder: Path) -> None:
        """Delete a folder that :func:`look_up` found, but not foreign files in it.

        It is renamed first, since a half-deleted folder must not look like a save. Anything that cannot be deleted now,
        such as a file that a reader holds open on NFS, stays under the new name until a later save or run deletes it.
        """
        self._delete_discarded()
        self._set_apart_others(folder)
        discarded = new_name(self.final, 'discarded')
        os.rename(folder, discarded)
        self._archived.pop(folder.name, None)
        shutil.rmtree(discarded, ignore_errors=True)

    def _set_apart_others(self, folder: Path) -> None:
        commit = read_commit(folder)
        if commit is None or commit.files is None:
            return
        others = others_in(folder, commit.files)
        if others:
            name = f'{self.final.name}_others_{commit.step.label}'
            place = set_apart(folder, others, self.final.with_name(name))
            self.warnings.append(
                f'{", ".join(others[:3])}{", ..." if len(others) > 3 else ""} in the save of {commit.step.label} '
                f'did not come from this package; moved to {place}'
            )

    def _delete_discarded(self) -> None:
        for path in self._beside('discarded'):
            if look_up(path) is not None:
                shutil.rmtree(path, ignore_errors=True)

    def _leftovers(self) -> list[Path]:
        """Staging folders and folders that were moved aside, unless a live run may be using them."""
        return self._unless_live('previous', 'staging')

    def _unless_live(self, *kinds: str) -> list[Path]:
        found = self._beside(*kinds)
        if self._lock.answer is not Answer.UNKNOWN:
            return found
        return [path for path in found if not self._lock.changed_lately(path)]

    def _beside(self, *kinds: str) -> list[Path]:
        """Hidden files and folders of these kinds beside the final one."""
        either = '|'.join(map(re.escape, kinds))
        pattern = re.compile(rf'\.{re.escape(self.final.name)}\.({either})(-[0-9a-f]+)?')
        return sorted(path for path in self.final.parent.iterdir() if pattern.fullmatch(path.name))


def sweep_dead_runs(root: Path, final_name: str) -> list[Path]:
    """Recover or delete what killed runs left under other timestamps of a work_dir. Skips live runs, by their locks.

    Returns:
        The paths that were recovered or deleted.
    """
    swept = []
    hidden = f'*/.{glob.escape(final_name)}'
    for kind in ('staging', 'previous', 'discarded', 'kept', 'shared', 'probe'):
        for leftover in sorted(root.glob(f'{hidden}.{kind}*')):
            folder = CheckpointFolder(leftover.parent / final_name, max_keep=-1)
            if folder.recover_if_dead():
                swept.append(leftover)
    return swept


def _fsync_tree(folder: Path) -> None:
    for path in folder.rglob('*'):
        if path.is_file() or path.is_dir():
            _fsync(path)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def claim_targets(
    log: logging.LoggerAdapter, folders: Sequence[SaveTarget], nbytes: int, base_dir: str, *, sweep: Path | None = None
) -> None:
    """Claim the folders and check that saves of ``nbytes`` fit. Runs on: rank 0.

    Args:
        folders: The folder of the newest save, then those of the best.
        sweep: A work_dir; leftovers of killed runs under its other timestamps are removed.

    Raises:
        TargetError: A folder cannot be used, or the disk is too small.
    """
    newest = folders[0]
    if base_dir and Path(base_dir).absolute() == newest.final:
        raise TargetError(f'{newest.final} is the base model that this run starts from; set out_dir elsewhere')
    for folder in folders:
        folder.claim()
        for warning in folder.warnings:
            log.warning(warning)
        if sweep is not None:
            for path in sweep_dead_runs(sweep, folder.final.name):
                log.info(f'removed what a killed run left: {path}')
    free = newest.require_room(nbytes)
    copies = newest.max_keep + 1  # those that are kept, and the one being written
    if newest.max_keep > 0 and free is not None and free < copies * nbytes:
        log.warning(
            f'{newest.final.parent} has {free / 1e9:.2f} GB free; keeping {newest.max_keep} '
            f'and writing the next needs {copies * nbytes / 1e9:.2f} GB'
        )
