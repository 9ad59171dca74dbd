"""Keeps the files of a save under another name, for readers that take longer than the next saves.

A commit renames folders: afterwards ``hf_model`` is another save, and the old one is moved or deleted. A background
reader (an upload, an evaluation) gets a folder that only it removes, with hard links to the same files, not copies. On
a file system without hard links, this process holds the files open, and the folder has links to its descriptors.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from xhf_hooks.commit.checkpoint_folder import new_name
from xhf_hooks.errors import TargetError
from xhf_hooks.files.open_files import allow_open_files
from xhf_hooks.integrity.manifest import read_commit


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
