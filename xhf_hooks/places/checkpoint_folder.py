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
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from xhf_hooks.errors import TargetError
from xhf_hooks.format.safetensors import check_file
from xhf_hooks.format.text import size_text, some
from xhf_hooks.integrity.check import check_folder
from xhf_hooks.integrity.manifest import MANIFEST_NAME, Manifest, describe_folder, parse_manifest, read_commit
from xhf_hooks.places.kept_folder import KeptSave, exchange, keep_folder, look_up, new_name
from xhf_hooks.places.lock import RunLock
from xhf_hooks.planning.types import Step, WrittenSave


class CheckpointFolder:
    """Where committed saves go: the folder of the newest, such as ``hf_model``, and older and temporary ones beside it.

    Rank 0 calls all methods, except that every rank calls :meth:`end_save`. In this order:

    - before training :meth:`claim`, after which no other run can use the folder;
    - for each save :meth:`open_staging`, which returns an empty folder; :meth:`room`; then all ranks write into it,
      each under ``final.with_name(staging.name)``, as hosts may mount the file system elsewhere; :meth:`commit`, which
      gives it the final name, and only then deletes older saves; and :meth:`end_save`, however the save ended;
    - after a commit and before the next one :meth:`keep`, for readers that need the save longer;
    - at the end :meth:`release`.

    Temporary folders get names that were never used before, so that no host has stale cache entries for them. Before a
    folder is changed, the server is asked what its name refers to (:func:`.kept_folder.look_up`).

    Args:
        final: The path of the newest committed save. Two targets with the same one are the same.
        max_keep: How many saves to keep, including the newest; -1 keeps all.
        fsync: Flush to the disk before the commit. Only the benchmark turns this off.
        elsewhere: How the user chooses another folder, for messages.
        warn: Called with what the user should know.

    Attributes:
        staging: The folder that is being filled; None when there is none.
        lock: Held from :meth:`claim` to :meth:`release`.
    """

    def __init__(
        self,
        final: Path,
        max_keep: int,
        *,
        fsync: bool = True,
        elsewhere: str = 'set out_dir to',
        warn: Callable[[str], object] = lambda said: None,
    ) -> None:
        self.final, self.name, self.max_keep, self.fsync = final, final.name, max_keep, fsync
        self.staging: Path | None = None
        self.lock = RunLock(final)
        self._run = uuid.uuid4().hex
        self.elsewhere, self._warn = elsewhere, warn

    def beside(self, suffix: str) -> CheckpointFolder:
        """Another target, with a suffix added to its name, for a single save such as the best one."""
        return CheckpointFolder(self.final.with_name(f'{self.name}_{suffix}'), max_keep=1, warn=self._warn)

    def claim(self) -> None:
        """Prepare the folder before training: create the parent, check that it is writable, lock, recover.

        Raises:
            TargetError: It is not writable, is in use by another run, or holds foreign files.
        """
        parent = self.final.parent
        try:
            try:
                parent.mkdir(parents=True, exist_ok=True)
                self._take_lock()
                probe = new_name(self.final, 'probe')  # as long as names get
                probe.write_bytes(b'x')
                probe.unlink()
            except OSError as error:
                raise TargetError(f'{parent} cannot be written: {error}; {self.elsewhere} a folder that can') from error
            self._refuse_foreign()
            self.recover()
        except BaseException:
            self.release()
            raise

    def _take_lock(self) -> None:
        if not self.lock.acquire(patience_secs=10.0):
            raise TargetError(
                f'{self.final} is in use by {self.lock.holder or "another run"}; {self.elsewhere} another. If that '
                f'host is dead and the file system has kept its lock, remove {self.lock.path}'
            )
        if self.lock.holder and not self.lock.is_seen:
            self._warn(
                f"{self.final}: hosts do not see each other's locks here, and {self.lock.holder} has saved there and "
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
        final, found = self.final, look_up(self.final)
        if found is None:
            return None
        is_folder = stat.S_ISDIR(found.st_mode)
        commit = read_commit(final) if is_folder else None
        if not is_folder or (commit is None and any(final.iterdir())):
            what = 'holds files that this package did not write' if is_folder else 'is not a folder'
            raise TargetError(f'{final} {what}, and a save would replace it; move it away, or {self.elsewhere} another')
        return commit

    def recover(self) -> None:
        """Clean up after a killed run: move a complete folder to its name, delete a partial one."""
        self._recover_saves()
        for kept in self._beside('kept'):  # this run has no readers yet
            shutil.rmtree(kept, ignore_errors=True)
        for probe in self._beside('probe', 'shared'):
            probe.unlink(missing_ok=True)
        _fsync(self.final.parent)
        self._delete_outdated()

    def _recover_saves(self) -> None:
        for leftover in self._beside('previous', 'staging'):
            if look_up(leftover) is None:
                continue
            look_up(self.final)
            saved, current = read_commit(leftover), read_commit(self.final)
            if saved is None:  # incomplete, since the manifest is written last
                self._discard(leftover)
            elif current is None:
                os.rename(leftover, self.final)
            elif saved.is_later(current):
                self._tidy(self._replace_final(leftover), current, saved.step)
            else:
                self._tidy(leftover, saved, current.step)
        for path in self._beside('discarded'):
            shutil.rmtree(path, ignore_errors=True)

    def open_staging(self) -> Path:
        """Begin a save, or a trial run that ends with :meth:`end_save`; returns an empty folder."""
        self.final.parent.mkdir(parents=True, exist_ok=True)
        self._recover_saves()  # of a save that failed after its commit
        self.staging = new_name(self.final, 'staging')
        self.staging.mkdir()
        return self.staging

    def room(self, needed_nbytes: int) -> None:
        """Check that there is room for a save.

        Raises:
            TargetError: There is not.
        """
        free = shutil.disk_usage(self.final.parent).free
        if free < needed_nbytes:
            fewer = ', or keep fewer with max_keep_ckpts' if self.max_keep > 1 else ''
            raise TargetError(
                f'{self.final.parent} has {size_text(free)} free, and {size_text(needed_nbytes)} are needed; '
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
        before = self._refuse_foreign()
        others = [before] if before else self._archives().values()
        number = 1 + max((commit.number for commit in others), default=0)
        manifest = describe_folder(staging, save, number, self._run)
        if self.fsync:
            for path in staging.rglob('*'):
                _fsync(path)
        if verify == 'full':
            check_folder(staging, parse_manifest(manifest, str(staging)), workers)
        (staging / MANIFEST_NAME).write_bytes(manifest)
        _fsync(staging / MANIFEST_NAME)
        _fsync(staging)
        self._publish(save.step)
        with contextlib.suppress(OSError):
            self._delete_outdated()

    def keep(self) -> KeptSave:
        """Keep the save that was just committed for readers. No save may be committed meanwhile.

        Raises:
            TargetError: It cannot be kept.
        """
        return keep_folder(self.final)

    def newest_manifest(self) -> bytes | None:
        """The manifest of the newest save; None if there is none. Runs on: rank 0, after :meth:`claim`."""
        path = self.final / MANIFEST_NAME
        return path.read_bytes() if path.is_file() else None

    def end_save(self) -> None:
        """Remove what was not committed. Runs on: all ranks, after each save. Never raises."""
        staging, self.staging = self.staging, None
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)

    def _publish(self, step: Step) -> None:
        old = self._refuse_foreign()
        displaced = None
        if self.final.exists():
            displaced = self._replace_final(self.staging)
        else:
            os.rename(self.staging, self.final)
        self.staging = None  # that name may be the old save's
        _fsync(self.final.parent)
        if displaced is not None:
            with contextlib.suppress(OSError):  # the new save is committed; the next one cleans up the rest
                self._tidy(displaced, old, step)

    def _replace_final(self, new: Path) -> Path:
        """Give ``new`` the final name; returns the new path of the old folder."""
        if exchange(new, self.final):
            return new
        aside = new_name(self.final, 'previous')
        os.rename(self.final, aside)
        os.rename(new, self.final)
        return aside

    def _tidy(self, displaced: Path, old: Manifest | None, newest: Step) -> None:
        """Archive or delete a folder that is no longer the newest."""
        if self.max_keep == 1 or old is None or old.step == newest:
            self._discard(displaced)
            return
        name = self.final.with_name(f'{self.name}_{old.step.label}')
        if look_up(name) is not None:
            self._discard(name)
        os.rename(displaced, name)
        _fsync(self.final.parent)

    def _archives(self) -> dict[Path, Manifest]:
        """Older saves, from the last commit to the first; foreign folders are left out.

        Not by iteration: a resumed run commits some iterations again.
        """
        ours = re.compile(rf'{re.escape(self.name)}_(iter|epoch)_\d+')
        paths = [path for path in self.final.parent.iterdir() if ours.fullmatch(path.name)]
        found = [(path, commit) for path in paths if look_up(path) is not None and (commit := read_commit(path))]
        return dict(sorted(found, key=lambda one: (one[1].number, one[1].step.iteration), reverse=True))

    def _delete_outdated(self) -> None:
        if self.max_keep != -1:
            for path in [*self._archives()][self.max_keep - 1 :]:
                self._discard(path)

    def _discard(self, folder: Path) -> None:
        """Delete a folder that :func:`look_up` found, but not foreign files in it.

        It is renamed first, since a half-deleted folder must not look like a save. Anything that cannot be deleted now,
        such as a file that a reader holds open on NFS, stays under the new name until the next save or run deletes it.
        """
        self._set_apart_others(folder)
        discarded = new_name(self.final, 'discarded')
        os.rename(folder, discarded)
        shutil.rmtree(discarded, ignore_errors=True)

    def _set_apart_others(self, folder: Path) -> None:
        """Move files and links that its manifest does not name to a new folder."""
        commit = read_commit(folder)
        if commit is None:
            return
        found = {path.relative_to(folder) for path in folder.rglob('*') if path.is_symlink() or not path.is_dir()}
        others = sorted(found - {Path(name) for name in (*commit.files, MANIFEST_NAME)})
        if not others:
            return
        place = self.final.with_name(f'{self.name}_others_{commit.step.label}')
        if look_up(place) is not None:
            place = place.with_name(f'{place.name}_{uuid.uuid4().hex[:8]}')
        for name in others:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(folder / name, place / name)
        what = f'{some([str(name) for name in others])} in the save of {commit.step.label}'
        self._warn(f'{what} did not come from this package; moved to {place}')

    def _beside(self, *kinds: str) -> list[Path]:
        """Hidden files and folders of these kinds beside the final one."""
        pattern = re.compile(rf'\.{re.escape(self.name)}\.({"|".join(kinds)})(-[0-9a-f]+)?')
        return sorted(path for path in self.final.parent.iterdir() if pattern.fullmatch(path.name))


def sweep_dead_runs(root: Path, final_name: str) -> list[Path]:
    """Recover or delete what killed runs left under other timestamps of a work_dir. Skips live runs, by their locks.

    Returns:
        The folders of those runs.
    """
    swept = []
    for run in sorted({path.parent for path in root.glob(f'*/.{glob.escape(final_name)}.*-*')}):
        folder = CheckpointFolder(run / final_name, max_keep=-1)
        if folder.lock.acquire():
            try:
                folder.recover()
            finally:
                folder.release()
            swept.append(run)
    return swept


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def claim_targets(
    log: logging.LoggerAdapter,
    folders: Sequence[CheckpointFolder],
    nbytes: int,
    base_dir: str,
    *,
    sweep: Path | None = None,
) -> None:
    """Claim the folders and check that saves of ``nbytes`` fit. Runs on: rank 0.

    Args:
        folders: The target of the newest save, then those of the best.
        sweep: A work_dir; leftovers of killed runs under its other timestamps are removed.

    Raises:
        TargetError: A folder cannot be used, or the disk is too small.
    """
    newest = folders[0]
    if base_dir and Path(base_dir).absolute() == newest.final:
        raise TargetError(f'{newest.final} is the base model that this run starts from; set out_dir elsewhere')
    for folder in folders:
        folder.claim()
        if sweep is not None and folder.lock.is_seen:
            for run in sweep_dead_runs(sweep, folder.name):
                log.info(f'removed what a killed run left in {run}')
    newest.room(nbytes)
