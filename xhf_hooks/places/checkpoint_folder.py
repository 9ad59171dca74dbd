"""Commits staging folders and cleans up after killed runs. Runs on: rank 0.

On Linux, one system call exchanges the old and the new folder, so the final name always holds a complete checkpoint.
Where that is not possible (NFS, MooseFS), the old folder is first moved aside, and :meth:`CheckpointFolder.recover`
restores it if the run is killed in between.

A complete save is deleted only after the commit of a newer one. Whatever fails while cleaning up is a warning.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from xhf_hooks.errors import TargetError
from xhf_hooks.format.safetensors import check_file
from xhf_hooks.format.text import size_text
from xhf_hooks.integrity.check import check_folder
from xhf_hooks.integrity.manifest import (
    MANIFEST_NAME,
    Manifest,
    describe_folder,
    parse_manifest,
    read_commit,
    read_manifest,
)
from xhf_hooks.places.kept_folder import KeptSave, exchange, fsync, keep_folder, look_up, new_name
from xhf_hooks.places.lock import RunLock
from xhf_hooks.places.other_folders import OtherFolders
from xhf_hooks.planning.types import Step, WrittenSave


class CheckpointFolder:
    """Where committed saves go: the folder of the newest, such as ``hf_model``, and older and temporary ones beside it.

    Rank 0 calls all methods, except that every rank calls :meth:`abort`. In this order:

    - before training :meth:`claim`, after which no other run can use the folder;
    - for each save :meth:`open_staging`, which returns an empty folder; :meth:`require_room`; then all ranks write into
      it, each under ``path.with_name(staging.name)``, as hosts may mount the file system elsewhere; :meth:`commit`,
      which gives it the name of the newest save, and only then deletes older ones; and :meth:`abort`, however it ended;
    - after a commit and before the next one :meth:`keep`, for readers that need the save longer;
    - at the end :meth:`release`.

    Temporary folders get names that were never used before, so that no host has stale cache entries for them. Before a
    folder is changed, the server is asked what its name refers to (:func:`.kept_folder.look_up`).

    Args:
        path: Of the newest committed save. Two targets with the same one are the same.
        max_keep: How many saves to keep, including the newest; -1 keeps all.
        fsync: Flush to the disk before the commit. Only the benchmark turns this off.
        elsewhere: How the user chooses another folder, for messages.
        warn: Called with what the user should know.

    Attributes:
        staging: The folder that is being filled; None when there is none.
        lock: Held from :meth:`claim` to :meth:`release`.
        others: The older and temporary folders.
    """

    def __init__(
        self,
        path: Path,
        max_keep: int,
        *,
        fsync: bool = True,
        elsewhere: str = 'set out_dir to',
        warn: Callable[[str], object] = lambda said: None,
    ) -> None:
        self.path, self.name, self.max_keep, self.fsync = path, path.name, max_keep, fsync
        self.staging: Path | None = None
        self._staged: os.stat_result | None = None
        self.lock = RunLock(path)
        self.others = OtherFolders(path, warn)
        self._run, self._number = uuid.uuid4().hex, -1
        self.elsewhere, self._warn = elsewhere, warn

    def beside(self, suffix: str) -> CheckpointFolder:
        """Another target, with a suffix added to its name, for a single save such as the best one."""
        return CheckpointFolder(self.path.with_name(f'{self.name}_{suffix}'), max_keep=1, warn=self._warn)

    def claim(self, bases: Iterable[str | Path] = ()) -> None:
        """Prepare the folder before training: create the parent, check that it is writable, lock, recover.

        Args:
            bases: Folders of models that the run starts from, which are neither replaced nor deleted.

        Raises:
            TargetError: It is not writable, is in use by another run, or holds foreign files or one of the bases.
        """
        parent = self.path.parent
        try:
            try:
                parent.mkdir(parents=True, exist_ok=True)
                self._take_lock()
                probe = new_name(self.path, 'discarded')  # as long as names get
                probe.write_bytes(b'x')
            except OSError as error:
                raise TargetError(f'{parent} cannot be written: {error}; {self.elsewhere} a folder that can') from error
            with self.others.going_on(f'{probe} could not be deleted'):
                probe.unlink()
            self._refuse_foreign()
            self._refuse_bases(bases)
            self.recover()
        except BaseException:
            self.release()
            raise

    def _take_lock(self) -> None:
        if not self.lock.acquire(patience_secs=10.0):
            raise TargetError(
                f'{self.path} is in use by {self.lock.holder or "another run"}; {self.elsewhere} another. If that '
                f'host is dead and the file system has kept its lock, remove {self.lock.path}'
            )
        if self.lock.holder and not self.lock.is_seen:
            self._warn(
                f"{self.path}: hosts do not see each other's locks here, and {self.lock.holder} has saved there and "
                f'not ended well; if it is still running, stop one of the two runs'
            )

    def release(self) -> None:
        """End the claim, so that another run can use the folder. Does nothing if it is not claimed."""
        self.lock.release()

    def _refuse_foreign(self) -> Manifest | None:
        """Returns the manifest of the save that has the final name, if any.

        Raises:
            TargetError: Something else has that name.
        """
        path, found = self.path, look_up(self.path)
        if found is None:
            return None
        commit, what = None, ''
        try:
            if not stat.S_ISDIR(found.st_mode):
                what = 'is not a folder'
            elif (commit := read_commit(path)) is None and any(path.iterdir()):
                what = 'holds files that this package did not write'
        except OSError as error:
            what = f'cannot be read ({error})'
        if what:
            raise TargetError(f'{path} {what}, and a save would replace it; move it away, or {self.elsewhere} another')
        return commit

    def _refuse_bases(self, bases: Iterable[str | Path]) -> None:
        self.others.guard(bases)
        for folder in (self.path, *self.others.archives(), *self.others.find(*_TEMPORARY)):
            if self.others.is_base(folder):
                raise TargetError(
                    f'{folder} is the base model that this run starts from, or holds it, and saves to {self.path} '
                    f'would replace or delete it; {self.elsewhere} another folder'
                )

    def recover(self) -> None:
        """Clean up after a killed run: move a complete folder to its name, delete a partial one. Never raises."""
        self._recover_saves()
        with self._cleaning_up():  # this run has no readers yet
            for left in self.others.find('kept', 'probe', 'shared'):
                with self.others.going_on(f'{left}, which an earlier run left, could not be deleted'):
                    self.others.remove(left)
            fsync(self.path.parent)

    def _recover_saves(self) -> None:
        """Give complete saves a name, and delete partial ones and what was left of deleted ones."""
        with self._cleaning_up():
            for left in self.others.find('previous', 'staging'):
                with self.others.going_on(f'{left}, which an earlier save left, could not be cleaned up'):
                    self._recover_save(left)
            for left in self.others.find('discarded'):
                with self.others.going_on(f'{left}, which is no longer needed, could not be deleted'):
                    self.others.remove(left)

    def _recover_save(self, left: Path) -> None:
        look_up(left)
        saved = read_manifest(left)
        if saved is None:
            self.others.remove(left)
            return
        look_up(self.path)
        current = read_commit(self.path)
        if current is None:
            os.rename(left, self.path)
        elif saved.is_later(current) and not self.others.is_base(self.path):
            self.others.archive(self._replace_final(left), current)
        else:
            self.others.archive(left, saved)

    def _cleaning_up(self) -> AbstractContextManager[None]:
        return self.others.going_on(f'{self.path.parent}: leftovers of earlier saves could not be cleaned up')

    def open_staging(self) -> Path:
        """Begin a save, or a trial run that ends with :meth:`abort`; returns an empty folder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._recover_saves()  # of a save that failed, or could not clean up
        self.staging = new_name(self.path, 'staging')
        self.staging.mkdir()
        self._staged = os.lstat(self.staging)
        return self.staging

    def require_room(self, needed_nbytes: int) -> None:
        """Check that there is room for a save.

        Raises:
            TargetError: There is not.
        """
        free = shutil.disk_usage(self.path.parent).free
        if free < needed_nbytes:
            fewer = ', or keep fewer with max_keep_ckpts' if self.max_keep > 1 else ''
            raise TargetError(
                f'{self.path.parent} has {size_text(free)} free, and {size_text(needed_nbytes)} are needed; '
                f'free some space, or {self.elsewhere} one on a larger disk{fewer}'
            )

    def commit(self, save: WrittenSave, verify: str = 'sizes', workers: int | None = None) -> None:
        """Check that the save is complete, make it the newest, and only then delete older ones.

        Args:
            verify: With 'full', every byte is read back and compared with the checksums taken from memory.
            workers: Number of threads that read back; None chooses.

        Raises:
            IncompleteError: Something that was planned is missing.
            OSError: It cannot be committed; the previous save is still the newest.
        """
        staging = self.staging
        for file in save.plan.files:
            check_file(staging / file.name, file.header, file.nbytes)
        manifest = describe_folder(staging, save, self._next_number(), self._run)
        if self.fsync:
            for path in staging.rglob('*'):
                fsync(path)
        if verify == 'full':
            check_folder(staging, parse_manifest(manifest, str(staging)), workers)
        part = staging / f'{MANIFEST_NAME}.part'  # a manifest is whole, or not there
        part.write_bytes(manifest)
        fsync(part)
        os.replace(part, staging / MANIFEST_NAME)
        fsync(staging)
        self._publish(save.step)

    def _next_number(self) -> int:
        """A number above those of all saves here: somebody may have given the final name to an older one."""
        if self._number < 0:
            self._number = max((saved.number for saved in self.others.archives().values()), default=0)
        newest = self._refuse_foreign()
        self._number = 1 + max(self._number, newest.number if newest else 0)
        return self._number

    def keep(self) -> KeptSave:
        """Keep the save that was just committed for readers. No save may be committed meanwhile.

        Raises:
            TargetError: It cannot be kept.
        """
        return keep_folder(self.path)

    def newest_manifest(self) -> bytes | None:
        """The manifest of the newest save; None if there is none. Runs on: rank 0, after :meth:`claim`."""
        path = self.path / MANIFEST_NAME
        return path.read_bytes() if path.is_file() else None

    def abort(self) -> None:
        """Remove what was not committed. Runs on: all ranks, after each save. Never raises."""
        staging, self.staging = self.staging, None
        if staging is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(staging), self._staged):  # an exchange may fail, and have happened
                    (staging / MANIFEST_NAME).unlink(missing_ok=True)  # a half-deleted folder must not look like a save
                    shutil.rmtree(staging, ignore_errors=True)

    def _publish(self, step: Step) -> None:
        self._refuse_foreign()
        displaced = None
        if self.path.exists():
            displaced = self._replace_final(self.staging)
        else:
            os.rename(self.staging, self.path)
        self.staging = None  # that name may be the old save's
        with self.others.going_on(f'{self.path}: the new save is complete, but not all is cleaned up'):
            fsync(self.path.parent)  # before anything is deleted
            if displaced is not None:
                self.others.tidy(displaced, step, self.max_keep)
            self.others.delete_outdated(self.max_keep)

    def _replace_final(self, new: Path) -> Path:
        """Give ``new`` the final name; returns the new path of the old folder.

        Raises:
            OSError, TargetError: It could not be done; the message says if the old folder does not have its name.
        """
        self.others.require_no_base(self.path)
        if exchange(new, self.path):
            return new
        aside = new_name(self.path, 'previous')
        os.rename(self.path, aside)
        try:
            os.rename(new, self.path)
        except OSError as error:
            self._put_back(aside, error)
            raise
        return aside

    def _put_back(self, aside: Path, error: OSError) -> None:
        try:
            os.rename(aside, self.path)
        except OSError as second:
            raise TargetError(
                f'{self.path} was not replaced ({error}), and is missing, since the save that had this name could not '
                f'get it back ({second}). That save is complete, as {aside}; the next save or run gives it its name'
            ) from error


