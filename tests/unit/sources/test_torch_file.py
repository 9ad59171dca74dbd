"""Files of torch.save, new and old: where the bytes of each tensor are, and what is wrong with damaged ones."""

from __future__ import annotations

import os
import random
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.made_checkpoint import MadeCheckpoint
from tests.helpers.measured import measured
from tests.helpers.read_checkpoint import assert_same_tensors, open_checkpoint, read_all
from tests.helpers.torch_zip import pickled, write_torch_zip
from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint import torch_file, zip_directory
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file, zip_root

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

FORMATS = {'zip': {}, 'old': {'_use_new_zipfile_serialization': False}}
DTYPES = [
    'bool',
    'uint8',
    'int8',
    'int16',
    'int32',
    'int64',
    'float16',
    'bfloat16',
    'float32',
    'float64',
    'complex64',
    'uint16',
    'uint32',
    'uint64',
    'float8_e5m2',
    'float8_e4m3fn',
]


def save(path: Path, state_dict: dict[str, torch.Tensor], kind: str, **more: object) -> Path:
    torch.save({'state_dict': state_dict, **more}, path, **FORMATS[kind])
    return path


@pytest.mark.parametrize('kind', FORMATS)
def test_every_element_type(tmp_path, kind):
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        if kind == 'old' and name in ('uint16', 'uint32', 'uint64', 'float8_e5m2', 'float8_e4m3fn'):
            continue  # torch itself has no such old files
        tensors[name] = torch.arange(7).to(dtype) if 'float8' not in name else torch.arange(7.0).to(dtype)
    assert_same_tensors(read_all(open_checkpoint(save(tmp_path / 'x.pth', tensors, kind))), tensors)


@pytest.mark.parametrize('kind', FORMATS)
def test_views(tmp_path, kind):
    """Transposed, cut out, channels last, scalar, empty; parts of one storage, and one tensor under two names."""
    base = torch.randn(40, 30)
    tensors = {
        'whole': base, 'part': base[3:9], 'transposed': base.T, 'columns': base[:, 4:9], 'every_other': base[::2, 1::3],
        'scalar': torch.tensor(3.0), 'element': base[2, 3], 'empty': base[:0], 'again': base,
        'image': torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        'one_row': torch.randn(1, 9).expand(1, 9),
    }  # fmt: skip
    source = open_checkpoint(save(tmp_path / 'x.pth', tensors, kind))
    assert_same_tensors(read_all(source), {name: tensor.contiguous() for name, tensor in tensors.items()})
    assert [(spec.name, spec.aliases) for spec in source.specs() if spec.aliases] == [('whole', ('again',))]


@pytest.mark.parametrize('kind', FORMATS)
def test_meta_of_mmengine(tmp_path, kind):
    meta = {'iter': 500, 'epoch': 2, 'cfg': 'model = dict()', 'time': 'now'}
    source = open_checkpoint(save(tmp_path / 'epoch_2.pth', {'w': torch.ones(2)}, kind, meta=meta))
    assert (source.iteration, source.epoch, source.config_text) == (500, 2, 'model = dict()')
    assert source.facts['engine'] == 'torch' and source.facts['layout'] == 'file'


@pytest.mark.parametrize('top', ['state_dict', 'module', 'model', None])
def test_where_the_state_dict_is(tmp_path, top):
    weights = {'w': torch.ones(2), 'b': torch.zeros(1)}
    torch.save(weights if top is None else {'other': {}, top: weights}, tmp_path / 'iter_7.pth')
    source = open_checkpoint(tmp_path / 'iter_7.pth')
    assert_same_tensors(read_all(source), weights)
    assert source.iteration == 7 and source.config_text is None


def zipped(*names: str, method: int = zipfile.ZIP_STORED):
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, 'w', method) as archive:
            for name in names:
                archive.writestr(name, pickled({}))

    return write


BAD = {
    'text': (lambda p: p.write_text('hello'), 'not a file of torch.save'),
    'empty': (lambda p: p.write_bytes(b''), 'empty file'),
    'numbers': (lambda p: p.write_bytes(bytes(range(256)) * 9), 'not a file of torch.save'),
    'tar': (lambda p: p.write_bytes(b'\x00' * 1024), 'not a file of torch.save'),
    'a zip of something else': (zipped('a.txt'), 'not a checkpoint'),
    'a zip of something else in a folder': (zipped('a/b.txt'), 'no data.pkl'),
    'two pickles': (zipped('a/data.pkl', 'b/data.pkl'), 'does not consist of one folder'),
    'TorchScript': (zipped('a/data.pkl', 'a/constants.pkl'), 'TorchScript'),
    'compressed': (zipped('a/data.pkl', method=zipfile.ZIP_DEFLATED), 'is compressed'),
    'a number': (lambda p: torch.save(3, p), 'holds a int'),
    'no weights': (lambda p: torch.save({'state_dict': {}, 'meta': {}}, p), 'no weights'),
    'big endian': (lambda p: write_torch_zip(p, pickled({}), byteorder=b'big'), 'endian'),
    'complex128': (lambda p: torch.save({'w': torch.ones(2, dtype=torch.complex128)}, p), 'cannot store'),
    'conjugated': (lambda p: torch.save({'w': torch.ones(2, dtype=torch.complex64).conj()}, p), 'conjugated'),
}


