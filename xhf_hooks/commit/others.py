"""Files that others put into a saved folder, such as evaluation results: never deleted with it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from pathlib import Path

from xhf_hooks.commit.fresh_name import look_up


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
