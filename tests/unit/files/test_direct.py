"""Bytes go to the disk without the page cache where that can be, and otherwise through it."""

import errno
import fcntl
import mmap
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.helpers.faults.system_calls import MB, answer, random_bytes
from xhf_hooks.files.output_file import OutputFile, create_file
from xhf_hooks.system import linux_calls

pytestmark = pytest.mark.needs('ext4 or XFS')

NBYTES = 8 * MB + 5000


def content_at(offset: int, off_by: int = 0) -> memoryview:
    """Random bytes in memory that is aligned as that offset of a file; or not."""
    memory = np.frombuffer(mmap.mmap(-1, NBYTES + 2 * mmap.PAGESIZE), np.uint8)
    start = (offset + off_by) % mmap.PAGESIZE
    memory[start : start + NBYTES] = np.frombuffer(random_bytes(NBYTES), np.uint8)
    return memory[start : start + NBYTES].data


def write(path: Path, content: memoryview, offset: int) -> None:
    """Into the middle of a file."""
    file = OutputFile.open(path, create_file(path, b'', offset + content.nbytes + 100), direct=True)
    file.write(content, offset)
    flags = fcntl.fcntl(file._fd, fcntl.F_GETFL)
    file.fsync()
    file.close()
    assert not flags & os.O_DIRECT
    assert path.read_bytes() == bytes(offset) + bytes(content) + bytes(100)


@pytest.mark.parametrize(('offset', 'off_by'), [(0, 0), (4095, 0), (5 * MB + 24, 0), (8, 8)])
def test_all_but_the_ends_bypasses_the_page_cache(tmp_path, monkeypatch, offset, off_by):
    """If memory holds it aligned as the file does."""
    direct_nbytes, pwrite = [], os.pwrite

    def count(fd: int, data: memoryview, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            direct_nbytes.append(len(data))
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, 'pwrite', count)
    write(tmp_path / 'file', content_at(offset, off_by), offset)
    assert (sum(direct_nbytes) > NBYTES - 2 * mmap.PAGESIZE) == (not off_by)


@pytest.mark.parametrize(('number', 'n_accepted'), [(errno.EOPNOTSUPP, 0), (errno.EINVAL, 3)])
def test_what_is_refused_goes_through_it(tmp_path, monkeypatch, number, n_accepted):
    """From the first such write on, or from a later one, which has written some of it."""
    pwrite, offsets = os.pwrite, []

    def refusing(fd: int, data: memoryview, offset: int) -> int:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return pwrite(fd, data, offset)
        offsets.append(offset)
        if len(offsets) > n_accepted:
            raise OSError(number, os.strerror(number))
        return pwrite(fd, data[:MB], offset)

    monkeypatch.setattr(os, 'pwrite', refusing)
    write(tmp_path / 'file', content_at(24), 24)
    assert len(offsets) == n_accepted + 1


def test_on_other_file_systems_everything_goes_through_it(tmp_path, monkeypatch):
    monkeypatch.setattr(linux_calls.fstatfs, 'function', answer(errno.ENOSYS))
    monkeypatch.setattr(fcntl, 'fcntl', mock.Mock(wraps=fcntl.fcntl))
    write(tmp_path / 'file', content_at(0), 0)
    assert fcntl.fcntl.call_count == 1  # that of this test
