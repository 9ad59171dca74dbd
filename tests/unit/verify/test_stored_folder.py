"""Verifying and comparing model folders in a store, without fetching their weights to a disk."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from tests.helpers.model_folder import save_with_manifest
from xhf_hooks.cli.verify import DIFFERENT, SAME, UNUSABLE, main
from xhf_hooks.stores import Store, open_store
from xhf_hooks.stores.publication import Publication
from xhf_hooks.stores.store_lock import StoreLock
from xhf_hooks.verify.stored_folder import StoredFolder

pytestmark = pytest.mark.modern_only
WEIGHTS = 'model.safetensors'


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return save_with_manifest('llama', tmp_path_factory.mktemp('model') / 'model')


@pytest.fixture
def store(model, monkeypatch) -> Store:
    monkeypatch.setattr(StoreLock, 'settle_secs', 0.0)
    made = open_store(f'memory://{uuid.uuid4().hex}/run')
    publication = Publication(made, 'hf_model', -1)
    publication.claim()
    for number in (1, 2):
        prefix = publication.new_prefix(f'iter_{number}')
        for path in sorted(model.rglob('*')):
            made.put(f'{prefix}/{path.relative_to(model).as_posix()}', path.read_bytes())
        manifest = (model / 'xhf_manifest.json').read_bytes()
        publication.publish(prefix, manifest, {'unit': 'iter', 'number': number})
    publication.release()
    return made


def run(*args: object) -> int:
    return main([str(arg) for arg in args])


def damage(store: Store, key: str) -> None:
    data = bytearray(store.get(key))
    data[-1] ^= 1
    store.put(key, bytes(data))


def test_a_good_folder_by_its_pointer_and_by_its_prefix(store, capsys):
    assert run(store.url) == SAME
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith(f'{store.url}/hf_model_iter_2: good (') and 'xhf-stored' not in said
    assert 'all unchanged' in said
    assert run(f'{store.url}/hf_model_iter_1', '--json') == SAME
    assert json.loads(capsys.readouterr().out)['path'] == f'{store.url}/hf_model_iter_1'


def test_damage_is_found(store, capsys):
    damage(store, f'hf_model_iter_2/{WEIGHTS}')
    assert run(store.url) == DIFFERENT
    assert 'changed: ' in capsys.readouterr().out
    assert run(f'{store.url}/hf_model_iter_1') == SAME
    store.delete(['hf_model_iter_1/config.json'])
    assert run(f'{store.url}/hf_model_iter_1') == DIFFERENT
    assert 'config.json is missing' in capsys.readouterr().out


@pytest.mark.parametrize(
    'data', [b'', b'123', b'\xff' * 8, b'\x08' + bytes(7) + b'{}      ', b'\x09' + bytes(7) + b'not json ']
)
def test_weights_that_are_none(store, data, capsys):
    store.put(f'hf_model_iter_2/{WEIGHTS}', data)
    assert run(store.url) == DIFFERENT
    assert f'{store.url}/hf_model_iter_2' in capsys.readouterr().out


def test_comparing(store, model, capsys):
    assert run(model, store.url) == SAME
    assert f'{store.url}/hf_model_iter_2 (' in capsys.readouterr().out
    damage(store, f'hf_model_iter_2/{WEIGHTS}')
    assert run(store.url, model) == DIFFERENT
    assert run(store.url, f'{store.url}/hf_model_iter_1') == DIFFERENT


def test_weights_are_read_by_ranges(store, monkeypatch):
    asked = []
    get = store.__class__.get

    def watched(self, key, start=None, end=None):
        asked.append((key, start, end))
        return get(self, key, start, end)

    monkeypatch.setattr(store.__class__, 'get', watched)
    folder = StoredFolder(store.url)
    nbytes = store.info(f'hf_model_iter_2/{WEIGHTS}').nbytes
    path = Path(folder.path, WEIGHTS)
    assert path.stat().st_size == nbytes and path.stat().st_blocks * 512 < nbytes
    of_weights = [(start, end) for key, start, end in asked if key.endswith(WEIGHTS)]
    assert len(of_weights) == 2 and of_weights[-1][1] < nbytes / 2, 'its length, and the header'
    reader = folder.open_reader(path, nbytes)
    assert bytes(reader.view(nbytes - 10, nbytes, memoryview(b''))) == get(store, f'hf_model_iter_2/{WEIGHTS}')[-10:]
    folder.close()
    assert not folder.path.exists()


def test_unusable(store, capsys):
    assert run(f'{store.url}/nothing') == UNUSABLE
    assert 'no hf_model.json' in capsys.readouterr().err
    assert run('gs://bucket/run') == UNUSABLE
    assert "pip install 'xhf_hooks[gcs]'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(store.url, '--load')
