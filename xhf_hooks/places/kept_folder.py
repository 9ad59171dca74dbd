"""Saves kept for readers, and folders beside the final one: their names, how one takes the place of another."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from xhf_hooks.errors import TargetError
from xhf_hooks.format.checksum import file_size_and_crc32
from xhf_hooks.integrity.manifest import MANIFEST_NAME, FileRecord, read_commit
from xhf_hooks.system.calls import renameat2


def new_name(folder: Path, kind: str) -> Path:
    """A new, unique name beside this one. :meth:`CheckpointFolder.recover` knows the kinds."""
    return folder.with_name(f'.{folder.name}.{kind}-{uuid.uuid4().hex[:12]}')


def look_up(path: Path) -> os.stat_result | None:
    """``lstat`` of a name on the server; None if it does not exist. Runs on: rank 0.

    Creating a name makes the client ask the server and refresh its cache (Linux: LOOKUP_EXCL in fuse_dentry_revalidate,
    fs/fuse/dir.c, and in nfs_do_lookup_revalidate, fs/nfs/dir.c). A hard link to a folder is created for that: every
    system refuses it, but only after the refresh.

    A name that the client has cached as absent may exist; then the server refuses the rename that follows.

    Raises:
        OSError: The parent folder cannot be read.
    """
    with contextlib.suppress(OSError):
        os.link(path.parent, path)
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def unused(path: Path) -> Path:
    """The path if nothing has that name, else with ``_2``, ``_3`` and so on at its end."""
    others = (path.with_name(f'{path.name}_{number}') for number in itertools.count(2))
    return next(each for each in itertools.chain([path], others) if look_up(each) is None)


def fsync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h; renameat2(2)


def exchange(one: Path, other: Path) -> bool:
    """Swap two existing paths so that no reader ever finds either name missing.

    Returns:
        False if this kernel or file system does not support it (NFS, macOS); then nothing happened.

    Raises:
        OSError: The call is supported but failed.
    """
    names = os.fsencode(one), os.fsencode(other)
    return renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE, of=(one, other))


#: linux/fs.h, ioctl_ficlone(2); Python 3.12 and newer have it.
_FICLONE = getattr(fcntl, 'FICLONE', 0x40049409)


def clone(source: Path, to: Path) -> bool:
    """Make a copy that shares its blocks with the source until one of them is changed (XFS, Btrfs).

    Returns:
        False if that cannot be done here; then there is no copy.
    """
    try:
        with source.open('rb') as old, to.open('xb') as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        shutil.copymode(source, to)
    except OSError:
        to.unlink(missing_ok=True)
        return False
    return True


@dataclass(frozen=True)
class KeptSave:
    """A committed save that is not deleted before it is released, for readers in any process.

    Attributes:
        place: A folder. Weights in it are clones where the file system has them, else hard links, else copies; all else
            are copies.
        release: Call it from any thread. Does nothing the second time.
        links: The hard links, as they were, and their records in the manifest.
    """

    place: Path
    release: Callable[[], object]
    links: Mapping[Path, tuple[os.stat_result, FileRecord]] = field(default_factory=dict, repr=False)

    def changed(self) -> list[Path]:
        """The hard links through which somebody has changed the save itself.

        One of another size has changed. One of another time is read, since a network file system may tell old times.
        """
        changed = []
        for path, (before, saved) in self.links.items():
            with contextlib.suppress(FileNotFoundError):  # removed from here only
                now = os.lstat(path)
                if now.st_ino != before.st_ino:  # replaced here only
                    continue
                has_changed = now.st_size != before.st_size
                if not has_changed and now.st_mtime_ns != before.st_mtime_ns:
                    has_changed = file_size_and_crc32(path)[1] != saved.crc32
                changed += [path] * has_changed
        return changed


def keep_folder(folder: Path) -> KeptSave:
    """Keep the files that the manifest of a committed save lists. No save may be committed meanwhile. Runs on: rank 0.

    :meth:`.CheckpointFolder.recover` removes what killed runs kept. The disk space is freed when the kept folder is
    released or when the save itself is deleted, whichever is later.

    Raises:
        TargetError: The folder is not a committed save, or its files cannot be kept.
    """
    commit = read_commit(folder)
    if commit is None:
        raise TargetError(f'{folder}: cannot be kept for readers: not a complete save of this package')
    path = new_name(folder, 'kept')
    names = (*commit.files, MANIFEST_NAME)  # in this order: with a manifest it is complete
    release, links = partial(_release, path, names), {}
    try:
        for name in names:
            source, to = folder / name, path / name
            to.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith('.safetensors'):
                if clone(source, to):
                    continue
                with contextlib.suppress(OSError):
                    os.link(source, to)
                    links[to] = os.lstat(to), commit.files[name]
                    continue
            shutil.copy(source, to)
    except OSError as error:
        release()
        raise TargetError(f'{folder}: cannot be kept for readers: {error}') from error
    return KeptSave(path, release, links)


def _release(folder: Path, names: Collection[str]) -> None:
    """Delete a kept folder, unless there are files of others in it: the next run sets these apart."""
    found = {
        path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_symlink() or not path.is_dir()
    }
    if found <= {*names}:
        shutil.rmtree(folder, ignore_errors=True)
