"""Seven thousand mutated headers, indexes and manifests: each is refused or reported, nothing else happens."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tests.helpers.model_folder import manifest_of
from tests.helpers.mutate import mutated_bytes, mutated_json
from xhf_hooks.errors import CheckpointError, DamagedError, IncompleteError
from xhf_hooks.format import strict_json
from xhf_hooks.format.safetensors import read_header
from xhf_hooks.integrity.against_manifest import check_folder
from xhf_hooks.verify.folder import verify_folder

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

N_HEADERS, N_INDEXES, N_MANIFESTS = 2000, 750, 750  # twice each: bytes and values
SHARDS = ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors')
INDEX, MANIFEST = 'model.safetensors.index.json', 'xhf_manifest.json'


def tiny_folder(folder: Path) -> Path:
    """Two shards of 60 bytes, an index, a config."""
    weight_map = {}
    for i, name in enumerate(SHARDS):
        tensors = {f'l{i}.a': torch.arange(8, dtype=torch.float32) + i, f'l{i}.b': torch.ones(2, 3, dtype=torch.int8)}
        tensors[f'l{i}.c'] = torch.zeros((), dtype=torch.bfloat16)
        save_file(tensors, folder / name, {'format': 'pt'})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({'metadata': {'total_size': 2 * 40}, 'weight_map': weight_map}))
    (folder / 'config.json').write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path)


def with_header(data: bytes, header: Any) -> bytes:
    """The file with another header before its tensors."""
    (length,) = struct.unpack('<Q', data[:8])
    text = json.dumps(header).encode(errors='surrogatepass')
    return struct.pack('<Q', len(text)) + text + data[8 + length :]


def outcome(path: Path) -> list[str] | None:
    """Names in a file that we take for whole; None if it is refused."""
    try:
        return sorted(entry.name for entry in read_header(path).entries)
    except DamagedError:
        return None


@pytest.mark.parametrize('kind', ['bytes', 'values'])
def test_headers(folder, kind):
    """What we take for whole the safetensors library does, too."""
    path = folder / SHARDS[0]
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack('<Q', data[:8])[0]])
    whole = 0
    for number in range(N_HEADERS):
        mutated = mutated_bytes(data, number) if kind == 'bytes' else with_header(data, mutated_json(header, number))
        path.write_bytes(mutated)
        names = outcome(path)
        if names is not None:
            whole += 1
            try:
                with safe_open(path, 'pt') as opened:
                    assert sorted(opened.keys()) == names, number
            except SafetensorError as error:
                pytest.fail(f'mutation {number}: we accept what the library refuses: {error}')
    assert 0 < whole < N_HEADERS / 2


@pytest.mark.parametrize('kind', ['bytes', 'values'])
def test_indexes(folder, kind):
    """Good only if every tensor is still said to be where it is."""
    text = (folder / INDEX).read_bytes()
    original, good = json.loads(text), 0
    for number in range(N_INDEXES):
        content = mutated_json(original, number)
        mutated = mutated_bytes(text, number) if kind == 'bytes' else json.dumps(content).encode()
        (folder / INDEX).write_bytes(mutated)
        report = verify_folder(folder, model=False, read=False)
        if report.is_good:
            good += 1
            found = json.loads(mutated)
            assert found['weight_map'] == original['weight_map'], number
            assert found.get('metadata', {}).get('total_size', 80) == 80, number
    assert good < N_INDEXES / 2


def described(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says about the files, without what is only told."""
    return {
        name: (
            file['nbytes'],
            file['crc32'],
            {n: (t['shape'], t['dtype'], t['crc32'], t['non_finite']) for n, t in file.get('tensors', {}).items()},
        )
        for name, file in manifest['files'].items()
    }


@pytest.mark.parametrize('kind', ['bytes', 'values'])
def test_manifests(folder, kind):
    """Good only if it still describes every file as it is; the hook's check agrees, as far as it looks."""
    original = manifest_of(folder)
    text, good = json.dumps(original).encode(), 0
    for number in range(N_MANIFESTS):
        content = mutated_json(original, number)
        mutated = mutated_bytes(text, number) if kind == 'bytes' else json.dumps(content).encode()
        (folder / MANIFEST).write_bytes(mutated)
        report = verify_folder(folder, model=False)
        if report.is_good:
            good += 1
            found = json.loads(mutated)
            assert found['format_version'] == 1 or described(found) == described(original), number
        if kind == 'values' and number % 4 == 0:
            try:
                check_folder(folder, content, 'full')
            except (IncompleteError, DamagedError):
                continue
            assert report.is_good or 'non_finite' in str(content) or 'NaN' in mutated.decode(), number
    assert 0 < good < N_MANIFESTS / 2


def test_random_files(tmp_path):
    """Of every name that is read, with anything in it."""
    names = ('model.safetensors', INDEX, MANIFEST, 'config.json', 'adapter_model.safetensors', 'adapter_config.json')
    for number in range(300):
        rng = random.Random(number)
        path = tmp_path / names[number % len(names)]
        path.write_bytes(rng.randbytes(rng.choice([0, 1, 7, 8, 9, 100])))
        try:
            assert not verify_folder(tmp_path, model=False).is_good
        except CheckpointError:
            assert number < 3


BOMBS = {
    'deep': b'[' * 10**6,
    'deep objects': b'{"a":' * 10**6,
    'many lists': b'{"a":[' + b'[],' * (strict_json.MOST_VALUES // 2 + 1) + b'[]]}',
    'many numbers': b'{"a":[' + b'9999,' * (strict_json.MOST_VALUES + 1) + b'0]}',
    'long number': b'{"a":' + b'9' * 10**6 + b'}',
    'exponent': b'{"a":1e999999999}',
    'twice': b'{"a":1,"a":2}',
    'not unicode': b'{"\xff\xfe":1}',
    'half a character': b'{"a":"\\ud800"}',
    'no object': b'[1]',
    'NaN': b'{"a":NaN}',
}


@pytest.mark.parametrize('name', BOMBS)
def test_bombs(tmp_path, name):
    """JSON that takes much more memory than it has bytes, or more stack than there is."""
    path = tmp_path / 'model.safetensors'
    path.write_bytes(struct.pack('<Q', len(BOMBS[name])) + BOMBS[name])
    assert outcome(path) is None
    (tmp_path / MANIFEST).write_bytes(BOMBS[name])
    assert not verify_folder(tmp_path, model=False).is_good


@pytest.mark.parametrize('length', [2**63, 2**64 - 1, 2**40, 10**9, 100_000_001])
def test_a_header_longer_than_the_file(tmp_path, length):
    """Nothing of that size is ever asked for."""
    path = tmp_path / 'model.safetensors'
    path.write_bytes(struct.pack('<Q', length) + b'{}')
    assert outcome(path) is None


def test_a_header_longer_than_any(tmp_path):
    """A sparse file of a terabyte is not read."""
    path = tmp_path / 'model.safetensors'
    with path.open('wb') as file:
        file.write(struct.pack('<Q', 2**39))
        file.truncate(2**40)
    assert outcome(path) is None
