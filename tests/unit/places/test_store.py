"""Saves in a store: the pointer names whole ones, and only what is ours is deleted."""

import asyncio
import json
import random
import re
import sys
import uuid
from unittest import mock

import fsspec
import numpy as np
import pytest
import torch
from fsspec.asyn import AsyncFileSystem

from tests.helpers.checks.stored import folders_in, keys_in
from tests.helpers.runs.small_saves import publish, upload
from xhf_hooks.errors import DamagedError, IncompleteError, StoreError
from xhf_hooks.files.manifest import FileRecord
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.objects import Store, without_secrets
from xhf_hooks.places.retention import Retention
from xhf_hooks.places.store import StoredSaves, pointer_key, read_pointer, run_prefix, send_file

LOST = 'model-00002-of-00003.safetensors'
FILES = {
    *(f'model-0000{number}-of-00003.safetensors' for number in (1, 2, 3)),
    *('model.safetensors.index.json', MANIFEST_NAME),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(Store, 'pauses_secs', (0.0, 0.0))


@pytest.fixture
def url():
    return f'memory://{uuid.uuid4().hex}'


@pytest.fixture
def local(tmp_path):
    return CheckpointFolder(tmp_path / 'hf_model', 1)


@pytest.fixture
def saves(url):
    made = StoredSaves(url, 'hf_model', Retention(2), warn=(said := []).append)
    made.said = said
    yield made
    made.clean_at_end()


def newest(url: str) -> str | None:
    return read_pointer(Store.open(url), 'hf_model').newest


def test_the_newest_ones_are_kept_and_what_others_put_there(saves, local, url):
    """In a save that is deleted, which is told, and beside."""
    store = Store.open(url)
    for number in (1, 2, 3, 4):
        publish(saves, local, number)
        assert newest(url) == f'hf_model_iter_{number}' and {*store.sizes(newest(url))} == FILES
        if number == 2:
            store.put('hf_model_iter_2/eval_results.json', b'of somebody else')
            store.put('notes.txt', b'of somebody else')
    assert folders_in(store) == {f'hf_model_iter_{number}' for number in (2, 3, 4)} and 'notes.txt' in keys_in(store)
    assert store.sizes('hf_model_iter_2') == {'eval_results.json': 16}
    assert len(saves.said) == 1 and 'eval_results.json' in saves.said[0]


def test_the_first_save_of_every_three_iterations_stays(local, url):
    """Also where the newest is one of them."""
    saves = StoredSaves(url, 'hf_model', Retention(1, 3))
    for number in (1, 2, 4, 5, 7, 8, 9):
        publish(saves, local, number)
    saves.clean_at_end()
    assert folders_in(Store.open(url)) == {'hf_model_iter_4', 'hf_model_iter_7', 'hf_model_iter_9'}
    assert read_pointer(Store.open(url), 'hf_model').saves == ('hf_model_iter_4', 'hf_model_iter_7', 'hf_model_iter_9')


def test_no_empty_folder_stays_of_a_deleted_save(tmp_path, local):
    """Where the store has folders. What somebody else put there stays, in its folder."""
    root = tmp_path / 'store'
    saves = StoredSaves(root.as_uri(), 'hf_model', Retention(1), warn=[].append)
    for number in (1, 2, 3):
        publish(saves, local, number)
        (root / 'hf_model_iter_1' / 'own').mkdir(exist_ok=True, parents=True)
    saves.clean_at_end()
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ['hf_model_iter_1', 'hf_model_iter_3']
    assert [path.name for path in (root / 'hf_model_iter_1').iterdir()] == ['own']


class Failing:
    """A file system of which one call fails, always or the first times."""

    def __init__(self, fs, call, error, n_times=sys.maxsize):
        self._fs, self._call, self._error, self._n_left = fs, call, error, n_times

    def __getattr__(self, name):
        if name != self._call or not self._n_left:
            return getattr(self._fs, name)
        self._n_left -= 1
        return mock.Mock(side_effect=self._error)


def test_a_repeated_request_draws_no_random_number_of_training(url):
    """Ranks that draw together would no longer draw the same. The store is away for a while."""
    store = Store.open(url, warn=(said := []).append)
    store._fs = Failing(store._fs, 'pipe_file', ConnectionError('away'), 2)
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    store.put('a', b'content')
    after = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    assert store.get('a') == b'content' and len(said) == 2
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])


