"""Files of torch.save, and of a base model: where the bytes of each tensor are, and what is wrong with damaged ones."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.checks.compare import assert_same_tensors
from tests.helpers.checks.read_checkpoint import open_checkpoint, read_all, read_tensors
from tests.helpers.runs.torch_zip import pickled, write_torch_zip
from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.offline.checkpoint.hf_folder import weights_of_folder


def can_be_saved(dtype: torch.dtype) -> bool:
    """Whether the installed torch saves such tensors: 2.1 has float8 and does not, for example."""
    try:
        torch.save(torch.zeros(1).to(dtype), io.BytesIO())
    except KeyError:
        return False
    return True


def test_every_element_type(tmp_path):
    tensors = {code: torch.arange(7.0).to(dtype) for code, dtype in TORCH_DTYPES.items() if can_be_saved(dtype)}
    torch.save({'state_dict': tensors}, tmp_path / 'x.pth')
    assert_same_tensors(read_all(open_checkpoint(tmp_path / 'x.pth')), tensors)


def test_views(tmp_path):
    """Transposed, cut out, channels last, scalar, empty; parts of one storage, and one tensor under two names."""
    base = torch.randn(40, 30)
    tensors = {
        'whole': base, 'part': base[3:9], 'transposed': base.T, 'columns': base[:, 4:9], 'every_other': base[::2, 1::3],
        'scalar': torch.tensor(3.0), 'element': base[2, 3], 'empty': base[:0], 'again': base,
        'image': torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        'one_row': torch.randn(1, 9).expand(1, 9),
    }  # fmt: skip
    torch.save({'state_dict': tensors}, tmp_path / 'x.pth')
    source = open_checkpoint(tmp_path / 'x.pth')
    assert_same_tensors(read_all(source), {name: tensor.contiguous() for name, tensor in tensors.items()})
    assert [(spec.name, spec.aliases) for spec in source.specs() if spec.aliases] == [('whole', ('again',))]


@pytest.mark.parametrize('top', ['state_dict', 'module', 'model', 'model_state_dict', 'net', None])
def test_where_the_state_dict_is(tmp_path, top):
    weights = {'w': torch.ones(2), 'b': torch.zeros(1)}
    beside = {'other': {}, 'loss': torch.tensor(1.0), 'optimizer': {'scale': torch.ones(1), 'a': torch.ones(2)}}
    torch.save(weights if top is None else {**beside, top: weights}, tmp_path / 'iter_7.pth')
    source = open_checkpoint(tmp_path / 'iter_7.pth')
    assert_same_tensors(read_all(source), weights)
    assert source.warnings == []
    assert source.iteration == 7 and source.config_text is None


def test_further_weights_are_told(tmp_path):
    weights = {'w': torch.ones(2), 'b': torch.zeros(1)}
    torch.save({'model': weights, 'ema': weights}, tmp_path / 'a.pth')
    (warning,) = open_checkpoint(tmp_path / 'a.pth').warnings
    assert warning == f"{tmp_path / 'a.pth'}: the weights in 'model' are converted, those in ema are not"


@pytest.mark.parametrize('suffix', ['.bin', '.safetensors'])
def test_weights_in_several_files(tmp_path, suffix):
    weights = {'w': torch.randn(2, 3), 'b': torch.zeros(1)}
    for number, (name, tensor) in enumerate(weights.items(), 1):
        write = torch.save if suffix == '.bin' else save_file
        write({name: tensor}, tmp_path / f'pytorch_model-0000{number}-of-00002{suffix}')
    assert_same_tensors(read_all(open_checkpoint(tmp_path)), weights)


LFS_POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n'


@pytest.mark.parametrize('name', ['x.pth', 'model.safetensors'])
def test_a_pointer_of_git_lfs_is_told(tmp_path, name):
    (tmp_path / name).write_bytes(LFS_POINTER)
    with pytest.raises((CheckpointError, DamagedError), match='a pointer of Git LFS, not the file itself; run git lfs'):
        open_checkpoint(tmp_path / name)


def zipped(*names: str):
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, 'w') as archive:
            for name in names:
                archive.writestr(name, pickled({}))

    return write


def repacked(path: Path) -> None:
    """By somebody who unpacked it, and packed it again with compression."""
    torch.save({'w': torch.ones(99)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def flipped(path: Path) -> None:
    """In the pickle, which has a checksum."""
    torch.save({'weight': torch.ones(9)}, path)
    path.write_bytes(path.read_bytes().replace(b'weight', b'weighu'))


def tarred(path: Path) -> None:
    with tarfile.open(path, 'w') as archive:
        archive.addfile(tarfile.TarInfo('iter_5.pth'))


def of(content: object):
    return lambda path: torch.save(content, path)


LINEAR = torch.nn.Linear(2, 3)
BAD = {
    'text': (lambda p: p.write_text('hello'), 'not a file of torch.save'),
    'gzip': (lambda p: p.write_bytes(gzip.compress(bytes(99))), 'compressed by gzip; unpack it, and give'),
    'tar': (tarred, 'an archive of tar; unpack it, and give'),
    'GGUF': (lambda p: p.write_bytes(b'GGUF\3' + bytes(99)), 'GGUF file of llama.cpp; .*gguf_file='),
    'a pickle': (
        lambda p: p.write_bytes(pickle.dumps({'w': 1}, protocol=4)),
        'a pickle, not of torch.save; if you',
    ),
    'JSON': (lambda p: p.write_text('{"a": 1}'), 'a JSON file; give the folder'),
    'empty': (lambda p: p.write_bytes(b''), 'empty file'),
    'a zip of something else in a folder': (zipped('a/b.txt'), 'without data.pkl'),
    'TorchScript': (zipped('a/data.pkl', 'a/constants.pkl'), 'TorchScript'),
    'compressed': (repacked, 'is compressed'),
    'of torch before 1.6': (
        lambda p: torch.save({'w': torch.ones(2)}, p, _use_new_zipfile_serialization=False),
        'before 1.6, .* save it again with torch.save',
    ),
    'a number': (of(3), 'holds a int'),
    'no weights': (of({'state_dict': {}, 'meta': {}}), 'no weights'),
    'other values': (of({'epoch': 3, 'lr': 0.1}), 'holds no weights; it holds epoch, lr'),
    'a model': (of(LINEAR), r'an object of the class Linear, .* its state_dict\(\)'),
    'a model beside others': (of({'a': 3, 'model': LINEAR}), "as 'model', an object of the class Linear, not a state"),
    'two models': (
        of({'actor': LINEAR.state_dict(), 'critic': LINEAR.state_dict()}),
        r'holds several state dicts \(actor, critic\); save the one',
    ),
    'a flipped bit': (flipped, 'CRC'),
    'big endian': (lambda p: write_torch_zip(p, pickled({}), byteorder=b'big'), 'endian'),
    'complex128': (of({'w': torch.ones(2, dtype=torch.complex128)}), 'cannot store'),
    'conjugated': (of({'w': torch.ones(2, dtype=torch.complex64).conj()}), 'conjugated'),
}


@pytest.mark.parametrize('name', BAD)
def test_is_refused(tmp_path, name):
    write, words = BAD[name]
    path = tmp_path / 'model.pth'
    write(path)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(f'{path}: ') and '\n' not in str(caught.value)


def test_truncated_anywhere_is_refused(tmp_path):
    path = tmp_path / 'x.pth'
    torch.save({'w': torch.randn(300), 'v': torch.randn(5)}, path)
    data = path.read_bytes()
    for size in range(0, len(data), 37):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


# A base model's folder of safetensors


TENSORS = {'a': torch.randn(7, 3), 'b': torch.arange(5), 'c': torch.tensor(2.5, dtype=torch.float64)}


def test_those_of_each_file_that_the_index_names(tmp_path):
    files = {name: f'model-{name}.safetensors' for name in TENSORS}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, tmp_path / file)
    (tmp_path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': files}))
    assert_same_tensors(read_tensors(weights_of_folder(tmp_path).values()), TENSORS)


def test_files_of_torch_in_one_or_several(tmp_path):
    torch.save({**TENSORS, 'again': TENSORS['a']}, tmp_path / 'pytorch_model.bin')
    found = weights_of_folder(tmp_path)
    assert found.pop('again') is found['a'], 'it is stored once'
    assert_same_tensors(read_tensors(found.values()), {**TENSORS, 'again': TENSORS['a']})
    files = {name: f'pytorch_model-{name}.bin' for name in TENSORS}
    for name, file in files.items():
        torch.save({name: TENSORS[name]}, tmp_path / file)
    (tmp_path / 'pytorch_model.bin').unlink()
    (tmp_path / 'pytorch_model.bin.index.json').write_text(json.dumps({'weight_map': files}))
    assert_same_tensors(read_tensors(weights_of_folder(tmp_path).values()), TENSORS)


@pytest.mark.parametrize(
    ('dtype', 'nbytes', 'words'),
    [
        ('F4', 1, 'a has dtype F4'),
        ('F32', 4, 'not a complete safetensors file.*copy it again'),
        ('X', 8, 'unknown variant'),
    ],
)
def test_safetensors_that_are_refused(tmp_path, dtype, nbytes, words):
    header = json.dumps({'a': {'dtype': dtype, 'shape': [2], 'data_offsets': [0, nbytes]}}).encode()
    (tmp_path / 'model.safetensors').write_bytes(struct.pack('<Q', len(header)) + header + bytes(nbytes))
    with pytest.raises(CheckpointError, match=words):
        weights_of_folder(tmp_path)