@pytest.mark.parametrize('name', BAD)
def test_is_refused(tmp_path, name):
    write, words = BAD[name]
    path = tmp_path / 'model.pth'
    write(path)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(f'{path}: ') and '\n' not in str(caught.value)


@pytest.mark.parametrize('kind', FORMATS)
def test_truncated_anywhere_is_refused(tmp_path, kind):
    path = save(tmp_path / 'x.pth', {'w': torch.randn(300), 'v': torch.randn(5)}, kind)
    data = path.read_bytes()
    for size in range(0, len(data), 37):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def with_checksum(data: bytearray, info: zipfile.ZipInfo) -> bytes:
    """The archive with the checksum of an edited member put right, in the zip's directory."""
    start = info.header_offset + 30 + int.from_bytes(data[info.header_offset + 26 :][:2], 'little')
    start += int.from_bytes(data[info.header_offset + 28 :][:2], 'little')
    crc = zlib.crc32(data[start : start + info.file_size]).to_bytes(4, 'little')
    return bytes(data).replace(info.CRC.to_bytes(4, 'little'), crc)


@pytest.mark.parametrize('repaired', [False, True], ids=['as_it_is', 'checksum_put_right'])
def test_flipped_bytes_never_crash(tmp_path, repaired):
    """A thousand files with random damage in the pickle: refused, or read as what they now say."""
    folder = MadeCheckpoint(stage=1, world_size=1).write(tmp_path / 'x')
    path = folder / 'mp_rank_00_model_states.pt'
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith('/data.pkl'))
    start = data.index(b'\x80\x02', info.header_offset)
    choose = random.Random(0)
    refused = 0
    for _ in range(500):
        damaged = bytearray(data)
        for _ in range(choose.randint(1, 4)):
            damaged[start + choose.randrange(info.file_size)] = choose.randrange(256)
        path.write_bytes(with_checksum(damaged, info) if repaired else damaged)
        try:
            read_all(open_checkpoint(folder))
        except CheckpointError as error:
            assert '\n' not in str(error)
            refused += 1
    assert refused > (250 if repaired else 490)


def test_reads_nothing_but_what_is_asked_for(tmp_path):
    """A member that is damaged, but not a weight, does no harm: Adam's moments are never looked at."""
    path = tmp_path / 'x.pth'
    torch.save({'state_dict': {'w': torch.ones(3)}, 'optimizer': {'m': torch.full((4,), 7.0)}}, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(torch.full((4,), 7.0).numpy().tobytes(), b'x' * 16))
    assert_same_tensors(read_all(open_checkpoint(path)), {'w': torch.ones(3)})
    assert load_torch_file(path)['optimizer']['m'].numel == 4


def test_the_name_that_a_file_was_saved_under(tmp_path):
    """Evidence of a file that was renamed."""
    for name, root in {'rank_1.optim.pt': 'rank_1.optim', 'x': 'x', 'ä.pt': 'archive'}.items():
        torch.save({}, tmp_path / name)
        assert zip_root((tmp_path / name).rename(tmp_path / 'renamed.pt')) == root
    with (tmp_path / 'opened.pt').open('wb') as file:
        torch.save({}, file)
    assert zip_root(tmp_path / 'opened.pt') == 'archive'
    assert zip_root(save(tmp_path / 'old.pt', {}, 'old')) is None


def test_a_file_that_shrinks_while_its_pickle_is_read(tmp_path):
    """A process of its own, which a signal would end: pages of a mapped file that are gone are no error."""
    path = save(tmp_path / 'x.pth', {f'w{i}': torch.ones(1) for i in range(20_000)}, 'zip')
    found = measured(load_while_it_shrinks, path)
    assert found.raised == 'CheckpointError' and 'truncated' in found.result


def load_while_it_shrinks(path: Path) -> None:
    original = zip_directory.content_start

    def shrinking(*args: Any) -> int:
        start = original(*args)
        os.truncate(path, start + 5000)
        return start

    torch_file.content_start = shrinking
    load_torch_file(path)
