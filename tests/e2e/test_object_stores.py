"""Stores against servers that speak S3: parts, checksums, listings, what a killed run leaves."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time

import pytest
from xhf_hooks.stores.store_lock import StoreLock

from tests.helpers.s3_servers import BUCKET, CREDENTIALS, KEY, SECRET, S3Server, s3_server
from xhf_hooks.errors import StoreError
from xhf_hooks.places.objects import Store, open_store
from xhf_hooks.places.store import Publication, read_pointer

pytestmark = pytest.mark.modern_only

PART = 5 * 2**20


@pytest.fixture(scope='module', params=['moto', 'rclone'])
def server(request, tmp_path_factory):
    with s3_server(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(StoreLock, 'settle_secs', 0.0)


@pytest.fixture
def store(server: S3Server, request):
    return open_store(f's3://{BUCKET}/{abs(hash(request.node.name))}/läufe', server.backend_args)


def test_objects(store):
    store.require_usable()
    store.put('sub/gewichte ä 権 +&=?#%.bin', b'0123456789')
    store.put('hf_model.json', b'{}')
    assert store.get('sub/gewichte ä 権 +&=?#%.bin', 2, 5) == b'234'
    assert store.get('none') is None and store.info('none') is None and store.info('sub') is None
    assert {key: info.nbytes for key, info in store.list().items()} == {
        'hf_model.json': 2,
        'sub/gewichte ä 権 +&=?#%.bin': 10,
    }
    assert list(store.list('sub/')) == ['sub/gewichte ä 権 +&=?#%.bin'] and store.list('hf') == {}
    assert store.info('hf_model.json').changed is not None
    store.delete([*store.list(), 'none'])
    assert store.list() == {}


@pytest.mark.parametrize('nbytes', [0, 1, PART, PART + 1, 3 * PART + 12_345])
def test_an_object_in_parts(store, nbytes):
    data = random.Random(nbytes).randbytes(nbytes)
    made = store.create('a/b.bin', nbytes, part_nbytes=1000)
    assert made.part_nbytes == PART
    for start in range(0, nbytes, 1_234_567):
        made.write(memoryview(data)[start : start + 1_234_567])
    assert store.info('a/b.bin') is None
    made.commit()
    assert store.get('a/b.bin') == data and store.info('a/b.bin').nbytes == nbytes
    assert store.unfinished_uploads() == {}


def test_what_is_discarded_or_left(store):
    for leave in (False, True):
        made = store.create('hf_model_iter_1/b.bin', 3 * PART)
        made.part_nbytes = PART
        made.write(bytes(2 * PART + 1))
        if not leave:
            made.discard()
            assert store.unfinished_uploads() == {}
        else:
            while len(made._parts._sent) < 2:
                time.sleep(0.05)
            made._close_senders()
    assert [*store.unfinished_uploads('hf_model_').values()] == ['hf_model_iter_1/b.bin']
    assert store.unfinished_uploads('other') == {} and store.list() == {}
    store.put('hf_model_iter_1/.xhf_writing', b'')
    made = Publication(store, 'hf_model', 1)
    made.claim()
    assert store.unfinished_uploads() == {} and [*store.list()] == ['hf_model.lock']
    made.release()


def test_a_publication(store):
    made = Publication(store, 'hf_model', 1)
    made.claim()
    for number in (1, 2):
        prefix = made.new_prefix(f'iter_{number}')
        made.begin(prefix)
        store.put(f'{prefix}/model.safetensors', b'weights')
        made.publish(prefix, b'{}', {'unit': 'iter', 'number': number})
    assert read_pointer(store, 'hf_model').newest == 'hf_model_iter_2'
    with pytest.raises(StoreError, match=f'in use by process {os.getpid()}'):
        Publication(store, 'hf_model', 1).claim()
    made.release()
    names = ['hf_model.json', 'hf_model_iter_2/model.safetensors', 'hf_model_iter_2/xhf_manifest.json']
    assert [*store.list()] == names


def test_other_bytes_than_were_sent_are_noticed(store, monkeypatch):
    store.put('first', b'shows that ETags are checksums')
    call = type(store).call

    def flip(self, method, key=None, **arguments):
        if method in ('upload_part', 'put_object'):
            arguments['Body'] = bytes([arguments['Body'][0] ^ 1]) + bytes(arguments['Body'][1:])
        return call(self, method, key, **arguments)

    monkeypatch.setattr(type(store), 'call', flip)
    with pytest.raises(StoreError, match='received other bytes'):
        store.put('small', b'12345')
    made = store.create('big', 2 * PART, part_nbytes=PART)
    with pytest.raises(StoreError, match='received other bytes'):
        made.write(bytes(2 * PART))
        made.commit()
    made.discard()
    assert store.info('big') is None and store.unfinished_uploads() == {}


def test_the_answer_to_the_last_request_is_lost(store, monkeypatch):
    call = type(store).call

    def lose(self, method, key=None, **arguments):
        answer = call(self, method, key, **arguments)
        if method == 'complete_multipart_upload':
            raise ConnectionResetError('cut')
        return answer

    monkeypatch.setattr(type(store), 'call', lose)
    made = store.create('big', 2 * PART, part_nbytes=PART)
    made.write(bytes(2 * PART))
    made.commit()
    assert store.info('big').nbytes == 2 * PART


def test_refusals_tell_no_secret(server, monkeypatch):
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', SECRET[::-1])
    for url, args in ((f's3://{BUCKET}/a', server.backend_args), ('s3://no-such-bucket/a', server.backend_args)):
        if server.kind == 'moto' and BUCKET in url and 'no-such' not in url:
            continue  # it takes any credentials
        with pytest.raises(StoreError, match='upload_to') as caught:
            open_store(url, args).require_usable()
        assert url in str(caught.value)
        assert not any(secret in str(caught.value) for secret in (KEY, SECRET, SECRET[::-1]))


def test_nobody_listens():
    store = open_store(f's3://{BUCKET}/run', {'endpoint_url': 'http://127.0.0.1:9', 'config_kwargs': {'retries': {}}})
    store._fs.retries = 1
    with pytest.raises(StoreError, match=r'127\.0\.0\.1:9'):
        store.require_usable()


def no_preparation() -> None:
    pass


@pytest.mark.parametrize('has_own_loop', [True, False])
def test_a_session_is_closed_in_the_loop_that_made_it(server, has_own_loop):
    """Although the garbage collector runs in the thread of another loop."""

    def opened(own: bool) -> Store:
        url = f's3://{BUCKET}/closed'
        made = open_store(url, server.backend_args, prepare_thread=no_preparation if own else None)
        made.require_usable()
        return made

    async def collect() -> None:
        gc.collect()

    store, other = opened(has_own_loop), opened(not has_own_loop)
    assert store._fs.loop is not other._fs.loop
    session = store._fs._s3creator._client._endpoint.http_session
    del store
    asyncio.run_coroutine_threadsafe(collect(), other._fs.loop).result(timeout=60)
    deadline = time.monotonic() + 10
    while session._sessions is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert session._sessions is None  # as its __aexit__ leaves it, unless that fails
