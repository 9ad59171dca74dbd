"""Saves in a bucket of the Hub, whose calls are faked: of the installed huggingface_hub, by their parameters."""

import inspect
import logging
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from torch.distributed import HashStore

from tests.helpers.runs.tiny_checkpoint import commit_one
from tests.unit.places.conftest import publish
from xhf_hooks.background import upload
from xhf_hooks.background.upload import start_uploads
from xhf_hooks.errors import StoreError
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.places import hub_bucket
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.objects import Store
from xhf_hooks.places.store import StoredSaves, read_pointer
from xhf_hooks.saves.telemetry import RunLog

BUCKET = 'owner/name'
URL = f'hf://buckets/{BUCKET}/runs/first'


class FakeHub:
    """Those methods of HfApi, with one bucket.

    Attributes:
        objects: Content by path.
        sent: Each source that was sent, with where it went: bytes, or the path of a file.
    """

    objects: dict[str, bytes]
    sent: list[tuple[Any, str]]

    def __init__(self, endpoint: str | None = None) -> None:
        self.endpoint = endpoint

    def batch_bucket_files(self, bucket_id, *, add=None, copy=None, delete=None, token=None):
        assert bucket_id == BUCKET
        if missing := [path for path in delete or () if path not in self.objects]:
            raise RuntimeError(f'Failed to apply 1 out of 1 operation(s): {missing}')
        for source, path in add or ():
            self.sent.append((source, path))
            self.objects[path] = source if isinstance(source, bytes) else Path(source).read_bytes()
        for path in delete or ():
            del self.objects[path]

    def list_bucket_tree(self, bucket_id, prefix=None, *, recursive=None, token=None):
        """The server compares prefixes as text."""
        assert bucket_id == BUCKET and recursive
        yield SimpleNamespace(type='directory', path=f'{prefix}/folder')
        for path, content in self.objects.items():
            if path.startswith(prefix):
                yield SimpleNamespace(type='file', path=path, size=len(content))

    def get_bucket_paths_info(self, bucket_id, paths, *, token=None):
        assert bucket_id == BUCKET
        return iter([SimpleNamespace(path=path) for path in paths if path in self.objects])

    def download_bucket_files(self, bucket_id, files, *, raise_on_missing_files=False, token=None):
        for info, local in files:
            Path(local).write_bytes(self.objects[info.path])


METHODS = [name for name, member in vars(FakeHub).items() if callable(member) and name != '__init__']


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(Store, 'pauses_secs', (0.0, 0.0))
    monkeypatch.setattr(huggingface_hub, 'HfApi', FakeHub)
    monkeypatch.setattr(hub_bucket, 'find_spec', lambda name: name)
    monkeypatch.setattr(FakeHub, 'objects', {}, raising=False)
    monkeypatch.setattr(FakeHub, 'sent', [], raising=False)
    return FakeHub


@pytest.mark.parametrize('method', METHODS)
def test_the_fake_takes_what_the_installed_library_takes(method):
    """Where it has buckets: huggingface_hub before 1.5 has none."""
    real = getattr(huggingface_hub.HfApi, method, None)
    parameters = [[*inspect.signature(one).parameters] for one in (getattr(FakeHub, method), real or FakeHub)]
    assert real is None or parameters[0] == parameters[1]


@pytest.mark.parametrize('url', [URL, f'hf://buckets/{BUCKET}'])
def test_saves_are_published_kept_and_deleted(hub, tmp_path, url):
    """What somebody else put there stays, also under a name that begins as a save's does."""
    root = url.removeprefix(f'hf://buckets/{BUCKET}').strip('/')
    below = f'{root}/' if root else ''
    hub.objects[f'{below}hf_model_iter_10/notes'] = b'of somebody else'
    hub.objects['other'] = b'of somebody else'
    local = CheckpointFolder(tmp_path / 'hf_model', 1)
    saves = StoredSaves(url, 'hf_model', 2, warn=(said := []).append)
    for number in (1, 2, 3):
        publish(saves, local, number)
    saves.clean_at_end()
    assert read_pointer(Store(url), 'hf_model').saves == ('hf_model_iter_2', 'hf_model_iter_3')
    assert said == []
    names = {path.name for path in local.path.iterdir()}
    assert MANIFEST_NAME in names
    assert hub.objects.keys() == {
        *(f'{below}hf_model_iter_{number}/{name}' for number in (2, 3) for name in names),
        *(f'{below}{name}' for name in ('hf_model.json', 'hf_model_iter_10/notes')),
        'other',
    }
    stored = {name: hub.objects[f'{below}hf_model_iter_3/{name}'] for name in names}
    assert stored == {path.name: path.read_bytes() for path in local.path.iterdir()}


