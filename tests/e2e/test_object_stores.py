"""Stores against servers that speak S3: names, parts, refusals."""

from __future__ import annotations

import random

import pytest
from fsspec import get_filesystem_class

from tests.helpers.faults.s3_servers import BUCKET, CREDENTIALS, KEY, SECRET, S3Server, s3_server
from xhf_hooks.errors import StoreError
from xhf_hooks.places import objects
from xhf_hooks.places.objects import Store

pytestmark = pytest.mark.needs('stores')

PART = 16 * 2**20


@pytest.fixture(scope='module', params=['moto', 'rclone'])
def server(request, tmp_path_factory):
    with s3_server(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Store, 'pauses_secs', ())


@pytest.fixture
def store(server: S3Server, request):
    return Store(f's3://{BUCKET}/{abs(hash(request.node.name))}/läufe', server.backend_args)


def test_objects(store):
    store.require_writable()
    store.put('sub/gewichte ä 権 +&=?#%.bin', b'0123456789')
    store.put('hf_model.json', b'{}')
    assert store.get('sub/gewichte ä 権 +&=?#%.bin') == b'0123456789' and store.get('none') is None
    assert store.sizes('sub') == {'gewichte ä 権 +&=?#%.bin': 10} and store.sizes('none') == store.sizes('hf') == {}
    store.delete(['sub/gewichte ä 権 +&=?#%.bin', 'none'])
    assert store.sizes('sub') == {}


@pytest.mark.parametrize('nbytes', [0, 2 * PART, 2 * PART + 12_345])
def test_a_file_in_parts(store, tmp_path, nbytes):
    data = random.Random(nbytes).randbytes(nbytes)
    (tmp_path / 'b.bin').write_bytes(data)
    store.put_file('a/b.bin', tmp_path / 'b.bin')
    assert store.sizes('a') == {'b.bin': nbytes} and store.get('a/b.bin') == data


def test_refusals_tell_no_secret(server, monkeypatch):
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', SECRET[::-1])
    get_filesystem_class('s3').clear_instance_cache()  # has what other tests opened
    for bucket in (BUCKET, 'no-such-bucket'):
        if server.kind == 'moto' and bucket == BUCKET:
            continue  # it takes any credentials
        with pytest.raises(StoreError, match='upload_to') as caught:
            Store(f's3://{bucket}/b', server.backend_args).require_writable()
        assert f's3://{bucket}/b' in str(caught.value)
        assert not any(secret in str(caught.value) for secret in (KEY, SECRET, SECRET[::-1]))


def test_an_older_botocore_gets_only_options_that_it_has(monkeypatch, server):
    """1.34 lacks the validation of checksums, and refuses it with a TypeError; every version refuses this one."""
    monkeypatch.setitem(objects._S3_CONFIG, 'an_option_of_later_versions', 'when_required')
    get_filesystem_class('s3').clear_instance_cache()
    Store(f's3://{BUCKET}/older', server.backend_args).require_writable()
