"""Bytes land where they should, and go on to the disk while they are being written."""

import ctypes
import errno
import itertools
import mmap
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.helpers.faults.system_calls import MB, answer, random_bytes
from xhf_hooks.errors import TargetError
from xhf_hooks.files.output_file import OutputFile, create_file
from xhf_hooks.sources.host_memory import host_memory
from xhf_hooks.system import linux_calls


@pytest.fixture(params=['write-behind', 'no such call', 'not on this file system'])
def system(request, monkeypatch):
    """The system's answer to sync_file_range; the writing is real."""
    if request.param == 'no such call':
        monkeypatch.setattr(linux_calls.sync_file_range, 'function', None)
    if request.param == 'not on this file system':
        monkeypatch.setattr(linux_calls.sync_file_range, 'function', answer(errno.ENOSYS))


def test_any_offset_and_length_by_several_threads(tmp_path, system):
    order, content = random.Random(0), random_bytes(90 * MB + 1234)
    cuts = sorted({0, len(content), 7, 4096, 3 * MB, 40 * MB, *(order.randrange(len(content)) for _ in range(30))})
    parts = list(itertools.pairwise(cuts))
    order.shuffle(parts)
    file = OutputFile.open(tmp_path / 'file', create_file(tmp_path / 'file', b'', len(content)))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda part: file.write(memoryview(content)[slice(*part)], part[0]), parts))
    file.fsync()
    file.close()
    assert (tmp_path / 'file').read_bytes() == content


def test_little_of_it_stays_in_the_page_cache(tmp_path):
    """What is behind the last windows has been written, and its pages given back."""
    nbytes = 300 * MB
    file = OutputFile.open(tmp_path / 'file', create_file(tmp_path / 'file', b'', nbytes))
    file.write(memoryview(bytes(nbytes)), 0)
    file.close()
    assert cached_nbytes(tmp_path / 'file') < 128 * MB


@pytest.mark.parametrize('in_background', [False, True])
def test_all_of_it_stays_in_the_page_cache_where_somebody_reads_it_at_once(tmp_path, in_background):
    nbytes = 300 * MB
    made = create_file(tmp_path / 'file', b'', nbytes)
    file = OutputFile.open(tmp_path / 'file', made, direct=in_background, stays_cached=True)
    file.write(memoryview(host_memory(nbytes).numpy()), 0)
    file.fsync()
    file.close()
    assert cached_nbytes(tmp_path / 'file') > 0.9 * nbytes


def cached_nbytes(path):
    """How much of a file the page cache has (mincore(2))."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open('r+b') as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), pages) == 0
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.parametrize(
    ('refusals', 'reserves'), [([], True), ([errno.EINTR], True), ([errno.EOPNOTSUPP], False), ([errno.ENOSYS], False)]
)
def test_a_new_file_has_all_of_its_room_where_that_can_be(tmp_path, monkeypatch, refusals, reserves):
    """A signal changes nothing; where a file system cannot reserve, the file is as large."""
    fallocate, left = linux_calls.fallocate.function, list(refusals)
    monkeypatch.setattr(linux_calls.fallocate, 'function', lambda *a: answer(left.pop())() if left else fallocate(*a))
    create_file(tmp_path / 'file', b'head', 16 * MB)
    found = (tmp_path / 'file').stat()
    assert (found.st_size, found.st_blocks * 512 >= 16 * MB) == (16 * MB, reserves)
    assert (tmp_path / 'file').read_bytes() == b'head' + bytes(16 * MB - 4)


def test_another_file_at_the_same_path_is_refused_with_both_inodes(tmp_path):
    """As on a host whose name cache still leads to the file of an earlier save."""
    path, elsewhere = tmp_path / 'file', tmp_path / 'elsewhere'
    created = create_file(elsewhere, b'', 100)
    found = create_file(path, b'', 60)
    with pytest.raises(TargetError) as caught:
        OutputFile.open(path, created)
    assert str(caught.value) == (
        f'{path}: expected the file that rank 0 created (inode {elsewhere.stat().st_ino}, 100 bytes); on this host the '
        f'path leads to inode {path.stat().st_ino} (60 bytes), probably because of a stale name cache. Set '
        f"writer='stream', so that only rank 0 writes"
    )
    OutputFile.open(path, found).close()
