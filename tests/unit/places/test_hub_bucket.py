"""Saves in a bucket of a local server, which the installed huggingface_hub and hf_xet take for the Hub."""

import logging
import tempfile
import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from torch.distributed import HashStore

from tests.helpers.faults.hub_server import BUCKET, hub_server
from tests.helpers.runs.small_saves import publish
from tests.helpers.runs.tiny_checkpoint import commit_one
from xhf_hooks.errors import StoreError
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.options import RunOptions
from xhf_hooks.places import hub_bucket
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.objects import Store
from xhf_hooks.places.retention import Retention
from xhf_hooks.places.store import StoredSaves, read_pointer
from xhf_hooks.runs.ends import upload
from xhf_hooks.runs.ends.upload import start_uploads
from xhf_hooks.runs.telemetry import RunLog

URL = f'hf://buckets/{BUCKET}/runs/first'

bars: Any = import_module('huggingface_hub.utils.tqdm')  # of this name, the package has the class


@pytest.fixture
def hub(monkeypatch, tmp_path):
    if not hasattr(huggingface_hub.HfApi, 'batch_bucket_files'):
        pytest.skip('huggingface_hub before 1.5 has no buckets')
    monkeypatch.setattr(Store, 'pauses_secs', (0.0, 0.0))
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setenv('HF_TOKEN', 'hf_token')
    monkeypatch.setenv('HF_XET_LOG_DEST', str(tmp_path / 'xet.log'))  # else in the user's cache
    (content := tmp_path / 'content').mkdir()
    with hub_server(content) as server:
        monkeypatch.setattr(huggingface_hub.constants, 'ENDPOINT', server.url)
        yield server


@pytest.mark.parametrize('url', [URL, f'hf://buckets/{BUCKET}'])
def test_saves_are_published_kept_and_deleted(hub, tmp_path, url):
    """What somebody else put there stays, also under a name that begins as a save's does."""
    root = url.removeprefix(f'hf://buckets/{BUCKET}').strip('/')
    below = f'{root}/' if root else ''
    hub.objects[f'{below}hf_model_iter_10/notes'] = b'of somebody else'
    hub.objects['other'] = b'of somebody else'
    local = CheckpointFolder(tmp_path / 'hf_model', 1)
    saves = StoredSaves(url, 'hf_model', Retention(2), warn=(said := []).append)
    for number in (1, 2, 3):
        publish(saves, local, number)
    saves.clean_at_end()
    assert read_pointer(Store.open(url), 'hf_model').saves == ('hf_model_iter_2', 'hf_model_iter_3')
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
    monkeypatch.setenv('TMPDIR', str(tmp_path / 'gone'))
    store = Store.open(URL)
    for path in local.path.iterdir():
        store.put_file(f'save/{path.name}', path)
    assert hub.objects == {f'runs/first/save/{path.name}': path.read_bytes() for path in local.path.iterdir()}


@pytest.mark.parametrize('are_disabled', [False, True])
def test_no_progress_bars_are_printed_and_what_the_user_has_set_stays(hub, tmp_path, monkeypatch, capsys, are_disabled):
    """Neither while files are sent, nor while one is received, for which huggingface_hub asks whether it is seen."""
    monkeypatch.setenv('TQDM_POSITION', '-1')  # as on a terminal
    monkeypatch.setattr(bars, 'progress_bar_states', {'_global': not are_disabled, 'of.somebody': are_disabled})
    (tmp_path / 'file').write_bytes(bytes(100))
    store = Store.open(URL)
    store.put_file('file', tmp_path / 'file')
    store.put('object', b'content')
    assert store.get('object') == b'content'
    store.delete(['object'])
    assert capsys.readouterr().err == ''
    assert bars.are_progress_bars_disabled() is are_disabled
    assert bars.are_progress_bars_disabled('of.somebody') is not are_disabled


@pytest.mark.parametrize('variable', ['0', '1'])
def test_progress_bars_that_the_environment_decides_are_left_alone(hub, monkeypatch, capsys, variable):
    for module in (bars, huggingface_hub.constants):
        monkeypatch.setattr(module, 'HF_HUB_DISABLE_PROGRESS_BARS', variable == '1')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Store.open(URL).put('object', b'content')
    assert bool(capsys.readouterr().err) is (variable == '0')


def test_what_is_not_there_is_read_as_none_and_deleted_without_an_error(hub):
    store = Store.open(URL)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert store.get('hf_model.json') is None
    store.delete(['hf_model.json'])
    assert store.sizes('hf_model_iter_1') == {}
    store.require_usable()
    assert hub.objects == {}


def test_a_refused_request_is_told(hub):
    store = Store.open(URL, warn=(said := []).append)
    store.put('a', b'content')
    hub.is_read_only = True
    for request in (lambda: store.put('a', b'other'), lambda: store.delete(['a'])):
        with pytest.raises(StoreError, match=r'first/a: cannot (write|delete): HfHubHTTPError: 403 Forbidden'):
            request()
    assert len(said) == 4 and hub.objects == {'runs/first/a': b'content'}


def test_an_older_library_is_named_with_what_is_needed(monkeypatch):
    monkeypatch.setattr(huggingface_hub, 'HfApi', object)
    monkeypatch.setattr(huggingface_hub, '__version__', '0.36.0')
    with pytest.raises(StoreError) as told:
        Store.open(URL)
    assert str(told.value) == (
        f'{URL}: buckets of the Hub need huggingface_hub 1.5 or newer (HfApi.batch_bucket_files), and 0.36.0 is '
        f'installed (docs/object-stores.md), or set upload_to to another place'
    )
    monkeypatch.setattr(huggingface_hub, 'HfApi', SimpleNamespace(batch_bucket_files=None))
    monkeypatch.setattr(hub_bucket, 'find_spec', lambda name: None)
    with pytest.raises(StoreError, match='buckets of the Hub need the package hf_xet'):
        Store.open(URL)


def test_storage_options_are_those_of_the_library(hub):
    assert Store.open(URL, dict(endpoint='https://hub'))._fs._api.endpoint == 'https://hub'
    with pytest.raises(StoreError, match=r'cannot be opened: TypeError: .*endpoint_url.*; check upload_to and storage'):
        Store.open(URL, dict(endpoint_url='https://hub'))


@pytest.mark.parametrize(('url', 'n_ranks'), [(URL, 1), ('memory://run', 4)])
def test_rank_0_sends_all_to_the_hub_which_limits_requests(hub, tmp_path, monkeypatch, url, n_ranks):
    monkeypatch.setattr(upload, 'all_ranks_see', lambda path, collective: True)
    monkeypatch.setattr(upload, 'find_store', lambda name: HashStore())
    ranks: Any = SimpleNamespace(world_size=4, rank=0, from_rank0=lambda stage, decide: decide())
    log = RunLog(logging.getLogger('test'), 'test')
    uploads = start_uploads(RunOptions(upload_to=url), [tmp_path / 'hf_model'], ranks, log, None)
    assert uploads._n_ranks == n_ranks
    uploads.close()
