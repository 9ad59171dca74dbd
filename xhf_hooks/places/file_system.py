"""Names, renames, flushes and copies, as network file systems need them. Runs on: rank 0."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from xhf_hooks.system.linux_calls import renameat2

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h; renameat2(2)
#: linux/fs.h, ioctl_ficlone(2); Python 3.12 and newer have it.
_FICLONE = getattr(fcntl, 'FICLONE', 0x40049409)


def new_name(folder: Path, kind: str) -> Path:
    """A name next to a folder that was never used before. :mod:`.checkpoint_folder` lists the kinds."""
    return folder.with_name(f'.{folder.name}.{kind}-{uuid.uuid4().hex[:12]}')


def look_up(path: Path) -> os.stat_result | None:
    """``lstat`` of a name on the server; None if it does not exist.

    Creating a name makes the client ask the server and refresh its cache (Linux: LOOKUP_EXCL in fuse_dentry_revalidate,
    fs/fuse/dir.c, and in nfs_do_lookup_revalidate, fs/nfs/dir.c). A hard link to a folder is created for that: every
    system refuses it, but only after the refresh.

    A name that the client has cached as absent may exist; then the server refuses the rename that follows.

    Raises:
        OSError: The parent folder cannot be read.
    """
    with contextlib.suppress(OSError):
        os.link(os.path.join(path.parent, '.'), path)  # the folder itself: a link to it could be linked
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, and not a link to one, on the server."""
    found = look_up(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def unused(path: Path) -> Path:
    """The path if that name is unused, else the path with ``_2``, ``_3`` and so on at its end."""
    numbered = (path.with_name(f'{path.name}_{number}') for number in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if look_up(each) is None)


def mounts() -> Iterator[tuple[list[str], list[str]]]:
    """What is mounted here: fields of where, and of which file system (proc(5), mountinfo). Only Linux tells."""
    with contextlib.suppress(OSError):
        for line in Path('/proc/self/mountinfo').read_text(errors='surrogateescape').splitlines():
            where, _, kind = line.partition(' - ')
            yield where.split(), kind.split()


def mount_of(device: int) -> tuple[str, set[str]]:
    """The kind of a mounted file system, such as 'overlay', and its mount options; '' and none if it is not known."""
    for where, kind in mounts():
        if where[2] == f'{os.major(device)}:{os.minor(device)}':
            return kind[0], {*where[5].split(','), *kind[-1].split(',')}
    return '', set()


def files_in(folder: Path) -> dict[str, Path]:
    """All files below a folder, by relative path with slashes. A link is a file."""
    paths = (path for path in folder.rglob('*') if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def fsync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange(one: Path, other: Path) -> bool:
    """Swap two existing paths so that no reader ever finds either name missing.

    Returns:
        False if this kernel or file system does not support it (NFS, macOS), also of one of these folders (a lower
        layer of an overlay); then nothing happened.

    Raises:
        OSError: The call is supported but failed.
    """
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    try:
        return renameat2(*paths, _RENAME_EXCHANGE, of=(one, other))
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        raise


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


def remove_tree(folder: Path) -> None:
    """Delete a folder, as much of it as possible.

    Raises:
        OSError: Something could not be deleted.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        shutil.rmtree(folder)
