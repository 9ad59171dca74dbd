"""Saves under a URL: visible as a whole, in their order, kept as told; one run at a time; killed runs are cleared."""

from __future__ import annotations

import json
import os
import threading
import uuid

import pytest

from xhf_hooks.errors import StoreError
from xhf_hooks.stores import open_store
from xhf_hooks.stores.publication import Publication, read_pointer
from xhf_hooks.stores.store import Store
from xhf_hooks.stores.store_lock import StoreLock

pytestmark = pytest.mark.modern_only

STEP = {'unit': 'iter', 'number': 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(StoreLock, 'settle_secs', 0.0)
    monkeypatch.setattr(StoreLock, 'beat_secs', 0.05)


@pytest.fixture(params=['memory', 'file'])
def store(request, tmp_path):
    url = f'memory://{uuid.uuid4().hex}' if request.param == 'memory' else tmp_path.as_uri()
    return open_store(f'{url}/run')


def publication(store, max_keep=-1):
    made = Publication(store, 'hf_model', max_keep)
    made.claim()
    return made


def save(made, number):
    prefix = made.new_prefix(f'iter_{number}')
    made.begin(prefix)
    made.store.put(f'{prefix}/model.safetensors', b'weights')
    made.store.put(f'{prefix}/config.json', b'{}')
    made.publish(prefix, b'{"a": 1}', STEP)
    return prefix


def prefixes(store):
    return sorted({key.partition('/')[0] for key in store.list() if '/' in key})


def test_a_save_is_visible_as_a_whole(store):
    made = publication(store)
    assert read_pointer(store, 'hf_model') is None
    assert save(made, 5) == 'hf_model_iter_5' and made.is_newest('hf_model_iter_5')
    pointer = read_pointer(store, 'hf_model')
    assert (pointer.newest, pointer.saves, pointer.step) == ('hf_model_iter_5', ('hf_model_iter_5',), STEP)
    made.release()
    assert sorted(store.list()) == [
        'hf_model.json',
        'hf_model_iter_5/config.json',
        'hf_model_iter_5/model.safetensors',
        'hf_model_iter_5/xhf_manifest.json',
    ]


@pytest.mark.parametrize('max_keep', [-1, 1, 2])
def test_retention(store, max_keep):
    made = publication(store, max_keep)
    for number in (1, 2, 3):
        save(made, number)
    made.release()
    again = publication(store, max_keep)
    save(again, 4)
    expected = [f'hf_model_iter_{number}' for number in (1, 2, 3, 4)]
    assert prefixes(store) == (expected if max_keep == -1 else expected[-max_keep:])
    again.release()


def test_the_same_step_again_has_a_prefix_of_its_own(store):
    made = publication(store)
    names = [save(made, 5), save(made, 5)]
    made.release()
    again = publication(store, 2)
    names.append(save(again, 5))
    assert names == ['hf_model_iter_5', 'hf_model_iter_5_2', 'hf_model_iter_5_3']
    assert prefixes(store) == names[1:] and read_pointer(store, 'hf_model').newest == names[-1]
    again.release()


class Killed(BaseException):
    """Instead of SIGKILL."""


def test_killed_at_every_request(monkeypatch):
    """The pointer's save is whole at every instant, and the next run leaves complete saves only."""
    changing = ('put', 'delete', 'abort')
    for deadly in range(1000):
        store = open_store(f'memory://{uuid.uuid4().hex}/run')
        made = publication(store, 1)
        save(made, 1)
        count = 0

        def dying(name, *args, method=None, deadly=deadly):
            nonlocal count
            if count == deadly:
                raise Killed
            count += 1
            return method(*args)

        with monkeypatch.context() as patched:
            for name in changing:
                method = getattr(store, name)
                patched.setattr(
                    store,
                    name,
                    lambda *args, name=name, method=method: dying(name, *args, method=method),
                    raising=False,
                )
            try:
                save(made, 2)
                is_killed = False
            except Killed:
                is_killed = True
        store = open_store(store.url)
        newest = read_pointer(store, 'hf_model').newest
        assert {f'{newest}/{name}' for name in ('model.safetensors', 'config.json', 'xhf_manifest.json')} <= {
            *store.list()
        }
        made._lock._released.set()
        StoreLock._held.discard(made._lock)
        again = publication(store, 1)
        assert prefixes(store) == [newest] and len(store.list(f'{newest}/')) == 3
        assert save(again, 2).startswith('hf_model_iter_2')
        again.release()
        if not is_killed:
            assert newest == 'hf_model_iter_2' and deadly > 8
            return
    raise AssertionError('never ended')


def test_what_is_not_ours_stays(store):
    for key in (
        'hf_model_iter_9/model.safetensors',
        'hf_model_iter_9x/.xhf_writing',
        'other/.xhf_writing',
        'notes.txt',
    ):
        store.put(key, b'of somebody else')
    before = set(store.list())
    made = publication(store, 1)
    assert save(made, 9) == 'hf_model_iter_9_2'
    save(made, 10)
    made.release()
    assert before <= set(store.list()) and prefixes(store) == [
        'hf_model_iter_10', 'hf_model_iter_9', 'hf_model_iter_9x', 'other',
    ]  # fmt: skip


@pytest.mark.parametrize(
    'content', [b'', b'{}', b'[]', b'\xff', b'{"format_version": 1, "newest": "../x", "saves": [], "step": {}}']
)
def test_a_pointer_that_is_none_is_refused(store, content):
    store.put('hf_model.json', content)
    with pytest.raises(StoreError, match=r'hf_model\.json'):
        publication(store)
    assert store.get('hf_model.lock') is None, 'released'


def test_a_newest_save_without_a_manifest_is_told(store):
    made = publication(store)
    save(made, 1)
    made.release()
    store.delete(['hf_model_iter_1/xhf_manifest.json'])
    with pytest.raises(StoreError, match='hf_model_iter_1'):
        publication(store)


def test_an_abandoned_save_leaves_nothing(store):
    made = publication(store)
    save(made, 1)
    prefix = made.new_prefix('iter_2')
    made.begin(prefix)
    store.put(f'{prefix}/model.safetensors', b'weights')
    made.abandon(prefix)
    made.abandon('hf_model_iter_1')
    assert prefixes(store) == ['hf_model_iter_1']
    made.release()


def holder(store, **content):
    store.put(
        'hf_model.lock', json.dumps({'run': 'x', 'host': 'elsewhere', 'process': 1, 'beat': 0, **content}).encode()
    )


def test_a_second_run_is_refused(store):
    made = publication(store)
    with pytest.raises(StoreError, match=f'in use by process {os.getpid()}'):
        publication(store)
    made.release()
    publication(store).release()
    assert 'hf_model.lock' not in store.list()


def test_no_heartbeat_comes_after_the_release(store, monkeypatch):
    made = publication(store)
    writes, may_write = threading.Event(), threading.Event()
    write = made._lock._write

    def slow(beat):
        writes.set()
        may_write.wait()
        write(beat)

    monkeypatch.setattr(made._lock, '_write', slow)
    assert writes.wait(20)
    threading.Timer(0.1, may_write.set).start()
    made.release()
    assert 'hf_model.lock' not in store.list()
    assert not [thread for thread in threading.enumerate() if thread.name == 'xhf-store-lock']


def test_a_process_of_this_host(store):
    import socket

    holder(store, host=socket.gethostname(), process=os.getppid())
    with pytest.raises(StoreError, match='in use'):
        publication(store)
    holder(store, host=socket.gethostname(), process=2**22 + 5)
    publication(store).release()
    holder(store, host=socket.gethostname(), process=os.getpid())  # of another container
    publication(store).release()


def test_a_dead_run_of_another_host(store):
    holder(store)
    publication(store).release()


def test_a_live_run_of_another_host(store, monkeypatch):
    holder(store)
    beats = iter(range(1, 1000))
    read = Store.get

    def beating(self, key, *args):
        data = read(self, key, *args)
        if key == 'hf_model.lock' and b'elsewhere' in data:
            holder(self, beat=next(beats))
        return data

    monkeypatch.setattr(Store, 'get', beating)
    with pytest.raises(StoreError, match='process 1 on elsewhere'):
        publication(store)


def test_a_run_whose_place_was_taken_publishes_nothing(store):
    made = publication(store)
    save(made, 1)
    made._lock._released.set()
    holder(store)
    with pytest.raises(StoreError, match='in use by process 1 on elsewhere'):
        save(made, 2)
    assert read_pointer(store, 'hf_model').newest == 'hf_model_iter_1'
    made.release()
    assert 'hf_model.lock' in store.list(), 'of the other run'


def test_a_pointer_that_may_have_moved_keeps_its_save(store, monkeypatch):
    """The answer to the request was lost: deleting that save would leave readers with a pointer to nothing."""
    made = publication(store, 1)
    save(made, 1)
    put = Store.put

    def lose_answer(self, key, data):
        put(self, key, data)
        if key == 'hf_model.json':
            raise StoreError('no answer')

    with monkeypatch.context() as patch, pytest.raises(StoreError, match='no answer'):
        patch.setattr(Store, 'put', lose_answer)
        save(made, 2)
    made.abandon('hf_model_iter_2')
    newest = read_pointer(store, 'hf_model').newest
    assert newest == 'hf_model_iter_2' and store.get(f'{newest}/model.safetensors') == b'weights'
    save(made, 3)
    made.release()
    assert prefixes(store) == ['hf_model_iter_3']


def test_probes_of_killed_runs_are_cleared_once_they_are_old(store, monkeypatch):
    probes = ['.xhf_probe-0123456789ab', 'hf_model.lock.clock-01234567']
    for probe in probes:
        store.put(probe, b'')
    publication(store).release()
    assert sorted(store.list()) == probes, 'these may be of ranks that are alive'
    monkeypatch.setattr(Publication, 'probe_secs', 0.0)
    publication(store).release()
    assert list(store.list()) == []