#: Folders of saves with temporary names.
_TEMPORARY = ('previous', 'staging', 'kept', 'discarded')


def sweep_dead_runs(
    root: Path,
    final_name: str,
    bases: Iterable[str | Path] = (),
    warn: Callable[[str], object] = lambda said: None,
) -> list[Path]:
    """Recover or delete what killed runs left under other timestamps of a work_dir. Skips live runs, by their locks.

    Args:
        bases: As for :meth:`CheckpointFolder.claim`.
        warn: Called with what could not be cleaned up.

    Returns:
        The folders of those runs of which nothing is left.
    """
    swept = []
    for run in sorted({path.parent for path in root.glob(f'*/.{glob.escape(final_name)}.*-*')}):
        folder = CheckpointFolder(run / final_name, max_keep=-1, warn=warn)
        with folder.others.going_on(f'{run}: what a killed run left there could not be cleaned up'):
            folder.others.guard(bases)
            if run.is_symlink() or not folder.lock.acquire():
                continue
            try:
                folder.recover()
            finally:
                folder.release()
            if not folder.others.find(*_TEMPORARY):
                swept.append(run)
    return swept


def claim_targets(
    log: logging.LoggerAdapter,
    folders: Sequence[CheckpointFolder],
    nbytes: int,
    bases: Iterable[str],
    *,
    sweep: Path | None = None,
) -> None:
    """Claim the folders and check that saves of ``nbytes`` fit. Runs on: rank 0.

    Args:
        folders: The target of the newest save, then those of the best.
        bases: Folders or hub names of the models that the run starts from.
        sweep: A work_dir; leftovers of killed runs under its other timestamps are removed.

    Raises:
        TargetError: A folder cannot be used, or the disk is too small.
    """
    for folder in folders:
        folder.claim(bases)
        if sweep is not None and folder.lock.is_seen:
            with folder.others.going_on(f'{sweep}: what killed runs left there could not be cleaned up'):
                for run in sweep_dead_runs(sweep, folder.name, bases, log.warning):
                    log.info(f'removed what a killed run left in {run}')
    folders[0].require_room(nbytes)
