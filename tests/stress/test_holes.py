"""Sparse files: what was never written is told and not read, and means the same as zeros that were."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from xhf_hooks.cli.verify import DIFFERENT, SAME, main
from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.files.holes import find_holes, in_both, within
from xhf_hooks.format import checksum
from xhf_hooks.format.safetensors import read_header
from xhf_hooks.integrity.checksums import FileToRead, sum_files

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

MB = 1 << 20
TB = 10**12
LIMIT_SECS = 30  # for a terabyte, which takes minutes to read from memory


def sparse_shard(path: Path, tensors: dict[str, tuple[str, list[int], int]], written: dict[int, bytes]) -> Path:
    """A safetensors file of (dtype, shape, bytes), all holes but for ``written``, by offset in the data."""
    header, position = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {'dtype': dtype, 'shape': shape, 'data_offsets': [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with path.open('wb') as file:
        file.write(struct.pack('<Q', len(text)) + text)
        start = file.tell()
        for offset, data in written.items():
            file.seek(start + offset)
            file.write(data)
        file.truncate(start + position)
    return path


@pytest.mark.parametrize('nbytes', [0, 1, 2, 3, 1000, MB, MB + 1])
def test_checksum_of_zeros(nbytes):
    assert checksum.crc32_of_zeros(nbytes) == zlib.crc32(bytes(nbytes))


def test_checksum_of_very_many_zeros():
    half = checksum.crc32_of_zeros(TB // 2)
    assert checksum.crc32_of_zeros(TB) == checksum.combine(half, half, TB // 2)


def test_ranges():
    holes = [(10, 20), (30, 40), (50, 60)]
    assert list(within(holes, 15, 55)) == [(15, 20), (30, 40), (50, 55)]
    assert list(within(holes, 20, 30)) == [] == list(within([], 0, 9))
    assert list(within(holes, 33, 34)) == [(33, 34)] and list(within(holes, 0, 11)) == [(10, 11)]
    assert in_both(holes, [(0, 12), (18, 35), (55, 99)]) == [(10, 12), (18, 20), (30, 35), (55, 60)]


@pytest.mark.parametrize('seed', range(5))
def test_sums_are_those_of_the_bytes(tmp_path, seed):
    random.seed(seed)
    sizes = {f't{i}': random.choice([4, 3 * MB, 5 * MB + 4, 40 * MB]) for i in range(6)}
    total = sum(sizes.values())
    written = {random.randrange(total - 5000): random.randbytes(random.choice([1, 4999])) for _ in range(8)}
    path = sparse_shard(tmp_path / 'a', {n: ('F32', [size // 4], size) for n, size in sizes.items()}, written)
    header, data = read_header(path), path.read_bytes()
    file = FileToRead(path, len(data), header, count_non_finite=True)
    with WorkerThreads(3) as threads:
        (found,) = sum_files([file], threads)
        (read,) = sum_files([file], threads, drop_cache=True)
    assert found.error is None and found.hole_nbytes > total // 2 and read.hole_nbytes == 0
    assert (found.crc32, found.tensors, found.non_finite) == (read.crc32, read.tensors, read.non_finite)
    assert found.crc32 == zlib.crc32(data)
    assert found.tensors == {e.name: zlib.crc32(data[e.start : e.end]) for e in header.entries}


def test_where_the_file_system_does_not_tell(tmp_path):
    assert find_holes(os.open('/proc/self/maps', os.O_RDONLY), 10**6, 1) == []
    (tmp_path / 'shorter').write_bytes(b'x')
    fd = os.open(tmp_path / 'shorter', os.O_RDONLY)
    assert find_holes(fd, 10**6, 1) == []
    os.close(fd)


def run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, Path(__file__).parents[2] / 'tools' / 'verify.py', *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20 * LIMIT_SECS)


def seconds(said: str) -> float:
    """As the command's last line tells, without its imports."""
    return float(said.splitlines()[-1].partition(' in ')[2].split(' s')[0])


@pytest.fixture(scope='module')
def terabytes(tmp_path_factory):
    """Three folders of one tensor of a terabyte; in ``changed`` its last element differs from ``plain``'s."""
    root = tmp_path_factory.mktemp('terabytes')
    for name, written in (('plain', {8: b'abcd'}), ('same', {8: b'abcd'}), ('changed', {8: b'abcd', TB - 4: b'abcd'})):
        (root / name).mkdir()
        sparse_shard(root / name / 'model.safetensors', {'w': ('F32', [TB // 4], TB)}, written)
    (root / 'half').mkdir()  # in bfloat16, rounded
    sparse_shard(root / 'half' / 'model.safetensors', {'w': ('BF16', [TB // 4], TB // 2)}, {})
    (root / 'zeros').mkdir()
    sparse_shard(root / 'zeros' / 'model.safetensors', {'w': ('F32', [TB // 4], TB)}, {})
    return root


def test_verify_a_terabyte(terabytes):
    done = run(terabytes / 'plain')
    assert done.returncode == SAME, done.stdout + done.stderr
    assert 'model.safetensors: 1.00 TB of 1.00 TB are holes: never written, and read as zeros' in done.stdout
    assert seconds(done.stdout) < LIMIT_SECS


@pytest.mark.parametrize(
    ('b', 'status', 'said'),
    [
        ('plain', SAME, '1 identical'),
        ('same', SAME, '1 identical'),
        ('changed', DIFFERENT, '1 different'),
        ('zeros', DIFFERENT, '1 different'),
    ],
)
def test_compare_terabytes(terabytes, capsys, b, status, said):
    assert main([str(terabytes / 'plain'), str(terabytes / b)]) == status
    out = capsys.readouterr().out
    assert said in out.splitlines()[-1] and '1.00 TB of 1.00 TB are holes' in out
    assert seconds(out) < LIMIT_SECS


def test_compare_terabytes_of_other_types(terabytes, capsys):
    assert main([str(terabytes / 'zeros'), str(terabytes / 'half')]) == SAME
    out = capsys.readouterr().out
    assert '1 rounding' in out.splitlines()[-1] and seconds(out) < LIMIT_SECS


@pytest.mark.parametrize('name', ['tokenizer.json', 'config.json', 'xhf_manifest.json', 'model.safetensors.index.json'])
def test_small_files_of_a_terabyte(terabytes, tmp_path, name):
    """Nobody reads them whole; libraries would."""
    sparse_shard(tmp_path / 'model.safetensors', {'w': ('F32', [2], 8)}, {0: b'abcdefgh'})
    (tmp_path / 'config.json').write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    with (tmp_path / name).open('wb') as file:
        file.truncate(TB)
    assert main([str(tmp_path)]) == DIFFERENT
