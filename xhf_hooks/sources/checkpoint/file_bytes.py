"""Reads slices of a file. Not mapped: a truncated file would end the process with SIGBUS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xhf_hooks.errors import CheckpointError
from xhf_hooks.files.regular_files import open_regular_fd

COPY_HINT = 'copy or download it again, or take another iteration'


class FileBytes:
    """A file, or a window of it, that can be sliced like bytes.

    It is open only within :meth:`opened` or for one slice: a checkpoint may have thousands of files.

    Args:
        start: Start of the window.
        nbytes: Size of the window; None: up to the end of the file.

    Raises:
        CheckpointError: The file is missing, not regular, empty or too short.
    """

    def __init__(self, path: Path, start: int = 0, nbytes: int | None = None) -> None:
        self._path, self._start = path, start
        self._fd: int | None = None
        with self.opened() as fd:
            size = os.fstat(fd).st_size
        if not size:
            raise CheckpointError(f'{path}: empty file; {COPY_HINT}')
        self._nbytes = max(size - start, 0) if nbytes is None else nbytes
        if start + self._nbytes > size:
            raise CheckpointError(
                f'{path}: truncated: expected {start + self._nbytes} bytes, found {size}; {COPY_HINT}'
            )

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> bytes:
        first, last, _ = part.indices(self._nbytes)
        with self.opened() as fd:
            return self._read(fd, self._start + first, max(last - first, 0))

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Keep the file open for many slices.

        Raises:
            CheckpointError: It cannot be read.
        """
        if self._fd is not None:
            yield self._fd
            return
        try:
            self._fd = open_regular_fd(self._path)
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f'{self._path}: cannot be read ({reason}); check its name and permissions') from error
        try:
            yield self._fd
        finally:
            os.close(self._fd)
            self._fd = None

    def _read(self, fd: int, start: int, nbytes: int) -> bytes:
        found = bytearray()
        while len(found) < nbytes:
            try:
                more = os.pread(fd, nbytes - len(found), start + len(found))
            except OSError as error:
                raise CheckpointError(f'{self._path}: cannot be read ({error.strerror or error})') from error
            if not more:
                raise CheckpointError(f'{self._path}: truncated while it was read; {COPY_HINT}')
            if len(more) == nbytes:
                return more
            found += more
        return bytes(found)
