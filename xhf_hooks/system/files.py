"""Files of this process: how many may be open, the page cache, absolute paths, and errors that name a file."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from xhf_hooks.errors import LimitError

_OPEN = Path('/proc/self/fd')
#: Reserve for other files of the process: data, logs, libraries.
_SPARE = 64
#: How Rust writes an error of the operating system.
_RUST_ERROR = re.compile(r'\(os error (\d+)\)$')


def allow_open_files(n_files: int, what: str) -> None:
    """Raise the soft limit of open files for ``n_files`` more, if necessary. Runs on: any rank.

    The usual soft limit is 1024; a process may raise it up to the hard limit, which is usually far higher.

    Raises:
        LimitError: The hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = len(os.listdir(_OPEN)) if _OPEN.exists() else 0
    needed = n_open + n_files + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LimitError(
            f'a save needs {n_files} more open files ({what}) besides the {n_open} open ones: expected a limit of '
            f'at least {needed}, found {hard}; only root can raise it ("ulimit -Hn {needed}", or the limits that the '
            f'scheduler or container sets)'
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def read_ahead(fd: int, start: int, nbytes: int) -> None:
    """Start to read these bytes of a file into the page cache. Does nothing on systems such as macOS."""
    if hasattr(os, 'posix_fadvise'):
        os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_WILLNEED)


def drop_page_cache(fd: int, start: int, nbytes: int) -> None:
    """Drop these bytes from the page cache where they are on the disk. Does nothing on systems such as macOS.

    Args:
        nbytes: 0: up to the end of the file.
    """
    if hasattr(os, 'posix_fadvise'):
        os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)


def write_missing(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, by relative path, that the folder does not have yet. Those that are there stay."""
    for name, content in files.items():
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def absolute(path: Path) -> Path:
    """The path from the root, without ``..``, so that its parents are the folders above it. Links keep their names."""
    parts = path.absolute().parts
    n_resolved = max((number for number, part in enumerate(parts, 1) if part == '..'), default=0)
    return Path(*parts[:n_resolved]).resolve().joinpath(*parts[n_resolved:])


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Inside the block, errors of the operating system that name no file get this path.

    A full disk or quota and I/O errors come from calls that know only a descriptor: write(2), fsync(2). Libraries in
    Rust (safetensors, tokenizers) raise them as errors of their own that end with the number.

    Raises:
        OSError: With its number and a path.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:  # of any type: libraries in Rust raise their own
        found = _RUST_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
