"""Bytes go to the disk without the page cache where that can be, and otherwise through it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.unit.writers.test_output_file import MB, answer, cached_nbytes, random_bytes
from xhf_hooks.system import calls
from xhf_hooks.writers.output_file import OutputFile, create_file

pytestmark = pytest.mark.needs('ext4 or XFS')

NBYTES = 40 * MB + 5000


def content_at(offset: int, off_by: int = 0) -> memoryview:
    """Random bytes in memory that is aligned as that offset of a file; or not."""
    memory = np.frombuffer(mmap.mmap(-1, NBYTES + 2 * mmap.PAGESIZE), np.uint8)
    start = (offset + off_by) % mmap.PAGESIZE
    memory[start : start + NBYTES] = np.frombuffer(random_bytes(NBYTES), np.uint8)
    return memory[start : start + NBYTES].data


def written(path: Path, content: memoryview, offset: int) -> bytes:
    """All of the file, after a write into the middle of it."""
    file = OutputFile(path, create_file(path, b'', offset + content.nbytes + 100), direct=True)
    file.write(content, offset)
    flags = fcntl.fcntl(file._fd, fcntl.F_GETFL)
    file.fsync()
    file.close()
    assert not flags & os.O_DIRECT
    return path.read_bytes()


def expected(content: memoryview, offset: int) -> bytes:
    return bytes(offset) + bytes(content) + bytes(100)


@pytest.mark.parametrize('offset', [0, 8, 4095, 5 * MB + 24])
@pytest.mark.parametrize('off_by', [0, 8])
def test_all_but_the_ends_bypasses_the_page_cache(tmp_path, offset, off_by):
    """If memory holds it aligned as the file does."""
    content = content_at(offset, off_by)
    file = OutputFile(tmp_path / 'file', create_file(tmp_path / 'file', b'', offset + NBYTES), direct=True)
    with mock.patch.object(fcntl, 'fcntl', wraps=fcntl.fcntl) as flags:
        file.write(content, offset)
    file.fsync()
    file.close()
    assert bool(flags.call_count) == (not off_by)
    assert off_by or cached_nbytes(tmp_path / 'file') <= 2 * mmap.PAGESIZE
    assert (tmp_path / 'file').read_bytes() == bytes(offset) + bytes(content)


def test_on_other_file_systems_everything_goes_through_it(tmp_path, monkeypatch):
    monkeypatch.setattr(calls.fstatfs, 'function', answer(errno.ENOSYS))
    content = content_at(0)
    assert written(tmp_path / 'file', content, 0) == expected(content, 0)


@pytest.mark.parametrize(('number', 'n_accepted'), [(errno.EOPNOTSUPP, 0), (errno.EINVAL, 3)])
def test_what_is_refused_goes_through_it(tmp_path, number, n_accepted):
    """From the first such write on, or from a later one, which has written some of it."""
    pwrite, calls, content = os.pwrite, [], content_at(24)

    def refusing(fd, data, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            calls.append(offset)
            if len(calls) > n_accepted:
                raise OSError(number, os.strerror(number))
            return pwrite(fd, data[: min(len(data), MB)], offset)
        return pwrite(fd, data, offset)

    with mock.patch('os.pwrite', refusing):
        found = written(tmp_path / 'file', content, 24)
    assert found == expected(content, 24)
    assert len(calls) == n_accepted + 1
