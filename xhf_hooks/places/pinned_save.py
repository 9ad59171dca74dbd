"""A pinned save: its files under another name, for uploads and commands of ``on_saved``. Runs on: rank 0."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from xhf_hooks.errors import TargetError
from xhf_hooks.files.manifest import Manifest, read_undamaged_manifest
from xhf_hooks.format.index import MANIFEST_NAME, WEIGHTS_SUFFIX
from xhf_hooks.places.file_system import clone, new_name
from xhf_hooks.places.sibling_folders import SiblingFolders


@dataclass(frozen=True)
class PinnedSave:
    """The files of a committed save under another name, for readers in any process, whatever becomes of the save.

    Attributes:
        path: A folder. Weights in it are clones where the file system has them, else hard links, else copies; all else
            are copies.
    """

    path: Path
    manifest: Manifest = field(repr=False)
    siblings: SiblingFolders = field(repr=False)

    def unpin(self) -> None:
        """Delete the folder. Foreign files in it, or changed ones, get another name. Call it from any thread.

        Does nothing the second time. The disk space is freed when the save itself is deleted, too.
        """
        with self.siblings.warn_instead_of_raising(f'{self.path}, which is no longer read, could not be deleted'):
            self.siblings.delete(self.path, self.manifest)


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
                    continue
            shutil.copy(source, to)
    except OSError as error:
        shutil.rmtree(pinned.path, ignore_errors=True)
        raise TargetError(f'{folder}: cannot be kept for readers: {error}') from error
    return pinned