def test_a_step_that_is_saved_again_gets_another_name(saves, local, url):
    publish(saves, local, 1)
    publish(saves, local, 1)
    assert newest(url) == 'hf_model_iter_1_2'
    assert folders_in(Store.open(url)) == {'hf_model_iter_1', 'hf_model_iter_1_2'}


def test_runs_have_prefixes_of_their_own():
    """Also those that begin in the same second, as a scheduler starts them."""
    prefixes = {run_prefix(None) for _ in range(20)}
    assert len(prefixes) == 20 and all(re.fullmatch(r'\d{8}_\d{6}_[0-9a-f]{6}', prefix) for prefix in prefixes)
    assert re.fullmatch(r'20261127_201530_[0-9a-f]{6}', run_prefix('20261127_201530'))


@pytest.mark.parametrize('fault', ['missing', 'short'])
def test_what_the_store_has_lost_is_not_committed(saves, local, url, fault):
    publish(saves, local, 1)
    written = upload(saves, local, 2)
    Store.open(url).delete([f'hf_model_iter_2/{LOST}'])
    if fault == 'short':
        Store.open(url).put(f'hf_model_iter_2/{LOST}', b'short')
    with pytest.raises(IncompleteError, match=f'hf_model_iter_2: the store does not have 1 file.*{LOST}'):
        saves.publish(*written)
    assert newest(url) == 'hf_model_iter_1'
    publish(saves, local, 3)
    assert folders_in(Store.open(url)) == {'hf_model_iter_1', 'hf_model_iter_3'}


def test_bytes_that_the_disk_changed_are_not_uploaded(url, tmp_path):
    (tmp_path / 'a').write_bytes(b'changed')
    with pytest.raises(DamagedError, match='changed since the save'):
        send_file(Store.open(url), 'hf_model_iter_1', 'a', tmp_path / 'a', FileRecord(7, 0))
    assert keys_in(Store.open(url)) == set()


@pytest.mark.parametrize('arrives', [True, False])
def test_the_answer_to_the_pointer_is_lost(saves, local, url, monkeypatch, arrives):
    publish(saves, local, 1)
    written = upload(saves, local, 2)
    put = Store.put

    def lose(self, key, data):
        if arrives or key != pointer_key('hf_model'):
            put(self, key, data)
        if key == pointer_key('hf_model'):
            raise StoreError('no answer')

    with monkeypatch.context() as patch:
        patch.setattr(Store, 'put', lose)
        with pytest.raises(StoreError, match='no answer'):
            saves.publish(*written)
    assert newest(url) == f'hf_model_iter_{2 if arrives else 1}'
    assert {*Store.open(url).sizes(newest(url))} == FILES
    publish(saves, local, 3)
    assert folders_in(Store.open(url)) == {f'hf_model_iter_{2 if arrives else 1}', 'hf_model_iter_3'}


def test_what_was_not_published_is_deleted_at_the_end_and_nothing_else_is_read(saves, local, url, monkeypatch):
    publish(saves, local, 1)
    upload(saves, local, 2)
    for number in range(10):
        Store.open(url).put(f'others/{number}', b'')
    asked, ask = [], Store._ask

    def note(self, what, key, *args, **more):
        asked.append(key)
        return ask(self, what, key, *args, **more)

    monkeypatch.setattr(Store, '_ask', note)
    saves.clean_at_end()
    assert folders_in(Store.open(url)) == {'hf_model_iter_1', 'others'}
    assert read_pointer(Store.open(url), 'hf_model').writing is None
    assert not any('others' in key for key in asked) and '' not in asked


