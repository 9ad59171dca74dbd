"""What other people put into a folder of ours, such as the results of an evaluation: never deleted with it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from pathlib import Path

from xhf_hooks.commit.fresh_name import look_up


def others_in(folder: Path, ours: Collection[str]) -> list[str]:
    """Files and links that are not among ``ours``, relative to the folder, with slashes."""
    found = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in (*files, *links):
            relative = Path(parent, name).relative_to(folder).as_posix()
            if relative not in ours:
                found.append(relative)
    return sorted(found)


def set_apart(folder: Path, names: Collection[str], place: Path) -> Path:
    """Move those files to a new folder: ``place``, or that with a number where it is taken. Runs on: rank 0.

    Returns:
        That folder. What a kill in between leaves is moved by the next call, to another one.

    Raises:
        OSError: A file could not be moved.
    """
    numbered = (place.with_name(f'{place.name}_{number}') for number in itertools.count(2))
    place = next(path for path in itertools.chain([place], numbered) if look_up(path) is None)
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder / name, place / name)
    return place
