"""Saves kept for readers, and folders beside the final one: their names, how one takes the place of another."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from xhf_hooks.errors import TargetError
from xhf_hooks.integrity.manifest import MANIFEST_NAME, read_commit
from xhf_hooks.system.calls import renameat2


def new_name(final: Path, kind: str) -> Path:
    """A new, unique name beside the final one. :meth:`CheckpointFolder.recover` knows the kinds."""
    return final.with_name(f'.{final.name}.{kind}-{uuid.uuid4().hex[:12]}')


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


@dataclass(frozen=True)
class KeptSave:
    """A committed save that is not deleted before it is released, for readers in any process.

    Attributes:
        place: A folder, with hard links to the weights where the file system has them and copies of all else.
        release: Call it from any thread. Does nothing the second time.
    """

    place: Path
    release: Callable[[], object]


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
    release = partial(shutil.rmtree, path, ignore_errors=True)
    try:
        for name in (*commit.files, MANIFEST_NAME):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            is_linked = False
            if name.endswith('.safetensors'):
                with contextlib.suppress(OSError):
                    os.link(folder / name, path / name)
                    is_linked = True
            if not is_linked:
                shutil.copy(folder / name, path / name)
    except OSError as error:
        release()
        raise TargetError(f'{folder}: cannot be kept for readers: {error}') from error
    return KeptSave(path, release)
