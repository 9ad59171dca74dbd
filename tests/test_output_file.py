"""Bytes land where they should, whether they go past the page cache or through it."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
from unittest import mock

import pytest

from xhf_hooks.writers.output_file import AlignedBuffer, OutputFile, create_file

MB = 2**20


@pytest.fixture(params=['direct', 'no direct I/O', 'refused on writing'])
def way(request):
    """The file system's answers to O_DIRECT; only the answer is simulated, the writing is real."""
    real_open, real_pwrite = os.open, os.pwrite
    direct_fds = set()

    def fake_open(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT and request.param == 'no direct I/O':
            raise OSError(errno.EINVAL, 'no direct I/O')
        fd = real_open(path, flags, *args, **kwargs)
        if flags & os.O_DIRECT:
            direct_fds.add(fd)
        return fd

    def fake_pwrite(fd, data, offset):
        if fd in direct_fds and request.param == 'refused on writing':
            raise OSError(errno.EINVAL, 'refused')
        return real_pwrite(fd, data, offset)

    with mock.patch('os.open', fake_open), mock.patch('os.pwrite', fake_pwrite):
        yield request.param


def test_any_offset_and_length(tmp_path, way):
    order = random.Random(0)
    content = order.randbytes(9 * MB + 1234)
    cuts = sorted({0, len(content), 7, 4096, 3 * MB, *(order.randrange(len(content)) for _ in range(8))})
    parts = list(itertools.pairwise(cuts))
    order.shuffle(parts)
    create_file(tmp_path / 'file', b'', len(content))
    file, buffer = OutputFile(tmp_path / 'file'), AlignedBuffer(2 * MB)
    for start, end in parts:
        file.write(memoryview(content)[start:end], start, buffer)
    file.fsync()
    file.close()
    assert (tmp_path / 'file').read_bytes() == content


def test_large_parts_really_go_past_the_page_cache(tmp_path):
    """Where the file system takes a plain aligned write with O_DIRECT, ours must not have been given up."""
    try:
        fd = os.open(tmp_path / 'probe', os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        possible = os.pwrite(fd, mmap.mmap(-1, MB), 0) == MB
        os.close(fd)
    except OSError:
        possible = False
    create_file(tmp_path / 'file', b'', 4 * MB)
    file = OutputFile(tmp_path / 'file')
    file.write(memoryview(bytes(4 * MB)), 0, AlignedBuffer())
    assert (file._direct_fd is not None) == possible
    file.close()


def test_existing_file_is_refused(tmp_path):
    (tmp_path / 'file').write_text('mine')
    with pytest.raises(FileExistsError):
        create_file(tmp_path / 'file', b'', 1)
    assert (tmp_path / 'file').read_text() == 'mine'


def test_failure_to_open_leaves_no_descriptor(tmp_path):
    before = len(os.listdir('/proc/self/fd'))
    with mock.patch('os.ftruncate', side_effect=OSError(errno.ENOSPC, 'full')), pytest.raises(OSError, match='full'):
        create_file(tmp_path / 'file', b'', 1)
    assert len(os.listdir('/proc/self/fd')) == before
