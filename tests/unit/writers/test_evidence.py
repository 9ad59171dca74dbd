"""Samples of what was written: few, not of zeros, and missed when they are not there."""

from __future__ import annotations

import pytest

from xhf_hooks.errors import IncompleteError, TargetError
from xhf_hooks.writers.evidence import SampleTaker, require_samples, some_samples
from xhf_hooks.writers.output_file import FileIdentity, OutputFile, create_file

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


def taken(n_files: int, n_pieces: int = 3) -> SampleTaker:
    taker = SampleTaker()
    for file in range(n_files):
        for piece in range(n_pieces):
            taker.see(f'{file}.safetensors', piece * 1000, memoryview(bytes([1 + piece]) * 1000))
    return taker


def test_two_of_each_file_the_first_and_the_last():
    samples = taken(2).samples()
    assert {(sample.file, sample.start // 1000) for sample in samples} == {
        (f'{file}.safetensors', piece) for file in range(2) for piece in (0, 2)
    }
    assert all(0 < len(sample.data) <= 64 for sample in samples)


def test_zeros_prove_nothing():
    taker = SampleTaker()
    taker.see('a', 0, memoryview(bytes(1000)))
    assert taker.samples() == []
    taker.see('a', 1000, memoryview(b'x'))
    assert [(sample.start, sample.data) for sample in taker.samples()] == [(1000, b'x')]


@pytest.mark.parametrize('n_files', [0, 1, 16, 17, 40, 191])
def test_few_files_of_each_rank_and_every_file_of_some(n_files):
    samples = taken(n_files).samples()
    chosen = [some_samples(samples, rank) for rank in range(50)]
    assert all(len({sample.file for sample in some}) <= 16 for some in chosen)
    assert all(some for some in chosen) == bool(n_files)
    assert {sample.file for some in chosen for sample in some} == {sample.file for sample in samples}


def written(folder, content: bytes) -> dict[str, FileIdentity]:
    made = {'a': create_file(folder / 'a', b'', len(content))}
    file = OutputFile(folder / 'a', made['a'])
    file.write(memoryview(content), 0)
    file.close()
    return made


def test_what_is_there_is_found_and_what_is_not_is_missed(tmp_path):
    content = bytes(range(256)) * 8
    made, taker = written(tmp_path, content), SampleTaker()
    taker.see('a', 0, memoryview(content))
    require_samples(tmp_path, made, taker.samples())
    (sample,) = taker.samples()
    with (tmp_path / 'a').open('r+b') as file:
        file.seek(sample.start + len(sample.data) - 1)
        file.write(b'\0')
    with pytest.raises(IncompleteError, match=f'bytes {sample.start} to'):
        require_samples(tmp_path, made, taker.samples())


def test_another_file_with_the_same_content_is_not_the_one(tmp_path):
    content = bytes(range(256))
    made, taker = written(tmp_path, content), SampleTaker()
    taker.see('a', 0, memoryview(content))
    (tmp_path / 'b').write_bytes(content)
    (tmp_path / 'b').rename(tmp_path / 'a')
    for open_it in (
        lambda: require_samples(tmp_path, made, taker.samples()),
        lambda: OutputFile(tmp_path / 'a', made['a']),
    ):
        with pytest.raises(TargetError, match=r"expected file number .* rank 0 has made.*writer='stream'"):
            open_it()
