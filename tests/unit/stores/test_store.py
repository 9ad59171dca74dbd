"""Objects in stores of two kinds, written in parts and at once; what is told of what goes wrong."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import uuid
from datetime import datetime, timezone

import fsspec.asyn
import pytest

from xhf_hooks.errors import OptionError, StoreError, TargetError
from xhf_hooks.stores import open_store
from xhf_hooks.stores.open_store import checked_url, is_url
from xhf_hooks.stores.secrets import without_secrets
from xhf_hooks.stores.senders import Senders
from xhf_hooks.stores.store import _info
from xhf_hooks.stores.stored_object import StoredObject

pytestmark = pytest.mark.modern_only


@pytest.fixture(params=['memory', 'file'])
def store(request, tmp_path):
    url = f'memory://{uuid.uuid4().hex}' if request.param == 'memory' else tmp_path.as_uri()
    return open_store(f'{url}/run')


def test_put_get_list_delete(store):
    store.require_usable()
    assert store.list() == {}
    store.put('hf_model.json', b'{"a": 1}')
    store.put('sub/gewichte ä 権.bin', b'0123456789')
    assert store.get('sub/gewichte ä 権.bin', 2, 5) == b'234'
    assert store.get('hf_model.json') == b'{"a": 1}' and store.get('none') is None and store.info('none') is None
    assert store.info('sub') is None, 'a folder is no object'
    assert {key: info.nbytes for key, info in store.list().items()} == {'hf_model.json': 8, 'sub/gewichte ä 権.bin': 10}
    assert list(store.list('sub/')) == ['sub/gewichte ä 権.bin']
    store.put('hf_model.json', b'new')
    assert store.get('hf_model.json') == b'new'
    store.delete(['hf_model.json', 'none', 'sub/gewichte ä 権.bin'])
    assert store.list() == {}
    assert store.unfinished_uploads() == {}


@pytest.mark.parametrize('nbytes', [0, 1, 99, 100, 101, 1000, 12_345])
def test_an_object_in_parts(store, nbytes):
    data = bytes(range(256)) * (nbytes // 256 + 1)
    data = data[:nbytes]
    made = store.create('a/b.bin', nbytes, part_nbytes=100)
    for start in range(0, nbytes, 37):
        made.write(memoryview(data)[start : start + 37])
    assert made.nbytes == nbytes
    made.commit()
    assert store.get('a/b.bin') == data and store.info('a/b.bin').nbytes == nbytes


def test_a_discarded_object_is_not_there(store):
    for written in (b'', b'x' * 1000):
        made = store.create('a/b.bin', 1000, part_nbytes=100)
        made.write(written)
        made.discard()
    assert store.list() == {}


class Parts:
    """Of a store that takes them when it is told to."""

    def __init__(self) -> None:
        self.arrived, self.may_go = threading.Semaphore(0), threading.Semaphore(0)
        self.sent: dict[int, bytes] = {}
        self.fails = self.discarded = False

    def send(self, number, data):
        self.arrived.release()
        self.may_go.acquire()
        if self.fails:
            raise StoreError('the store is away')
        self.sent[number] = bytes(data)

    def finish(self, n_parts, rest):
        self.n_parts = n_parts
        assert not rest or not n_parts

    def discard(self):
        self.discarded = True


def in_parts(parts, n_senders, senders=None, room=None):
    from contextlib import nullcontext

    return StoredObject(parts, nullcontext, 10, n_senders, senders, room)


def test_two_parts_are_in_memory_and_are_sent_at_the_same_time():
    parts = Parts()
    made = in_parts(parts, 2)
    written = []

    def write():
        for number in range(5):
            made.write(bytes([number]) * 10)
            written.append(number)

    thread = threading.Thread(target=write)
    thread.start()
    parts.arrived.acquire(), parts.arrived.acquire()  # both, and no other part has come
    assert written in ([0], [0, 1]) and not parts.arrived.acquire(timeout=0.1)
    for _ in range(6):
        parts.may_go.release()
    thread.join()
    made.write(b'rest')
    made.commit()
    assert parts.sent == {**{number: bytes([number]) * 10 for number in range(5)}, 5: b'rest'} and parts.n_parts == 6


def test_the_next_object_is_filled_while_one_ends_in_the_same_room():
    senders, room = Senders(3), threading.Semaphore(3)
    first, second = Parts(), Parts()
    ending = in_parts(first, 3, senders, room)
    ending.write(b'x' * 15)
    ending.end()
    following = in_parts(second, 3, senders, room)
    thread = threading.Thread(target=lambda: (following.write(b'y' * 25), following.end()))
    thread.start()
    first.arrived.acquire(), first.arrived.acquire(), second.arrived.acquire()
    assert not second.arrived.acquire(timeout=0.1), 'a fourth part is in memory'
    for _ in range(3):
        first.may_go.release()
        second.may_go.release()
    ending.commit()
    thread.join()  # only then it has all of its bytes
    following.commit()
    assert (first.n_parts, second.n_parts) == (2, 3) and second.sent[2] == b'y' * 5
    assert [room.acquire(blocking=False) for _ in range(4)] == [True, True, True, False]
    senders.close()


def test_parts_that_wait_for_their_turn_give_their_room_back():
    senders, room, parts = Senders(3), threading.Semaphore(3), Parts()
    made = in_parts(parts, 1, senders, room)
    made.write(b'x' * 30)
    parts.arrived.acquire()  # the others wait for it
    discarding = threading.Thread(target=made.discard)
    discarding.start()
    while made._todo:
        time.sleep(0.01)
    parts.may_go.release()
    discarding.join()
    assert [room.acquire(timeout=20) for _ in range(3)] == [True] * 3
    senders.close()


def test_what_is_discarded_after_its_end_is_over_and_gives_its_room_back():
    senders, room, parts = Senders(2), threading.Semaphore(2), Parts()
    made = in_parts(parts, 2, senders, room)
    made.write(b'x' * 15)
    made.end()
    parts.arrived.acquire()
    for _ in range(2):
        parts.may_go.release()
    made.discard()
    made.discard()
    assert parts.discarded or parts.n_parts == 2, 'it was too late for that'
    assert room.acquire(blocking=False) and room.acquire(blocking=False)
    senders.close()


def test_a_part_that_fails_fails_the_object():
    parts = Parts()
    parts.fails = True
    made = in_parts(parts, 1)
    for _ in range(9):
        parts.may_go.release()
    with pytest.raises(StoreError, match='away'):
        for _ in range(9):
            made.write(b'x' * 10)
        made.commit()
    made.discard()
    assert parts.discarded and not parts.sent
    assert not [thread for thread in threading.enumerate() if thread.name.startswith('xhf-store-')]


def test_errors_tell_where_and_no_secret(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    (tmp_path / 'file').write_text('in the way')
    store = open_store((tmp_path / 'file' / 'run').as_uri(), option='upload_to')
    with pytest.raises(StoreError) as caught:
        store.require_usable()
    assert isinstance(caught.value, TargetError) and isinstance(caught.value, OSError)
    assert str(tmp_path / 'file' / 'run') in str(caught.value) and 'upload_to' in str(caught.value)
    secret = 'sosecret123'
    said = without_secrets(
        f'https://user:{secret}@host/b?X-Amz-Signature={secret} said {secret}',
        {'client_kwargs': {'aws_secret_access_key': secret}},
    )
    assert secret not in said and 'user' not in said and said.startswith('https://host/b said')


@pytest.mark.parametrize('url', ['s3://key:secret@bucket/run', 's3://bucket/run?X-Amz-Signature=secret'])
def test_urls_with_credentials_are_refused_and_not_told(url):
    with pytest.raises(OptionError, match='upload_to') as caught:
        open_store(url)
    assert 'secret' not in str(caught.value)


@pytest.mark.parametrize('url', ['hf_model', '/abs/path', 's3:/bucket', 5, None])
def test_what_is_no_url(url):
    assert not is_url(url)
    with pytest.raises(OptionError):
        checked_url('upload_to', url)


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, 'gcsfs', None)
    with pytest.raises(StoreError, match=r"pip install 'xhf_hooks\[gcs\]'"):
        open_store('gs://bucket/run')


def test_a_thread_of_their_own_sends():
    """Not fsspec's, which the run itself may read its data with."""
    threads = []

    def prepare():
        threads.append(threading.current_thread())

    stores = [open_store(f's3://bucket/run-{number}', prepare_thread=prepare) for number in range(2)]
    asked = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, 'answered'), stores[0]._fs.loop)
    assert asked.result(60) == 'answered' and len(threads) == 1
    assert stores[0]._fs.loop is stores[1]._fs.loop is not fsspec.asyn.get_loop()
    assert open_store('s3://bucket/run')._fs.loop is fsspec.asyn.get_loop()


def test_an_unknown_protocol_or_argument(tmp_path):
    with pytest.raises(StoreError, match='nothere://bucket'):
        open_store('nothere://bucket')
    with pytest.raises(StoreError, match='backend_args'):
        open_store('s3://bucket', {'key': 'k', 'username': 'u'})


@pytest.mark.parametrize(('etag', 'checksum'), [('"0a1b"', '0a1b'), ('""', None), ('', None), (None, None)])
def test_an_etag_may_be_empty(etag, checksum):
    assert _info({'size': 1, 'ETag': etag}).checksum == checksum


@pytest.mark.parametrize('name', ['LastModified', 'last_modified', 'mtime', 'updated', 'created'])
def test_when_an_object_was_written(name):
    at = datetime(2026, 11, 23, tzinfo=timezone.utc)
    assert _info({'size': 1, name: at}).changed == at
    assert _info({'size': 1, name: at.timestamp()}).changed == at
    assert _info({'size': 1, name: 'yesterday'}).changed is None and _info({'size': 1}).changed is None
