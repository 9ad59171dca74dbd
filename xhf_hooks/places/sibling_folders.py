"""The sibling folders of the newest save: older saves, and temporary folders. Runs on: rank 0.

A save is known as ours by the manifest in it, and a temporary folder by the random digits of :func:`.new_name`; any
other name proves nothing. Of a save, only the files that its manifest lists are deleted, if they are still the same.
The models that the run started from are neither deleted nor replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from xhf_hooks.errors import TargetError, XhfError
from xhf_hooks.files.manifest import CommitRecord, FileRecord, Manifest, read_manifest, read_undamaged_manifest
from xhf_hooks.format.checksum import crc32
from xhf_hooks.format.index import MANIFEST_NAME, WEIGHTS_SUFFIX
from xhf_hooks.format.text import some
from xhf_hooks.places.background_deletion import BackgroundDeletion
from xhf_hooks.places.file_system import files_in, fsync, is_folder, new_name, remove_tree, unused
from xhf_hooks.places.retention import Retention


class SiblingFolders:
    """The folders next to that of the newest save, and how they are deleted.

    Args:
        newest: The folder of the newest save.
        warn: Called from any thread with a line about a folder that could not be cleaned up, or about foreign files.

    Attributes:
        deletion: Deletes the saves that a commit has made superfluous. Wait for it before the next save, and at each
            end of a run.
    """

    #: What manifests say of their commits, by what identifies their files. A manifest is never changed, and has a line
    #: for each tensor: it is read once. Of the process, since each call of ``save_hf`` makes an object of this class.
    _records: ClassVar[dict[tuple[int, ...], CommitRecord | None]] = {}

    def __init__(self, newest: Path, warn: Callable[[str], object]) -> None:
        self._newest, self._warn = newest, warn
        self._warned: set[str] = set()
        self._guarded: set[Path] = set()
        self.deletion = BackgroundDeletion(newest.name)

    @contextlib.contextmanager
    def warn_instead_of_raising(self, what: str) -> Iterator[None]:
        """Run a block that cleans up. Its failure is a warning, given once; the next save or run tries again.

        Args:
            what: Begins the warning: which folder could not be cleaned up.
        """
        try:
            yield
        except (OSError, XhfError) as error:
            if what not in self._warned:
                self._warned.add(what)
                self._warn(f'{what}: {error}')

    def guard(self, bases: Iterable[str | Path]) -> None:
        """Never delete or replace these models, nor a folder that holds one of them or files that they link to."""
        for base in bases:
            named, files = Path(base).absolute(), list[Path]()
            with contextlib.suppress(OSError):  # not a folder: a name on the Hub, or a file
                files = [path for path in named.iterdir() if path.is_file()]
            for path in (named, *(Path(os.path.realpath(each)) for each in (named, *files))):
                self._guarded |= {path, *path.parents}

    def is_base(self, folder: Path) -> bool:
        """Whether this folder is, or holds, a model that the run started from, whatever either is called."""
        for path in self._guarded:
            with contextlib.suppress(OSError):  # one of them does not exist
                if os.path.samefile(path, folder):
                    return True
        return False

    def require_no_base(self, folder: Path) -> None:
        """Check that a folder may be deleted or replaced.

        Raises:
            TargetError: A model that the run started from is there.
        """
        if self.is_base(folder):
            raise TargetError(f'{folder} is the base model that this run starts from, so it stays')

    def find(self, *kinds: str) -> list[Path]:
        """Temporary files and folders of these kinds, as :func:`.new_name` names them."""
        pattern = re.compile(rf'\.{re.escape(self._newest.name)}\.({"|".join(kinds)})-[0-9a-f]{{12}}')
        return sorted(path for path in self._newest.parent.iterdir() if pattern.fullmatch(path.name))

    def record_of(self, folder: Path) -> CommitRecord | None:
        """What the manifest of a folder says of the commit; None if it is missing or damaged.

        Raises:
            OSError: It cannot be read.
        """
        identity = _identify(folder)
        if identity is None:
            return None
        if identity not in self._records:
            manifest = read_undamaged_manifest(folder)
            self._records[identity] = None if manifest is None else manifest.commit
        return self._records[identity]

    def remember(self, folder: Path, commit: CommitRecord) -> None:
        """Remember what :meth:`record_of` would read in this folder, whose save was just committed."""
        identity = _identify(folder)
        if identity is not None:
            self._records[identity] = commit

    def older(self, label: str = r'(iter|epoch)_\d+') -> dict[Path, CommitRecord]:
        """Older saves, from the last commit to the first.

        Only folders that were once the newest save here, as their manifests say. A save that ``save_hf`` made as
        ``hf_model_iter_2`` has such a name by the user's choice, and is left out.

        In the order of commits, not of iterations: a resumed run commits some iterations again.

        Args:
            label: A pattern of the labels of their steps; by default any.
        """
        name = re.escape(self._newest.name)
        found = {}
        for path in self._newest.parent.iterdir():
            if re.fullmatch(rf'{name}_{label}(_\d+)?', path.name) and is_folder(path):
                with self.warn_instead_of_raising(f'{path} cannot be read, so it stays'):
                    saved = self.record_of(path)
                    is_ours = saved is not None and saved.name == self._newest.name
                    if saved and is_ours and re.fullmatch(rf'{name}_{saved.step.label}(_\d+)?', path.name):
                        found[path] = saved
        by_commit = sorted(found.items(), key=lambda one: (one[1].number, one[1].step.iteration), reverse=True)
        return dict(by_commit)

    def add_older(self, folder: Path, saved: CommitRecord) -> None:
        """Name a complete save as older saves are named (``hf_model_iter_5``), plus a number if that name is taken."""
        wanted = self._newest.with_name(f'{self._newest.name}_{saved.step.label}')
        path = unused(wanted)
        os.rename(folder, path)
        fsync(path.parent)
        if path != wanted:
            self._warn(f'{wanted} is not replaced; the older save of {saved.step.label} is {path}')

    def retain(
        self, replaced: Path | None, saved: CommitRecord | None, newest: CommitRecord, retention: Retention
    ) -> None:
        """After a commit, and at no other time: delete the saves that are too many.

        Args:
            replaced: The folder that had the name of the newest save, if any; it becomes an older one.
            saved: What its manifest says; None if it was empty.
            newest: What was just committed.
            retention: Which saves stay.
        """
        last = (self._newest, newest)  # always stays
        if replaced is not None and saved is None:
            self.delete(replaced, None)
        elif replaced is not None and saved is not None:
            # Superfluous even without other saves, as with max_keep_ckpts=1: no need to name it as an older one first
            is_superfluous = retention.find_superfluous([last, (replaced, saved)]) == [replaced]
            if is_superfluous or _is_same_again(saved, newest):
                self.discard(replaced)
            else:
                for path, older in self.older(saved.step.label).items():
                    if _is_same_again(older, saved):
                        self.discard(path)
                self.add_older(replaced, saved)
        if retention.max_keep == -1:
            return
        for path in retention.find_superfluous([last, *self.older().items()]):
            self.discard(path)

    def discard(self, folder: Path) -> None:
        """Delete a complete save, in the background.

        It is renamed first, since a half-deleted folder must not look like a save. Anything that cannot be deleted now,
        such as a file that a reader holds open on NFS, stays under the new name until the next save or run deletes it.
        """
        with self.warn_instead_of_raising(f'{folder}, which is no longer needed, could not be deleted'):
            self.require_no_base(folder)
            identity = _identify(folder)
            discarded = new_name(self._newest, 'discarded')
            os.rename(folder, discarded)
            if identity is not None:
                self._records.pop(identity, None)
            self.deletion.start(lambda: self.remove_discarded(discarded))

    def remove_discarded(self, path: Path) -> None:
        """Delete a temporary file or folder that is no longer needed; a failure is a warning, given once."""
        with self.warn_instead_of_raising(f'{path}, which is no longer needed, could not be deleted'):
            self.remove(path)

    def remove(self, path: Path) -> None:
        """Delete a temporary file or folder of this package.

        Raises:
            OSError, DamagedError, TargetError: It cannot be deleted, or must not be.
        """
        self.require_no_base(path)
        if not is_folder(path):
            path.unlink(missing_ok=True)
        elif (saved := read_manifest(path)) is not None:  # a damaged one raises: the folder stays
            self.delete(path, saved)
        else:  # incomplete, since the manifest is written last and deleted last
            remove_tree(path)

    def delete(self, folder: Path, saved: Manifest | None) -> None:
        """Delete the files of a save. If there are foreign or changed files, the folder stays with these, renamed.

        May be called in any thread.
        """
        files, foreign = _split_files(folder, saved)
        if not foreign:
            remove_tree(folder)
            return
        _delete_files(folder, files)
        path = self._name_for_others(saved)
        os.rename(folder, path)
        # After the rename: if the process dies before, the next start finds the folder with its manifest, and does it
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        self._warn_of_others(foreign, saved, path)

    def delete_in_place(self, folder: Path) -> None:
        """Delete a save that cannot be renamed; foreign or changed files are moved out of it, one by one.

        The manifest goes last: if the process dies before, the next start knows that the folder is ours.

        Raises:
            OSError, XhfError: It cannot be deleted, or must not be.
        """
        saved = read_manifest(folder)
        files, foreign = _split_files(folder, saved)
        if foreign:
            path = self._name_for_others(saved)
            for name, file in foreign.items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                os.rename(file, path / name)
            self._warn_of_others(foreign, saved, path)
        _delete_files(folder, files)
        for inner in sorted((inner for inner in folder.rglob('*') if inner.is_dir()), reverse=True):
            inner.rmdir()
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        folder.rmdir()

    def _name_for_others(self, saved: Manifest | None) -> Path:
        apart = f'{self._newest.name}_others' if saved is None else f'{self._newest.name}_others_{saved.step.label}'
        return unused(self._newest.with_name(apart))

    def _warn_of_others(self, foreign: Iterable[str], saved: Manifest | None, path: Path) -> None:
        what = self._newest if saved is None else f'the save of {saved.step.label}'
        self._warn(f'{some(sorted(foreign))} in {what} did not come from this package, or was changed; now in {path}')


def _identify(folder: Path) -> tuple[int, ...] | None:
    """What identifies the manifest of a folder and its content; None if there is none."""
    try:
        status = os.stat(folder / MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_same_again(old: CommitRecord, new: CommitRecord) -> bool:
    """Whether a training that was resumed has made the same save again.

    Not if an epoch of the same number ended at another iteration.
    """
    return (old.step, old.run) == (new.step, new.run)


def _split_files(folder: Path, saved: Manifest | None) -> tuple[dict[str, Path], dict[str, Path]]:
    """The files of a save that are as they were saved, and foreign or changed ones; the manifest is in neither."""
    files = files_in(folder)
    files.pop(MANIFEST_NAME, None)
    saved_files = {} if saved is None else saved.files
    foreign = {name: path for name, path in files.items() if not _is_saved(path, saved_files.get(name))}
    return {name: path for name, path in files.items() if name not in foreign}, foreign


def _delete_files(folder: Path, files: dict[str, Path]) -> None:
    """Delete files of a folder, and the folders in it that become empty."""
    for path in files.values():
        path.unlink()
    for inner in sorted({inner for name in files for inner in Path(name).parents}, reverse=True):
        with contextlib.suppress(OSError):  # foreign files are in it
            (folder / inner).rmdir()


def _is_saved(path: Path, saved: FileRecord | None) -> bool:
    """Whether a file is as it was saved. Weights are not read."""
    if saved is None or path.is_symlink() or path.stat().st_size != saved.nbytes:
        return False
    with contextlib.suppress(OSError):
        return path.suffix == WEIGHTS_SUFFIX or crc32(path.read_bytes()) == saved.crc32
    return False
