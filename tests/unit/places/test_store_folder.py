"""Saves in a store: the pointer names whole ones, one run goes on, and only what is ours is deleted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from xhf_hooks.collective import Collective
from xhf_hooks.errors import AgreedError, DamagedError, IncompleteError, StoreError
from xhf_hooks.integrity.manifest import FileRecord
from xhf_hooks.places.objects import Store, without_secrets
from xhf_hooks.places.store import StoreFolder, pointer_key, read_pointer, send_file
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import Chunk, ExportEntry, Step, TensorSpec, WrittenSave
from xhf_hooks.system import calls
from xhf_hooks.system.calls import MemoryFolder
from xhf_hooks.writers.writer import Writer

SPEC = TensorSpec('w', (1000,), 'U8')
PLAN = make_plan([ExportEntry('w', SPEC.shape, 'U8', ('w',))], [SPEC], max_shard_nbytes=10**6, bucket_nbytes=1)
FILES = {'config.json', 'model.safetensors', 'xhf_manifest.json'}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(Store, 'pauses_secs', (0.0, 0.0))


@pytest.fixture
def url():
    return f'memory://{uuid.uuid4().hex}'


@pytest.fixture
def folder(url):
    made = StoreFolder(url, 2, warn=(said := []).append)
    made.said = said
    made.claim()
    yield made
    made.release()


def upload(folder: StoreFolder, number: int, verify: str = 'sizes'):
    """All but the commit; returns what is to be committed."""
    staging, step = folder.open_staging(), Step('iter', number, number)
    (staging / 'config.json').write_text('{}')
    writer = Writer(1, fsync=False)
    writer.open(PLAN, staging, writer.create(PLAN, staging, owner=0))
    writer.write(Chunk(PLAN.placements[0], memoryview(bytes([number]) * 1000)))
    written = WrittenSave(PLAN, writer.finish().written(), step)
    folder.upload(written, verify, Collective())
    return written


def save(folder: StoreFolder, number: int) -> None:
    folder.commit(upload(folder, number, 'full'))
    folder.end_save()


def newest(url: str) -> str | None:
    return read_pointer(Store(url), 'hf_model').newest


def keys(url: str) -> set[str]:
    store = Store(url)
    return {path[len(store._root) + 1 :] for path in store._fs.find(store._root)}


def prefixes(url: str) -> set[str]:
    return {key.partition('/')[0] for key in keys(url) if '/' in key}


def test_the_newest_ones_are_kept(folder, url):
    for number in (1, 2, 3):
        save(folder, number)
        assert newest(url) == f'hf_model_iter_{number}' and {*Store(url).sizes(newest(url))} == FILES
    assert prefixes(url) == {'hf_model_iter_2', 'hf_model_iter_3'}
    assert folder.where == f'{url}/hf_model_iter_3'


def test_what_others_put_there_stays_and_is_told(folder, url):
    """In a save that is deleted, and beside."""
    save(folder, 1)
    store = Store(url)
    for key in ('hf_model_iter_1/eval_results.json', 'notes.txt'):
        store.put(key, b'of somebody else')
    save(folder, 2)
    save(folder, 3)
    assert keys(url) >= {'hf_model_iter_1/eval_results.json', 'notes.txt'}
    assert store.sizes('hf_model_iter_1') == {'eval_results.json': 16}
    assert len(folder.said) == 1 and 'eval_results.json' in folder.said[0]


def test_a_prefix_in_use_is_not_used_again(folder, url):
    Store(url).put('hf_model_iter_1/model.safetensors', b'of somebody else')
    save(folder, 1)
    assert newest(url) == 'hf_model_iter_1_2'
    again = StoreFolder(url, 2)
    again.claim()
    save(again, 1)
    assert newest(url) == 'hf_model_iter_1_3'
    again.release()


@pytest.mark.parametrize('fault', ['missing', 'short'])
def test_what_the_store_has_lost_is_not_committed(folder, url, fault):
    save(folder, 1)
    written = upload(folder, 2)
    Store(url).delete(['hf_model_iter_2/model.safetensors'])
    if fault == 'short':
        Store(url).put('hf_model_iter_2/model.safetensors', b'short')
    with pytest.raises(IncompleteError, match=r'hf_model_iter_2: the store does not have 1 file.*model.safetensors'):
        folder.commit(written)
    folder.end_save()
    assert newest(url) == 'hf_model_iter_1'
    save(folder, 3)
    assert prefixes(url) == {'hf_model_iter_1', 'hf_model_iter_3'}


def test_bytes_that_the_store_changed_are_noticed(folder, url, monkeypatch):
    put = Store.put_file

    def change(self, key, path):
        put(self, key, path)
        self.put(key, bytes(path.stat().st_size))

    monkeypatch.setattr(Store, 'put_file', change)
    with pytest.raises(AgreedError, match='read back, its CRC-32 is'):
        upload(folder, 1, 'full')


def test_bytes_that_the_disk_changed_are_not_uploaded(folder, url, tmp_path):
    (tmp_path / 'a').write_bytes(b'changed')
    with pytest.raises(DamagedError, match='changed since the save'):
        send_file(Store(url), 'hf_model_iter_1', 'a', tmp_path / 'a', FileRecord(7, 0))
    assert keys(url) == {'hf_model.json'}


@pytest.mark.parametrize('arrives', [True, False])
def test_the_answer_to_the_pointer_is_lost(folder, url, monkeypatch, arrives):
    save(folder, 1)
    written = upload(folder, 2)
    put = Store.put

    def lose(self, key, data):
        if arrives or key != pointer_key('hf_model'):
            put(self, key, data)
        if key == pointer_key('hf_model'):
            raise StoreError('no answer')

    with monkeypatch.context() as patch:
        patch.setattr(Store, 'put', lose)
        with pytest.raises(StoreError, match='no answer'):
            folder.commit(written)
        folder.end_save()
    assert newest(url) == f'hf_model_iter_{2 if arrives else 1}'
    assert {*Store(url).sizes(newest(url))} == FILES
    save(folder, 3)
    assert prefixes(url) == {f'hf_model_iter_{2 if arrives else 1}', 'hf_model_iter_3'}


def test_of_two_runs_the_later_goes_on(folder, url):
    """Whoever they are, and whenever the first one notices."""
    save(folder, 1)
    written = upload(folder, 2)
    later = StoreFolder(url, 2)
    later.claim()
    with pytest.raises(StoreError, match=r'another run saves here since 20.*set out_dir to another place'):
        folder.commit(written)
    save(later, 2)
    with pytest.raises(AgreedError, match='another run saves here'):
        save(folder, 3)
    assert newest(url) == 'hf_model_iter_2_2' and {*Store(url).sizes(newest(url))} == FILES
    later.release()


def test_what_a_killed_run_left_is_deleted_and_nothing_else_is_read(folder, url, monkeypatch):
    save(folder, 1)
    upload(folder, 2)
    for number in range(10):
        Store(url).put(f'others/{number}', b'')
    asked, ask = [], Store._ask

    def note(self, what, key, *args, **more):
        asked.append(key)
        return ask(self, what, key, *args, **more)

    monkeypatch.setattr(Store, '_ask', note)
    later = StoreFolder(url, 1)
    later.claim()
    assert (
        prefixes(url) == {'hf_model_iter_1', 'others'} and not any('others' in key for key in asked) and '' not in asked
    )
    later.release()


def test_a_deleted_pointer_does_not_end_publishing(folder, url):
    save(folder, 1)
    Store(url).delete([pointer_key('hf_model')])
    save(folder, 2)
    assert newest(url) == 'hf_model_iter_2'


@pytest.mark.parametrize('content', [b'', b'{}', b'[]', {'saves': ['../other']}, {'newest': 'hf_model_iter_x'}])
def test_a_foreign_pointer_is_refused(folder, url, content):
    save(folder, 1)
    store = Store(url)
    if isinstance(content, dict):
        content = json.dumps({**json.loads(store.get('hf_model.json')), **content}).encode()
    store.put('hf_model.json', content)
    with pytest.raises(StoreError, match=r'hf_model.json: not written by this package'):
        StoreFolder(url, 1).claim()


class Hanging(AsyncFileSystem):
    """Never answers, or not after the first two parts of a file."""

    protocol = 'hanging'
    ended = 0

    async def _cat_file(self, path, **options):
        try:
            await asyncio.sleep(60)
        finally:
            self.ended += 1

    async def _put_file(self, lpath, rpath, callback, **options):
        for _ in range(2):
            await asyncio.sleep(0.15)
            callback.relative_update(1)
        await asyncio.sleep(60)


def test_a_store_that_does_not_answer_is_told_at_once(monkeypatch, tmp_path):
    """And not kept waiting for: what was sent is cancelled."""
    said = []
    monkeypatch.setattr(Store, 'silence_secs', 0.05)
    monkeypatch.setattr(Store, 'answer_secs', 0.2)
    monkeypatch.setattr(Store, 'stall_secs', 0.2)
    fsspec.register_implementation('hanging', Hanging, clobber=True)
    store = Store('hanging://a/b', warn=said.append)
    with pytest.raises(StoreError, match=r'does not answer within 0.2 s'):
        store.get('key')
    assert 'has not answered for' in said[0] and len(said) == 5
    assert store._fs.ended >= 2, 'the last one is only just being cancelled'
    (tmp_path / 'file').write_text('')
    began = time.monotonic()
    with pytest.raises(StoreError, match=r'does not answer within 0.2 s'):
        store.put_file('key', tmp_path / 'file')
    assert time.monotonic() - began > 3 * 0.45


def test_messages_have_no_secrets():
    assert without_secrets('https://key:word@host/a?X-Amz-Signature=abc and more') == 'https://host/a and more'


def test_temporary_folders_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, '_NEW_SECS', 0.0)
    ours = MemoryFolder()
    pid = os.fork()
    if not pid:
        (tmp_path / 'told').write_text(str(MemoryFolder().path))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    left = Path((tmp_path / 'told').read_text())
    assert left.exists()
    another = MemoryFolder()
    assert not left.exists() and ours.path.exists()
    for folder in (ours, another):
        folder.close()
        assert not folder.path.exists()
