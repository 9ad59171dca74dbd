"""upload_to='hf://...' against a stand-in of what huggingface_hub calls."""

from __future__ import annotations

import logging
import threading

import pytest

from tests.helpers.hub_server import TOKEN, hub_server
from tests.helpers.tiny_checkpoint import commit_one, iteration
from xhf_hooks.background.upload import Uploads
from xhf_hooks.collective import Collective
from xhf_hooks.errors import StoreError
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.hub import HubSaves
from xhf_hooks.telemetry import RunLog


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    with hub_server() as running:
        monkeypatch.setattr(constants, 'ENDPOINT', running.url)
        template = f'{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}'
        monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)
        monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
        monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
        monkeypatch.setenv('HF_TOKEN', TOKEN)
        yield running


@pytest.fixture
def run(hub, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folders = {name: CheckpointFolder(tmp_path / name, 1) for name in ('hf_model', 'hf_model_best')}
    log = RunLog(logging.getLogger('uploads'), 'test')
    destinations = {
        name: HubSaves('hf://org/name', name, is_first=name == 'hf_model', warn=log.warning) for name in folders
    }
    uploads = Uploads(destinations, log)
    for folder in folders.values():
        folder.claim()
    uploads.claim()

    def save(number, name='hf_model'):
        commit_one(folders[name], number)
        uploads.committed(folders[name], iteration(number), Collective())
        uploads.wait(60)
        return {path.name: path.read_bytes() for path in folders[name].final.iterdir()}

    yield save
    uploads.close()
    for folder in folders.values():
        folder.release()


def test_each_save_is_a_commit_and_a_tag(hub, run, tmp_path, caplog):
    assert hub.private and [*hub.branches] == ['main', 'hf_model_best']
    hub.branches['main'] |= {'README.md': b'of a person', 'model-00009-of-00009.safetensors': b'of an older save'}
    first, second = run(1), run(2)
    best = run(2, 'hf_model_best')
    assert hub.branches['main'] == {'.gitattributes': b'*', 'README.md': b'of a person', **second}
    assert hub.tags['hf_model_iter_1'] == hub.branches['main'] | first
    assert hub.branches['hf_model_best'].items() >= best.items()
    assert hub.commits == ['hf_model_iter_1', 'hf_model_iter_2', 'hf_model_best_iter_2']
    assert [*hub.tags] == hub.commits and 'uploaded iter_2 to hf://org/name/hf_model_iter_2' in caplog.text
    assert TOKEN not in caplog.text and not [path for path in tmp_path.iterdir() if '.kept' in path.name]


def test_files_of_others_stay(hub, run, tmp_path):
    """But weights, which loaders would mix with those of the save."""
    run(1)
    theirs = {'model.gguf': b'made of it', 'eval/results.json': b'{}', 'tokenizer.model': b'of a person'}
    hub.branches['main'] |= {**theirs, 'model-00007-of-00007.safetensors': b'of an older save'}
    second = run(2)
    assert hub.branches['main'] == {'.gitattributes': b'*', **theirs, **second}


def test_it_is_tried_again(hub, run, caplog):
    hub.refuses = True
    threading.Timer(0.5, lambda: setattr(hub, 'refuses', False)).start()
    saved = run(1)
    assert hub.branches['main'].items() >= saved.items()
    assert hub.commits == ['hf_model_iter_1'] and 'will be tried again' in caplog.text and TOKEN not in caplog.text


def test_the_same_step_again_has_a_tag_of_its_own(hub, run):
    hub.tags['hf_model_iter_1'] = {}
    run(1), run(2), run(1)
    assert hub.commits == ['hf_model_iter_1', 'hf_model_iter_2', 'hf_model_iter_1_2']


def test_refused_before_training(hub, monkeypatch):
    for url in ('hf://name', 'hf://org/name/folder'):
        with pytest.raises(StoreError, match='expected hf://organization/name'):
            HubSaves(url, 'hf_model', is_first=True).claim()
    hub.refuses = True
    with pytest.raises(StoreError, match=r'(?s)hf://org/name: cannot write.*token') as caught:
        HubSaves('hf://org/name', 'hf_model', is_first=True).claim()
    assert TOKEN not in str(caught.value)
    monkeypatch.setattr('huggingface_hub.get_token', lambda: None)
    with pytest.raises(StoreError, match='there is no token for the Hub'):
        HubSaves('hf://org/name', 'hf_model', is_first=True).claim()
