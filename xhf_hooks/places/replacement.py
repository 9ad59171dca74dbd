"""How a folder takes the name of another one, and whether it can here. Runs on: rank 0."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from xhf_hooks.errors import TargetError, XhfError
from xhf_hooks.places.file_system import exchange, look_up, mount_of, mounts, new_name


def replace_folder(new: Path, path: Path, previous: Path) -> Path | None:
    """Give ``new`` the name of the folder at ``path``; returns the new path of that one.

    Args:
        previous: An unused name for the folder at ``path``, where two folders cannot be exchanged.

    Returns:
        None if the folder at ``path`` cannot be renamed, and nothing happened: it is in a lower layer of an overlay
        file system, such as that of a container's image.

    Raises:
        OSError, TargetError: It was not replaced; the message says so if the old folder lost its name.
    """
    if exchange(new, path):
        return new
    try:
        os.rename(path, previous)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return None
        raise
    try:
        os.rename(new, path)
    except BaseException as error:  # KeyboardInterrupt, too
        if look_up(path) is None:
            _put_back(previous, path, error)
        raise
    return previous


def _put_back(previous: Path, path: Path, error: BaseException) -> None:
    try:
        os.rename(previous, path)
    except OSError as second:
        raise TargetError(
            f'{path} was not replaced ({error}), and is missing, since the save that had this name could not '
            f'get it back ({second}). That save is complete, as {previous}; the next save or run gives it its name'
        ) from error


def replace_by_deleting(new: Path, path: Path, delete: Callable[[Path], None]) -> None:
    """Delete the save at ``path``, which cannot be renamed, and give its name to ``new``.

    A kill meanwhile may leave a part of the old save under this name, and then none for a moment. The new one is
    complete, under another name than that of a folder that is being written, so that the next start finds it, and the
    end of this save does not delete it.

    Args:
        delete: Deletes the folder at ``path``, its manifest last.

    Raises:
        OSError, TargetError: The save was not replaced.
    """
    waiting = new_name(path, 'previous')
    os.rename(new, waiting)
    try:
        delete(path)
        os.rename(waiting, path)
    except (OSError, XhfError) as error:
        raise TargetError(
            f'{path} cannot be renamed, and could not be deleted for the new save ({error}), which is complete, as '
            f'{waiting}; the next save or run gives it its name'
        ) from error


def require_replaceable(path: Path, elsewhere: str) -> None:
    """Check that a commit can give the name of the newest save to another folder.

    Args:
        elsewhere: How the user chooses another folder.

    Raises:
        TargetError: It cannot.
    """
    if _is_mount_point(path):
        raise TargetError(
            f'{path} is a mount point, such as a volume of a container, and cannot be replaced by a save; {elsewhere} '
            f'a folder in it, such as {path / "hf_model"}'
        )
    try:
        _try_replacing(path)
    except (OSError, TargetError) as error:
        raise TargetError(
            f'{path.parent}: no folder can take the name of another one there, as at each save: {error}; {elsewhere} a '
            f'folder elsewhere'
        ) from error


def _try_replacing(path: Path) -> None:
    """Replace an empty folder by another one next to ``path``, by the calls of a commit, and remove both."""
    new, old, previous = new_name(path, 'staging'), new_name(path, 'staging'), new_name(path, 'previous')
    try:
        new.mkdir()
        old.mkdir()
        replace_folder(new, old, previous)
    finally:
        for folder in (new, old, previous):
            with contextlib.suppress(OSError):  # it has another name, or the next start removes it
                folder.rmdir()


def is_of_image(path: Path) -> bool:
    """Whether the folder at a path cannot be renamed, since a lower layer of an overlay file system has it.

    It is asked to take the name of a folder that holds something, which overlayfs refuses for one reason or the other
    (fs/overlayfs/dir.c, ovl_rename). Only overlayfs is asked: a file system in user space might merge the two folders.
    """
    if look_up(path) is None or mount_of(os.stat(path.parent).st_dev)[0] != 'overlay':
        return False
    occupied = new_name(path, 'staging')
    try:
        occupied.mkdir()
        (occupied / 'occupied').touch()
        os.rename(path, occupied)
    except OSError as error:
        return error.errno == errno.EXDEV
    finally:
        with contextlib.suppress(OSError):
            (occupied / 'occupied').unlink()
            occupied.rmdir()
    return False


def _is_mount_point(path: Path) -> bool:
    """Whether something is mounted at a path, which no call can rename then."""
    if os.path.ismount(path):
        return True
    real = os.path.join(os.path.realpath(path.parent), path.name)
    # A folder of the same file system (mount --bind)
    names = (re.sub(r'\\([0-7]{3})', lambda found: chr(int(found[1], 8)), where[4]) for where, _ in mounts())
    return any(name == real for name in names)