def test_files_are_sent_from_where_they_are(hub, tmp_path, monkeypatch):
    """No copy of a file is made: nothing is written into TMPDIR, which may be in memory."""
    commit_one(local := CheckpointFolder(tmp_path / 'hf_model', 1), 1)
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'gone'))
    store = Store(URL)
    for path in local.path.iterdir():
        store.put_file(f'save/{path.name}', path)
    assert hub.sent == [(str(path), f'runs/first/save/{path.name}') for path in local.path.iterdir()]


def test_what_is_not_there_is_read_as_none_and_deleted_without_an_error(hub):
    store = Store(URL)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert store.get('hf_model.json') is None
    store.delete(['hf_model.json'])
    assert store.sizes('hf_model_iter_1') == {}
    store.require_usable()
    assert hub.objects == {}


def test_a_refused_request_is_told(hub, monkeypatch):
    store = Store(URL, warn=(said := []).append)
    store.put('a', b'content')

    def refuse(self, bucket_id, **operations):
        raise RuntimeError('403 Forbidden')

    monkeypatch.setattr(hub, 'batch_bucket_files', refuse)
    for request in (lambda: store.put('a', b'other'), lambda: store.delete(['a'])):
        with pytest.raises(StoreError, match=r'first/a: cannot (write|delete): RuntimeError: 403 Forbidden'):
            request()
    assert len(said) == 4 and hub.objects == {'runs/first/a': b'content'}


def test_an_older_library_is_named_with_what_is_needed(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub, 'HfApi', object)
    monkeypatch.setattr(huggingface_hub, '__version__', '0.36.0')
    with pytest.raises(StoreError) as told:
        Store(URL)
    assert str(told.value) == (
        f'{URL}: buckets of the Hub need huggingface_hub 1.5 or newer (HfApi.batch_bucket_files), and 0.36.0 is '
        f'installed (docs/object-stores.md), or set upload_to to another place'
    )
    monkeypatch.setattr(huggingface_hub, 'HfApi', hub)
    monkeypatch.setattr(hub_bucket, 'find_spec', lambda name: None)
    with pytest.raises(StoreError, match='buckets of the Hub need the package hf_xet'):
        Store(URL)


def test_storage_options_are_those_of_the_library(hub):
    assert Store(URL, dict(endpoint='https://hub'))._fs._api.endpoint == 'https://hub'
    with pytest.raises(StoreError, match=r'cannot be opened: TypeError: .*endpoint_url.*; check upload_to and storage'):
        Store(URL, dict(endpoint_url='https://hub'))


@pytest.mark.parametrize(('url', 'n_ranks'), [(URL, 1), ('memory://run', 4)])
def test_rank_0_sends_all_to_the_hub_which_limits_requests(hub, tmp_path, monkeypatch, url, n_ranks):
    monkeypatch.setattr(upload, 'all_ranks_see', lambda path, collective: True)
    ranks: Any = SimpleNamespace(
        world_size=4, rank=0, from_rank0=lambda stage, decide: decide(), find_store=lambda name: HashStore()
    )
    log = RunLog(logging.getLogger('test'), 'test')
    uploads = start_uploads(url, None, -1, [tmp_path / 'hf_model'], ranks, log)
    assert uploads._n_ranks == n_ranks
    uploads.close()
