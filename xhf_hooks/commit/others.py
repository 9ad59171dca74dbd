"""Files that others put into our folders, such as evaluation results: never deleted with them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from pathlib import Path

from xhf_hooks.commit.fresh_name import look_up


def others_in(folder: Path, ours: Collection[str]) -> list[str]:
    """Files and links that are not among ``ours``, relative to the folder, with slashes."""
    found = (path for path in folder.rglob('*') if path.is_symlink() or not path.is_dir())
    return sorted({path.relative_to(folder).as_posix() for path in found} - {*ours})


def set_apart(folder: Path, names: Collection[str], place: Path) -> Path:
    """Move those files to a new folder: ``place``, or that with a number where it is taken. Runs on: rank 0.

    Returns:
        That folder. After a kill in between, the next call moves the rest to another one.

    Raises:
        OSError: A file could not be moved.
    """
    numbered = (place.with_name(f'{place.name}_{number}') for number in itertools.count(2))
    place = next(path for path in itertools.chain([place], numbered) if look_up(path) is None)
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder / name, place / name)
    return place