@pytest.mark.parametrize('is_begun', [True, False])
def test_a_run_without_an_upload_leaves_nothing(local, tmp_path, is_begun):
    """It died before its first save, or its upload was not completed: the last prefix is that of the newest save."""
    url = (tmp_path / 'store' / 'run').as_uri()
    saves = StoredSaves(url, 'hf_model', Retention(1))
    saves.store.require_usable()
    assert [*(tmp_path / 'store').iterdir()] == []
    if is_begun:
        upload(saves, local, 1)
        assert read_pointer(Store.open(url), 'hf_model').newest is None
    saves.clean_at_end()
    assert [*(tmp_path / 'store').iterdir()] == []


def test_a_store_that_allows_no_deletion_is_used_if_nothing_will_be_deleted(url):
    """Its credentials may not."""
    store = Store.open(url, warn=(said := []).append)
    store._fs = Failing(store._fs, 'rm_file', PermissionError('Access Denied'))
    with pytest.raises(StoreError, match='cannot delete: PermissionError: Access Denied'):
        store.require_usable()
    said.clear()
    store.require_usable(deletes=False)
    assert 'Nothing that this run uploads will be deleted, so it goes on' in said[-1]


def test_what_could_not_be_deleted_is_deleted_with_the_next_save(saves, local, url, monkeypatch):
    for number in (1, 2):
        publish(saves, local, number)
    with monkeypatch.context() as away:
        away.setattr(Store, 'delete', mock.Mock(side_effect=StoreError('away')))
        publish(saves, local, 3)
    assert saves.said == ['the save is complete, but older objects were not all deleted: away']
    assert 'hf_model_iter_1' in folders_in(Store.open(url))
    publish(saves, local, 4)
    assert folders_in(Store.open(url)) == {'hf_model_iter_3', 'hf_model_iter_4'}


def test_a_deleted_pointer_does_not_end_publishing(saves, local, url):
    publish(saves, local, 1)
    Store.open(url).delete([pointer_key('hf_model')])
    publish(saves, local, 2)
    assert newest(url) == 'hf_model_iter_2'


@pytest.mark.parametrize('content', [b'', b'{}', b'[]', {'saves': ['../other']}, {'newest': 'hf_model_iter_x'}])
def test_a_foreign_pointer_is_refused_and_stays(saves, local, url, content):
    publish(saves, local, 1)
    key = pointer_key('hf_model')
    if isinstance(content, dict):
        content = json.dumps({**json.loads(Store.open(url).get(key)), **content}).encode()
    Store.open(url).put(key, content)
    with pytest.raises(StoreError, match=f'{key}: not written by this package'):
        saves.begin('iter_2', [])
    assert Store.open(url).get(key) == content


class Hanging(AsyncFileSystem):
    """Never answers."""

    protocol = 'hanging'
    ended = 0

    async def _hang(self, *args, **options):
        try:
            await asyncio.sleep(60)
        finally:
            self.ended += 1

    _cat_file = _put_file = _hang


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch, tmp_path):
    """What was sent is cancelled. A large file may take longer."""
    said = []
    monkeypatch.setattr(Store, 'answer_secs', 0.1)
    fsspec.register_implementation('hanging', Hanging, clobber=True)
    store = Store.open('hanging://a/b', warn=said.append)
    with pytest.raises(StoreError, match=r'cannot read: .*does not answer within 0.1 s'):
        store.get('key')
    assert len(said) == 2 and 'does not answer' in said[0]
    assert store._fs.ended == 3
    (tmp_path / 'file').write_bytes(bytes(25_000))
    with pytest.raises(StoreError, match=r'cannot write: .*does not answer within 0.2 s'):
        store.put_file('key', tmp_path / 'file')


def test_messages_have_no_secrets():
    assert without_secrets('https://key:word@host/a?X-Amz-Signature=abc and more') == 'https://host/a and more'
