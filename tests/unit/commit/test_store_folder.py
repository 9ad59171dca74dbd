"""Saves into a store: the pointer names whole ones; nothing is left of what was rehearsed, given up or killed."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest

from xhf_hooks.commit.store_folder import StoreFolder
from xhf_hooks.errors import IncompleteError, StoreError
from xhf_hooks.files.memory_folder import MemoryFolder
from xhf_hooks.planning.planner import make_plan
from xhf_hooks.planning.types import Chunk, ExportEntry, Step, TensorSpec
from xhf_hooks.stores import open_store
from xhf_hooks.stores.publication import read_pointer
from xhf_hooks.stores.store import Store
from xhf_hooks.stores.store_lock import StoreLock
from xhf_hooks.writers.store import StoreWriter

pytestmark = pytest.mark.modern_only

SPEC = TensorSpec('w', (1000,), 'U8')
PLAN = make_plan(
    [ExportEntry('w', SPEC.shape, 'U8', ('w',))],
    [SPEC],
    max_shard_nbytes=10**6,
    bucket_nbytes=1,
    front_to_back=True,
)


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setattr(StoreLock, 'settle_secs', 0.0)
    return f'memory://{uuid.uuid4().hex}'


@pytest.fixture
def folder(url):
    made = StoreFolder(url, 2)
    made.claim()
    yield made
    made.release()


def write(folder: StoreFolder, number: int):
    """All but the commit."""
    (folder.open_staging(Step('iter', number, number)) / 'config.json').write_text('{}')
    place, writer = folder.place(folder.token), StoreWriter(1)
    writer.open(PLAN, place, writer.create(PLAN, place))
    writer.write(Chunk(PLAN.placements[0], memoryview(bytes([number]) * 1000)))
    tensors = writer.finish().written()
    writer.abort()
    return tensors


def save(folder: StoreFolder, number: int) -> None:
    tensors = write(folder, number)
    folder.commit(PLAN, tensors, Step('iter', number, number), {}, 'full')


def newest(url: str) -> str | None:
    pointer = read_pointer(open_store(url), 'hf_model')
    return None if pointer is None else pointer.newest


def prefixes(url: str) -> set[str]:
    return {key.partition('/')[0] for key in open_store(url).list() if '/' in key}


def test_the_newest_ones_are_kept(folder, url):
    for number in (1, 2, 3):
        save(folder, number)
    assert newest(url) == 'hf_model_iter_3' and prefixes(url) == {'hf_model_iter_2', 'hf_model_iter_3'}
    assert folder.name_of(folder.token) == f'{url}/hf_model_iter_3'
    assert set(open_store(url).list('hf_model_iter_3')) == {
        f'hf_model_iter_3/{name}' for name in ('config.json', 'model.safetensors', 'xhf_manifest.json')
    }


def test_commits_are_counted_over_runs(folder, url):
    from xhf_hooks.integrity.manifest import parse_commit

    save(folder, 5)
    folder.release()
    again = StoreFolder(url, 2)
    again.claim()
    save(again, 1)
    assert newest(url) == 'hf_model_iter_1' and parse_commit(again.newest_manifest()).number == 2
    again.release()


def test_a_rehearsal_leaves_nothing_and_asks_for_nothing(folder, url):
    before = dict(open_store(url).list())
    path = folder.open_staging()
    (path / 'config.json').write_text('{}')
    assert dict(open_store(url).list()) == before
    folder.abandon()
    assert not path.exists()


def test_what_was_given_up_is_deleted_once_more(folder, url):
    save(folder, 1)
    write(folder, 2)
    straggler = folder.place(folder.token).key('model-of-another-rank.safetensors')
    folder.abandon()
    open_store(url).put(straggler, b'sent after all')
    assert newest(url) == 'hf_model_iter_1'
    save(folder, 3)
    assert prefixes(url) == {'hf_model_iter_1', 'hf_model_iter_3'}


@pytest.mark.parametrize('fault', ['missing', 'short'])
def test_what_the_store_has_lost_is_not_committed(folder, url, fault):
    save(folder, 1)
    records = write(folder, 2)
    key = folder.place(folder.token).key('model.safetensors')
    open_store(url).delete([key])
    if fault == 'short':
        open_store(url).put(key, b'short')
    with pytest.raises(IncompleteError, match=r'hf_model_iter_2/model.safetensors: expected \d+ bytes, the store has'):
        folder.commit(PLAN, records, Step('iter', 2, 2), {}, 'sizes')
    folder.abandon()
    assert newest(url) == 'hf_model_iter_1'


def test_a_save_is_there_though_older_ones_cannot_be_deleted(folder, url, monkeypatch):
    for number in (1, 2):
        save(folder, number)
    records = write(folder, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Store, 'delete', lambda *args: (_ for _ in ()).throw(StoreError('AccessDenied')))
        folder.commit(PLAN, records, Step('iter', 3, 3), {})
    assert 'AccessDenied' in folder.warnings[0] and newest(url) == 'hf_model_iter_3'
    folder.abandon()  # as after an error in a later stage
    assert newest(url) == 'hf_model_iter_3' and 'hf_model_iter_3' in prefixes(url)


def test_another_run_is_refused(folder, url):
    with pytest.raises(StoreError, match='in use by'):
        StoreFolder(url, 1).claim()


def test_folders_in_memory_of_killed_processes_are_removed(tmp_path):
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
