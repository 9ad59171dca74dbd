"""Folders of complete saves: their names, which of them are kept, and how one takes the place of another."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from xhf_hooks.errors import TargetError
from xhf_hooks.integrity.manifest import read_commit
from xhf_hooks.system import allow_open_files, renameat2


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


def others_in(folder: Path, ours: Collection[str]) -> list[str]:
    """Relative paths of files and links that are not in ``ours``."""
    found = (path for path in folder.rglob('*') if path.is_symlink() or not path.is_dir())
    return sorted({path.relative_to(folder).as_posix() for path in found} - {*ours})


def set_apart(folder: Path, names: Collection[str], place: Path) -> Path:
    """Move the files to a new folder: ``place``, with a number added if it exists. Runs on: rank 0.

    Returns:
        The new folder. If a kill interrupts the move, the next call moves the rest to another folder.

    Raises:
        OSError: A file could not be moved.
    """
    numbered = (place.with_name(f'{place.name}_{number}') for number in itertools.count(2))
    place = next(path for path in itertools.chain([place], numbered) if look_up(path) is None)
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder / name, place / name)
    return place


class KeptFolder:
    """Created by :meth:`keep`, removed by :meth:`release`. Runs on: rank 0; any process may read the folder.

    :meth:`.CheckpointFolder.recover` removes those of killed runs. The disk space is freed when the kept folder is
    released or when the save itself is deleted, whichever is later.

    Attributes:
        path: The folder.
        is_linked: Whether the folder can be read on every host that sees the file system, even after this process has
            ended. Otherwise only on this host, while this process lives.
    """

    def __init__(self, path: Path, fds: list[int]) -> None:
        self.path, self._fds = path, fds
        self._process = os.getpid()

    @property
    def is_linked(self) -> bool:
        return not self._fds

    @classmethod
    def keep(cls, folder: Path) -> KeptFolder:
        """Keep the files that the manifest of a committed save lists. No save may be committed meanwhile.

        Raises:
            TargetError: The folder is not a committed save, or its files cannot be kept.
        """
        commit = read_commit(folder)
        if commit is None or commit.files is None:
            raise TargetError(f'{folder}: cannot be kept for readers: not a complete save of this package')
        names = sorted(commit.files)
        path = new_name(folder, 'kept')
        try:
            try:
                _fill(path, folder, names)
                return cls(path, [])
            except OSError:
                shutil.rmtree(path, ignore_errors=True)
            return cls(path, _fill_with_open_files(path, folder, names))
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise TargetError(f'{folder}: cannot be kept for readers: {error}') from error

    def release(self) -> None:
        """Remove the folder. Does nothing the second time, or in a forked child."""
        if self._process != os.getpid():
            return
        self._process = 0
        shutil.rmtree(self.path, ignore_errors=True)
        for fd in self._fds:
            os.close(fd)


def _fill(path: Path, folder: Path, names: list[str]) -> None:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(folder / name, path / name)


def _fill_with_open_files(path: Path, folder: Path, names: list[str]) -> list[int]:
    allow_open_files(len(names), f'{len(names)} files of {folder}, which readers use')
    fds: list[int] = []
    try:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            fds.append(os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC))
            os.symlink(f'/proc/{os.getpid()}/fd/{fds[-1]}', path / name)
    except BaseException:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise
    return fds


def archive_name(final: str, label: str) -> str:
    """Name of an older save: ``hf_model`` and ``iter_500`` give ``hf_model_iter_500``."""
    return f'{final}_{label}'


def archives(final: str, names: Iterable[str]) -> list[str]:
    """The names of older saves of ``final``, sorted by number."""
    found = []
    for name in names:
        match = re.fullmatch(re.escape(final) + r'_(?:iter|epoch)_(\d+)', name)
        if match:
            found.append((int(match[1]), name))
    return [name for _, name in sorted(found)]


def outdated(order: Mapping[str, Any], max_keep: int) -> list[str]:
    """Older saves to delete. ``max_keep`` includes the newest save, which is not in ``order``; -1 keeps all.

    Args:
        order: Name to a key that grows with each commit. Not the iteration: a resumed run commits some iterations
            again.
    """
    oldest_first = sorted(order, key=lambda name: order[name])
    return [] if max_keep == -1 else oldest_first[: max(0, len(oldest_first) - (max_keep - 1))]
