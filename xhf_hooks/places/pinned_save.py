"""A pinned save: its files under another name, for uploads and commands of ``on_saved``. Runs on: rank 0."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from xhf_hooks.errors import TargetError
from xhf_hooks.format.checksum import file_size_and_crc32
from xhf_hooks.format.index import MANIFEST_NAME, WEIGHTS_SUFFIX
from xhf_hooks.integrity.manifest import Manifest, read_undamaged_manifest
from xhf_hooks.places.file_system import clone, new_name
from xhf_hooks.places.sibling_folders import SiblingFolders


@dataclass(frozen=True)
class PinnedSave:
    """The files of a committed save under another name, for readers in any process, whatever becomes of the save.

    Attributes:
        path: A folder. Weights in it are clones where the file system has them, else hard links, else copies; all else
            are copies.
        links: The hard links, as they were.
    """

    path: Path
    manifest: Manifest = field(repr=False)
    siblings: SiblingFolders = field(repr=False)
    links: dict[Path, os.stat_result] = field(default_factory=dict, repr=False)

    def unpin(self) -> None:
        """Delete the folder. Foreign files in it, or changed ones, get another name. Call it from any thread.

        Does nothing the second time. The disk space is freed when the save itself is deleted, too.
        """
        self.siblings.delete_pinned(self.path, self.manifest)

    def changed(self) -> list[Path]:
        """The hard links through which a reader has changed the save itself.

        A file of another size has changed. A file of another time is read, since a network file system may report old
        times.
        """
        changed = []
        for path, before in self.links.items():
            with contextlib.suppress(FileNotFoundError):  # removed from here only
                now = os.lstat(path)
                if now.st_ino != before.st_ino:  # replaced here only
                    continue
                saved = self.manifest.files[path.relative_to(self.path).as_posix()]
                has_changed = now.st_size != before.st_size
                if not has_changed and now.st_mtime_ns != before.st_mtime_ns:
                    has_changed = file_size_and_crc32(path)[1] != saved.crc32
                if has_changed:
                    changed.append(path)
        return changed


def pin_save(folder: Path, siblings: SiblingFolders) -> PinnedSave:
    """Pin the files that the manifest of a committed save lists. No save may be committed meanwhile.

    Raises:
        TargetError: The folder is not a committed save, or its files cannot be pinned.
    """
    manifest = read_undamaged_manifest(folder)
    if manifest is None:
        raise TargetError(f'{folder}: cannot be kept for readers: not a complete save of this package')
    pinned = PinnedSave(new_name(folder, 'kept'), manifest, siblings)
    try:
        for name in (*manifest.files, MANIFEST_NAME):  # in this order: with a manifest it is complete
            source, to = folder / name, pinned.path / name
            to.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(WEIGHTS_SUFFIX):
                if clone(source, to):
                    continue
                with contextlib.suppress(OSError):
                    os.link(source, to)
                    pinned.links[to] = os.lstat(to)
                    continue
            shutil.copy(source, to)
    except OSError as error:
        shutil.rmtree(pinned.path, ignore_errors=True)
        raise TargetError(f'{folder}: cannot be kept for readers: {error}') from error
    return pinned
