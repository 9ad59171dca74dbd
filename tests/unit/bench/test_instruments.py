"""What tools/bench.py measures with."""

from __future__ import annotations

import mmap
import os
import socket

import pytest
import torch.distributed as dist
from bench.floors import Floors
from bench.page_cache import PageCacheSampler, cached_nbytes
from bench.progress import in_turns
from bench.throttle import limited_writes
from bench.ways import FLOOR_GATHER, ways_to_save
from bench.wire import sent_nbytes

from tests.conftest import NOT_TESTED


def test_what_goes_over_a_connection_is_counted_once():
    with socket.create_server(('127.0.0.1', 0)) as server, socket.create_connection(server.getsockname()) as client:
        other, _ = server.accept()
        before = sent_nbytes()
        client.sendall(bytes(12345))
        with other:
            assert len(_receive(other, 12345)) == 12345
            other.sendall(b'ok')
            assert client.recv(2) == b'ok'
            assert sent_nbytes() - before == 12347


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = b''
    while len(data) < nbytes:
        data += connection.recv(nbytes - len(data))
    return data


def test_pages_of_a_file(tmp_path):
    """What lies in it as a hole was never read or written, and is not there."""
    file = tmp_path / 'file'
    with file.open('wb') as out:
        out.truncate(100 * mmap.PAGESIZE)
    if cached_nbytes([file]) is None:
        pytest.skip(f'{NOT_TESTED}the page cache of files, which Linux 6.5 or newer tells')
    assert cached_nbytes([file]) == 0
    with file.open('r+b') as out:
        out.write(bytes(3 * mmap.PAGESIZE))
    assert cached_nbytes([file, tmp_path / 'gone']) == 3 * mmap.PAGESIZE
    (tmp_path / 'empty').touch()
    with PageCacheSampler(tmp_path) as sampler:
        pass
    assert sampler.peak_nbytes == 3 * mmap.PAGESIZE


def test_limited_writes_are_counted_and_let_go_at_the_end(tmp_path):
    pwrite = os.pwrite
    fd = os.open(tmp_path / 'file', os.O_RDWR | os.O_CREAT)
    with pytest.raises(ZeroDivisionError), limited_writes(1e9) as throttle:
        assert os.pwrite(fd, b'12345', 0) == 5
        assert os.pwritev(fd, [b'67', b'8'], 5) == 3
        1 / 0  # noqa: B018
    assert throttle.nbytes == 8 and os.pwrite is pwrite
    assert os.pread(fd, 20, 0) == b'12345678'
    os.close(fd)


def test_each_way_is_measured_as_often_and_progress_is_told():
    lines: list[str] = []
    runs = in_turns(['one', 'two'], 2, lambda way: {'seconds': 0.5}, lines.append)
    assert runs == {'one': [{'seconds': 0.5}] * 2, 'two': [{'seconds': 0.5}] * 2}
    assert lines[0].startswith('[1/4] ') and lines[3].endswith(': 0.50 s; about 0 min left')


@pytest.fixture
def one_rank():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_each_floor_writes_all_bytes(one_rank, tmp_path):
    """Of a size that is no multiple of a page, of a block or of what O_DIRECT writes."""
    nbytes = 17 * 2**20 + 4097
    ways = Floors(nbytes, bucket_nbytes=2**20).ways()
    assert set(ways) == {way for way in ways_to_save([]) if way.startswith('floor')}
    for name, way in ways.items():
        folder = tmp_path / name.replace('/', '-')
        way(folder)
        if name != FLOOR_GATHER:
            (file,) = folder.iterdir()
            assert file.read_bytes() == b'\1' * nbytes, name
