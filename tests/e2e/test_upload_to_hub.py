"""upload_to='hf://...' with a repository in memory in place of huggingface_hub's HfApi."""

from __future__ import annotations

import inspect
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import CommitOperationDelete, HfApi

from tests.helpers.tiny_checkpoint import commit_one, iteration
from xhf_hooks.background.upload import Uploads
from xhf_hooks.collective import Collective
from xhf_hooks.errors import StoreError
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.hub import HubSaves
from xhf_hooks.telemetry import RunLog


class Hub:
    """The Hub's only repository, and the calls of HfApi. Branches and tags hold files by name."""

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, bytes]] = {}
        self.tags: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.refuses = False

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        assert private and exist_ok
        if self.refuses:
            raise PermissionError('403 Forbidden')
        self.branches.setdefault('main', {'.gitattributes': b'*'})

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool = False) -> None:
        assert exist_ok or branch not in self.branches
        self.branches.setdefault(branch, dict(self.branches['main']))

    def delete_branch(self, repo_id: str, *, branch: str) -> None:
        del self.branches[branch]

    def list_repo_refs(self, repo_id: str) -> SimpleNamespace:
        return SimpleNamespace(tags=[SimpleNamespace(name=tag) for tag in self.tags])

    def list_repo_files(self, repo_id: str, *, revision: str) -> list[str]:
        return [*self.branches[revision]]

    def create_commit(self, repo_id: str, operations: list[Any], *, commit_message: str, revision: str) -> None:
        if self.refuses:
            raise ConnectionError('cannot be reached')
        for operation in operations:
            if isinstance(operation, CommitOperationDelete):
                del self.branches[revision][operation.path_in_repo]
            else:
                self.branches[revision][operation.path_in_repo] = Path(operation.path_or_fileobj).read_bytes()
        self.commits.append(commit_message)

    def create_tag(self, repo_id: str, *, tag: str, revision: str, exist_ok: bool) -> None:
        self.tags[tag] = dict(self.branches[revision])


@pytest.fixture
def hub(monkeypatch):
    made = Hub()
    for name in (name for name in vars(Hub) if not name.startswith('_')):  # they can be called as HfApi's
        ours, theirs = (inspect.signature(getattr(of, name)).parameters for of in (Hub, HfApi))
        assert ours.keys() <= theirs.keys(), name
    monkeypatch.setattr('huggingface_hub.HfApi', lambda library_name: made)
    monkeypatch.setenv('HF_TOKEN', 'hf_tokenofatest')
    return made


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
    assert [*hub.branches] == ['main', 'hf_model_best']
    hub.branches['main'] |= {'README.md': b'of a person', 'model-00009-of-00009.safetensors': b'of an older save'}
    first, second = run(1), run(2)
    best = run(2, 'hf_model_best')
    assert hub.branches['main'] == {'.gitattributes': b'*', 'README.md': b'of a person', **second}
    assert hub.tags['hf_model_iter_1'] == hub.branches['main'] | first
    assert hub.branches['hf_model_best'].items() >= best.items()
    assert hub.commits == ['hf_model_iter_1', 'hf_model_iter_2', 'hf_model_best_iter_2']
    assert [*hub.tags] == hub.commits and 'uploaded iter_2 to hf://org/name/hf_model_iter_2' in caplog.text
    assert not [path for path in tmp_path.iterdir() if '.kept' in path.name]


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
    assert hub.commits == ['hf_model_iter_1'] and 'will be tried again' in caplog.text


def test_the_same_step_again_has_a_tag_of_its_own(hub, run):
    hub.tags['hf_model_iter_1'] = {}
    run(1), run(2), run(1)
    assert hub.commits == ['hf_model_iter_1', 'hf_model_iter_2', 'hf_model_iter_1_2']


def test_refused_before_training(hub, monkeypatch):
    for url in ('hf://name', 'hf://org/name/folder'):
        with pytest.raises(StoreError, match='expected hf://organization/name'):
            HubSaves(url, 'hf_model', is_first=True).claim()
    hub.refuses = True
    with pytest.raises(StoreError, match=r'(?s)hf://org/name: cannot write.*token'):
        HubSaves('hf://org/name', 'hf_model', is_first=True).claim()
    monkeypatch.setattr('huggingface_hub.get_token', lambda: None)
    with pytest.raises(StoreError, match='there is no token for the Hub'):
        HubSaves('hf://org/name', 'hf_model', is_first=True).claim()
