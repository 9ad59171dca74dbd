"""Commits staging folders and cleans up after killed runs. Runs on: rank 0.

=============================  =======================================================================================
``hf_model``                   the newest save
``hf_model_iter_500``          an older one, if more than one is kept
``hf_model_others_iter_500``   foreign files, or changed ones, that were in a save when it was deleted
``.hf_model.lock``             says who saves here
``.hf_model.staging-*``        a save that is being written
``.hf_model.previous-*``       the save whose name the new one gets, where two folders cannot be exchanged
``.hf_model.discarded-*``      a save that is being deleted
``.hf_model.kept-*``           a pinned save, for its readers: uploads, and commands of ``on_saved``
``.hf_model.shared-*``         a file that shows whether all ranks see the folder
=============================  =======================================================================================

On Linux, one system call exchanges the old and the new folder, so ``hf_model`` is always a complete save. Where that
is not possible (NFS, MooseFS), the old one is first renamed, and :meth:`CheckpointFolder.recover` restores it if the
run is killed in between (:mod:`.replacement` has a third way). A complete save is deleted only after the commit of a
newer one. Whatever fails while cleaning up is a warning.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from xhf_hooks.errors import TargetError
from xhf_hooks.files.check import check_folder
from xhf_hooks.files.manifest import (
    CommitRecord,
    describe_folder,
    parse_manifest,
    read_manifest,
)
from xhf_hooks.format.checksum import crc32
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.format.safetensors import check_file
from xhf_hooks.format.text import size_text
from xhf_hooks.places.file_system import fsync, look_up, new_name, unused
from xhf_hooks.places.lock import RunLock
from xhf_hooks.places.pinned_save import PinnedSave, pin_save
from xhf_hooks.places.replacement import is_of_image, replace_by_deleting, replace_folder, require_replaceable
from xhf_hooks.places.retention import Retention
from xhf_hooks.places.sibling_folders import SiblingFolders
from xhf_hooks.planning.plan import WrittenSave
from xhf_hooks.planning.types import Step

#: Kinds of temporary folders that hold saves.
TEMPORARY = ('previous', 'staging', 'kept', 'discarded')


class _Occupant(NamedTuple):
    """What has the name of the newest save.

    Attributes:
        status: Of the folder; None if nothing has the name.
        saved: What the manifest of the save says; None if there is none.
        problem: Why the name is not ours to use; '' if it is.
    """

    status: os.stat_result | None
    saved: CommitRecord | None
    problem: str


class CheckpointFolder:
    """The target of saves: the folder of the newest one, such as ``hf_model``, and its sibling folders.

    Rank 0 calls all methods, except that every rank calls :meth:`abort`. In this order:

    - before training :meth:`lock_and_recover`, after which no other run can use the folder;
    - for each save :meth:`open_staging`, which returns an empty folder; :meth:`require_disk_space`; then all ranks
      write into that folder, each under ``path.with_name(staging.name)``, as hosts may mount the file system elsewhere;
      :meth:`commit`, which gives it the name of the newest save, and only then has older saves deleted in the
      background; and :meth:`abort`, however the save ended;
    - after a commit and before the next one :meth:`pin`, for readers that need the save longer;
    - at the end :meth:`unlock`.

    Temporary folders get names that were never used before, so that no host has stale cache entries for them. Before a
    folder is changed, the server is asked what its name refers to (:func:`.look_up`).

    Args:
        path: Of the newest committed save. At most one target per path is locked at a time.
        max_keep: How many saves to keep, including the newest; -1 keeps all.
        keep_every: As in :class:`.Retention`.
        is_resumed: As in :class:`.RunInfo`.
        elsewhere: How the user chooses another folder, for messages.
        warn: Called with what the user should know.

    Attributes:
        staging: The folder of the save that is being written; None when there is none.
        siblings: Older saves, and temporary folders.
        manifest_checksums: CRC-32 of the manifests of its saves.
        lock: Held from :meth:`lock_and_recover` to :meth:`unlock`.
        is_for_save_hf: Made by ``save_hf``, where each save is a separate call. Then a commit waits until older saves
            are deleted.
    """

    def __init__(
        self,
        path: Path,
        max_keep: int,
        *,
        keep_every: int | None = None,
        is_resumed: bool | None = None,
        elsewhere: str = 'set out_dir to',
        warn: Callable[[str], object] = lambda said: None,
    ) -> None:
        self.path, self.name = path, path.name
        self.retention = Retention(max_keep, keep_every)
        self.elsewhere, self._warn = elsewhere, warn
        self.lock = RunLock(path)
        self.is_for_save_hf = False
        self.siblings = SiblingFolders(path, warn)
        self._deletions = [self.siblings.deletion]  # those of all targets of the run: they may share a disk
        self.staging: Path | None = None
        self.manifest_checksums: set[int] = set()
        self._staged_inode = 0
        self._is_resumed = is_resumed
        self._last: CommitRecord | None = None  # of the last commit
        self._committed = path  # the last commit: normally `path`; `path_<step>` if foreign files occupy `path`

    def extra_target(self, suffix: str) -> CheckpointFolder:
        """Another target, with a suffix added to its name, for a single save such as the best one."""
        path = self.path.with_name(f'{self.name}_{suffix}')
        extra = CheckpointFolder(path, 1, is_resumed=self._is_resumed, warn=self._warn)
        self._deletions += extra._deletions
        extra._deletions = self._deletions
        return extra

    def lock_and_recover(self, bases: Iterable[str | Path] = (), *, may_replace: bool = True, remedy: str = '') -> None:
        """Make the folder usable before training: create the parent, check that it is writable, lock, recover.

        Args:
            bases: Folders of models that the run starts from, which are neither replaced nor deleted.
            may_replace: Whether an existing save (also one just recovered from a killed run) may be replaced.
            remedy: What else the user may do if it may not, for the message.

        Raises:
            TargetError: The folder is not writable, is a mount point, is in use by another run, or holds foreign files,
                one of the bases or a save that must not be replaced.
        """
        self._take_lock()
        try:
            require_replaceable(self.path, self.elsewhere)
            if is_of_image(self.path):
                self._warn(
                    f'{self.path} cannot be renamed: it is in a lower layer of an overlay file system (of the image of '
                    f'a container). The first save will delete it, and get its name after that'
                )
            self._require_ours()
            self._refuse_bases(bases)
            self.recover()
            with self.siblings.warn_instead_of_raising(f'{self.path.parent} could not be searched for older saves'):
                self.siblings.older()  # reads manifests now, not while ranks wait for a commit
            if not may_replace and self._require_ours() is not None:
                raise TargetError(
                    f'{self.path} exists: another process has written it, and may have been killed after that; '
                    f'{self.elsewhere} another folder{remedy}'
                )
        except BaseException:
            self.unlock()
            raise

    def unlock(self) -> None:
        """Let other runs use the folder, once nothing is being deleted there."""
        self.siblings.deletion.wait()
        self.lock.release()

    def recover(self) -> None:
        """Clean up after a killed run: move a complete folder to its name, delete a partial one. Never raises."""
        self._clean_up('discarded', 'kept', 'shared')  # this run has no readers yet

    def open_staging(self) -> Path:
        """Begin a save, or a trial that ends with :meth:`abort`; returns an empty folder.

        First waits until the saves that the last commit deletes are gone, and their disk space is free.
        """
        self.siblings.deletion.wait()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._clean_up('discarded')  # after a save that failed, or could not clean up
        self.staging = new_name(self.path, 'staging')
        self.staging.mkdir()
        self._staged_inode = os.lstat(self.staging).st_ino
        return self.staging

    def require_disk_space(self, needed_nbytes: int) -> None:
        """Check that a save fits on the disk, once the saves that this run deletes are gone, if it would not before.

        Raises:
            TargetError: It does not.
        """
        for deletion in self._deletions:
            if shutil.disk_usage(self.path.parent).free < needed_nbytes:
                deletion.wait()
        free = shutil.disk_usage(self.path.parent).free
        if free < needed_nbytes:
            fewer = ', or keep fewer saves' if self.retention.max_keep > 1 else ''
            raise TargetError(
                f'{self.path.parent} has {size_text(free)} free, and {size_text(needed_nbytes)} are needed; '
                f'free some space, or {self.elsewhere} one on a larger disk{fewer}'
            )

    def commit(self, save: WrittenSave, verify: str = 'sizes', workers: int | None = None) -> Path:
        """Check that the save is complete, make it the newest, and only then have older ones deleted.

        Returns:
            The folder of the save: normally ``path``; ``path_<step>`` if foreign files occupy ``path``.

        Args:
            verify: With 'full', every byte is read back and compared with the checksums taken from memory.
            workers: Number of threads that read back; None chooses.

        Raises:
            IncompleteError: A planned file or tensor is missing.
            OSError: The save cannot be committed; the previous save is still the newest.
        """
        staging = self.staging
        if staging is None:
            raise TargetError(f'{self.path}: no save was begun')
        for file in save.plan.files:
            check_file(staging / file.name, file.header, file.nbytes)
        occupant = self._look_at_newest()
        commit = self._next_commit(save.step, occupant)
        manifest = describe_folder(staging, save, commit)
        for path in staging.rglob('*'):
            fsync(path)
        if verify == 'full':
            check_folder(staging, parse_manifest(manifest, str(staging)), workers)
        part = staging / f'{MANIFEST_NAME}.part'  # a manifest is whole, or not there
        part.write_bytes(manifest)
        fsync(part)
        os.replace(part, staging / MANIFEST_NAME)
        fsync(staging)
        self.manifest_checksums.add(crc32(manifest))  # before the rename, which may raise after it took effect
        self._publish(staging, commit, occupant)
        if self.is_for_save_hf:  # after the call, the user's code may delete the folder, or end the process
            self.siblings.deletion.wait()
        return self._committed

    def abort(self) -> None:
        """Remove the folder of a save that was not committed. Runs on: all ranks, after each save. Never raises."""
        staging, self.staging = self.staging, None
        if staging is not None:
            with contextlib.suppress(OSError):
                # exchange() may raise after it took effect; then this name holds the old save, which stays
                if os.lstat(staging).st_ino == self._staged_inode:
                    (staging / MANIFEST_NAME).unlink(missing_ok=True)  # a half-deleted folder must not look like a save
                    shutil.rmtree(staging, ignore_errors=True)

    def pin(self) -> PinnedSave:
        """Pin the save that was just committed, for readers. No save may be committed meanwhile."""
        return pin_save(self._committed, self.siblings)

    def newest_manifest(self) -> bytes | None:
        """The manifest of the newest save; None if there is none. To be called after :meth:`lock_and_recover`."""
        path = self.path / MANIFEST_NAME
        return path.read_bytes() if path.is_file() else None

    def _take_lock(self) -> None:
        parent = self.path.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.lstat(new_name(self.path, 'discarded'))  # the longest name of all: it may be too long
            is_held = self.lock.acquire(patience_secs=10.0, say=self._warn)
        except OSError as error:
            raise TargetError(f'{parent} cannot be written: {error}; {self.elsewhere} a folder that can') from error
        if not is_held:
            raise TargetError(
                f'{self.path} is in use by {self.lock.holder or "another run"}; {self.elsewhere} another. If that '
                f'host is dead and the file system has kept its lock, remove {self.lock.path}'
            )
        if self.lock.holder and not self.lock.works_across_hosts:
            self._warn(
                f"{self.path}: hosts do not see each other's locks here, and {self.lock.holder} has saved there and "
                f'not ended well; if it is still running, stop one of the two runs'
            )

    def _require_ours(self) -> CommitRecord | None:
        """Returns what the manifest of the newest save says, if any. Raises TargetError if something else is there."""
        occupant = self._look_at_newest()
        if occupant.problem:
            raise TargetError(
                f'{self.path} {occupant.problem}, and a save would replace it; move it away, or {self.elsewhere} '
                f'another'
            )
        return occupant.saved

    def _look_at_newest(self) -> _Occupant:
        status = look_up(self.path)
        saved, problem = None, ''
        try:
            if status is not None and not stat.S_ISDIR(status.st_mode):
                problem = 'is not a folder'
            elif status is not None:
                saved = self.siblings.record_of(self.path)
                if saved is None and any(self.path.iterdir()):
                    problem = 'holds files that this package did not write'
        except OSError as error:
            problem = f'cannot be read ({error})'
        return _Occupant(status, saved, problem)

    def _refuse_bases(self, bases: Iterable[str | Path]) -> None:
        self.siblings.guard(bases)
        for folder in (self.path, *self.siblings.older(), *self.siblings.find(*TEMPORARY)):
            if self.siblings.is_base(folder):
                raise TargetError(
                    f'{folder} is (or contains) the base model that this run starts from; a save to {self.path} would '
                    f'replace or delete it; {self.elsewhere} another folder'
                )

    def _clean_up(self, *unneeded: str) -> None:
        """Give complete saves a name, delete partial ones, and delete temporary folders of these kinds."""
        warn_instead_of_raising = self.siblings.warn_instead_of_raising
        with warn_instead_of_raising(f'{self.path.parent}: leftovers of earlier saves could not be cleaned up'):
            for left in self.siblings.find('previous', 'staging'):
                with warn_instead_of_raising(f'{left}, which an earlier save left, could not be cleaned up'):
                    self._recover_save(left)
            for left in self.siblings.find(*unneeded):
                self.siblings.remove_discarded(left)

    def _recover_save(self, left: Path) -> None:
        # Each look-up refreshes the client's cache, so that the manifest is read in the folder that has the name now
        look_up(left)
        saved = read_manifest(left)  # None: the save is partial. If it is damaged, the folder stays, with a warning
        if saved is None:
            self.siblings.remove(left)
            return
        look_up(self.path)
        newest = self.siblings.record_of(self.path)
        if newest is None:
            os.rename(left, self.path)  # fails, with a warning, if foreign files are there
        elif saved.commit.is_later(newest) and not self.siblings.is_base(self.path):
            replaced = self._replace_newest(left)
            if replaced is not None:
                self.siblings.add_older(replaced, newest)
        else:
            self.siblings.add_older(left, saved.commit)

    def _next_commit(self, step: Step, occupant: _Occupant) -> CommitRecord:
        """What the manifest of the next save says of its commit.

        Its number is above those of all saves here, since a user may have given an older save the newest one's name.
        """
        if self._last is None:
            found = [*filter(None, [occupant.saved]), *self.siblings.older().values()]
            newest = next(iter(found), CommitRecord(step))
            goes_on = newest.step.iteration <= step.iteration if self._is_resumed is None else self._is_resumed
            run = (newest.run if goes_on else '') or uuid.uuid4().hex
            self._last = CommitRecord(step, max(one.number for one in (newest, *found)), run)
        number = 1 + max(self._last.number, occupant.saved.number if occupant.saved else 0)
        self._last = CommitRecord(step, number, self._last.run, self.name, self.retention.keep_every)
        return self._last

    def _publish(self, staging: Path, commit: CommitRecord, occupant: _Occupant) -> None:
        """Give a complete save the name of the newest one, or one of its own if foreign files have that name.

        Args:
            occupant: What had the name when the manifest was made. It is read again only if that has changed, or if
                the name was not ours to use: perhaps it is by now, or it could not be read for a moment.
        """
        now = look_up(self.path)
        is_same = now is not None and occupant.status is not None and os.path.samestat(now, occupant.status)
        if not is_same or occupant.problem:
            occupant = self._look_at_newest()
        replaced, retention, self._committed = None, self.retention, self.path
        if occupant.problem:  # for example, a user has removed the manifest; that is no reason to lose a finished save
            self._committed = unused(self.path.with_name(f'{self.name}_{commit.step.label}'))
            os.rename(staging, self._committed)
            if retention.max_keep != -1:  # this save counts as an older one, since `path` itself holds none
                retention = replace(retention, max_keep=retention.max_keep + 1)
            self._warn(
                f'{self.path} {occupant.problem}, so it was left alone. The new save is in {self._committed}. Move '
                f'{self.name} away; then the next save is named {self.name} again'
            )
        elif occupant.status is not None:
            replaced = self._replace_newest(staging)
        else:
            os.rename(staging, self.path)
        self.staging = None  # after an exchange, that name is the old save's
        what = f'{self.path}: the new save is complete, but not all is cleaned up'
        with self.siblings.warn_instead_of_raising(what):
            fsync(self.path.parent)  # before anything is deleted
            self.siblings.remember(self._committed, commit)
            self.siblings.retain(replaced, occupant.saved, commit, retention)

    def _replace_newest(self, new: Path) -> Path | None:
        """Give ``new`` the name of the newest save; returns the new path of the old folder, or None if it is deleted.

        Raises:
            OSError, TargetError: The save was not replaced; the message says so if the old folder lost its name.
        """
        self.siblings.require_no_base(self.path)
        replaced = replace_folder(new, self.path, new_name(self.path, 'previous'))
        if replaced is None:
            replace_by_deleting(new, self.path, self.siblings.delete_in_place)
            self._warn(
                f'{self.path} could not be renamed, as in a lower layer of an overlay file system (of an image of a '
                f'container). It was deleted, and after that the new save got its name'
            )
        return replaced
