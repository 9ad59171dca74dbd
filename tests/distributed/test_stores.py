"""Uploads to stores that speak S3, that fail, hang, and are away; and what a store does with names and parts."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from fsspec import get_filesystem_class

from tests.helpers.checks.assert_intact import assert_whole
from tests.helpers.checks.stored import folders_in, runs_in
from tests.helpers.faults.proxy import AwayFor, EachInTurn, Fault, faulty_proxy
from tests.helpers.faults.s3_servers import BUCKET, KEY, SECRET, s3_server
from tests.helpers.ranks.scenarios import check, run_scenarios
from tests.helpers.runs.hook_runs import READS_OWN_CHECKPOINTS, log_of, refusal_of, run
from xhf_hooks.errors import StoreError
from xhf_hooks.places import objects
from xhf_hooks.places.objects import Store
from xhf_hooks.places.store import read_pointer
from xhf_hooks.runs.ends.upload import Uploads

pytestmark = pytest.mark.needs('stores')

N_RANKS = 2
SMALL = dict(bucket_size=20_000, max_shard_size=9_000)
EACH = dict(interval=1, by_epoch=False)
LAST = 5
PART = 16 * 2**20
#: Runs with upload_to: name to server and further options of the hook.
UPLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    'moto': ('moto', dict(upload_keep=2, save_best='acc')),
    'fails_in_turn': ('proxy', dict(async_save=True)),
    'hangs': ('proxy', {}),
    'never_there': ('proxy', dict(exit_wait_secs=3)),
}
#: Of runs that must not start: options of the hook, and expected in the message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    'no_library': (dict(upload_to='oss://bucket/run'), 'object-stores.md'),
    'read_only': (dict(upload_to=f's3://{BUCKET}/read_only/läufe'), 'cannot write'),
    'no_get': (dict(upload_to=f's3://{BUCKET}/no_get/läufe'), 'cannot read'),
    'no_list': (dict(upload_to=f's3://{BUCKET}/no_list/läufe'), 'cannot list'),
    'no_delete': (dict(upload_to=f's3://{BUCKET}/no_delete/läufe', upload_keep=1), 'cannot delete'),
    'no_such_bucket': (dict(upload_to='s3://no-such-bucket/run'), 'Check upload_to'),
}


def url_of(name: str) -> str:
    return f's3://{BUCKET}/{name}/läufe'


# What each server does


def faults() -> dict[str, Any]:
    """Name of a run to what the proxy does to its requests."""

    def of_saves(name: str) -> Any:
        def matters(method: str, path: str) -> bool:
            return f'/{name}/' in path and ('/hf_model_iter_' in path or (method == 'PUT' and 'hf_model.json' in path))

        return matters

    return {
        'fails_in_turn': EachInTurn(of_saves('fails_in_turn'), (503, 'cut', 403, 500, 'lose', 404)),
        'hangs': AwayFor(of_saves('hangs'), 3.0, 'hang'),
        'never_there': AwayFor(lambda method, path: '/never_there/' in path and '/hf_model_iter_' in path, 1e9),
        'read_only': AwayFor(lambda method, path: '/read_only/' in path, 1e9, 403),
        'no_get': AwayFor(lambda method, path: method == 'GET' and '/no_get/' in path, 1e9, 403),
        'no_list': AwayFor(lambda method, path: method == 'GET' and 'prefix=no_list/' in path, 1e9, 403),
        'no_delete': AwayFor(lambda method, path: method == 'DELETE' and '/no_delete/' in path, 1e9, 403),
    }


@pytest.fixture(scope='module')
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp('stores')


@pytest.fixture(scope='module')
def servers(root) -> Iterator[dict[str, dict[str, Any]]]:
    """Kind to storage_options."""
    with (
        s3_server('moto', root / 'moto') as moto,
        s3_server('rclone', root / 'rclone') as rclone,
        faulty_proxy(rclone) as proxy,
    ):
        plans = faults()

        def decide(method: str, path: str) -> Fault:
            return next((fault for plan in plans.values() if (fault := plan(method, path)) is not None), None)

        proxy.decide = decide
        through = {'endpoint_url': proxy.url, 'config_kwargs': {'read_timeout': 2, 'connect_timeout': 2}}
        yield {'moto': {'endpoint_url': moto}, 'rclone': {'endpoint_url': rclone}, 'proxy': through}


# Runs


def upload(hook: dict[str, Any], work_dir: Path, patience_secs: float = 5.0) -> str:
    """A run of some saves. Runs on: all ranks."""
    options: dict[str, Any] = dict(hook={**EACH, **SMALL, **hook}, stage=3, max_iters=LAST)
    if 'save_best' in hook:
        options.update(scores=[0.5, 0.7, 0.6])
    with mock.patch.object(Uploads, 'patience_secs', patience_secs):
        return run(options, work_dir)


def lost_rank(hook: dict[str, Any], work_dir: Path) -> str:
    """Rank 1 uploads nothing, as if its thread had died. Runs on: all ranks."""
    with mock.patch.object(Uploads, 'work', lambda *_: None) if dist.get_rank() == 1 else mock.MagicMock():
        return upload(hook, work_dir, patience_secs=1.0)


def place(name: str, args: dict[str, Any]) -> dict[str, Any]:
    return dict(upload_to=url_of(name), storage_options=args)


@pytest.fixture(scope='module')
def results(servers, root):
    moto, proxy = servers['moto'], servers['proxy']
    scenarios: dict[str, Any] = {
        **{
            name: partial(upload, {**hook, **place(name, servers[kind])}, root / name)
            for name, (kind, hook) in UPLOADS.items()
        },
        'lost_rank': partial(lost_rank, place('lost_rank', moto), root / 'lost_rank'),
        **{
            name: partial(refusal_of, partial(upload, dict(hook, storage_options=proxy), root / name))
            for name, (hook, _) in REFUSED.items()
        },
    }
    return run_scenarios(scenarios, N_RANKS, env=READS_OWN_CHECKPOINTS)


def files_of_newest(store: Store) -> dict[str, bytes | None]:
    """Content of each file of the save that the pointer names."""
    newest = read_pointer(store, 'hf_model').newest
    return {name: store.get(f'{newest}/{name}') for name in store.sizes(newest)}


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}


@pytest.mark.parametrize('name', ['moto', 'fails_in_turn', 'hangs', 'lost_rank'])
def test_the_newest_save_is_uploaded(results, servers, name):
    local = Path(check(results, name)[0])
    kind, hook = UPLOADS.get(name, ('moto', {}))
    (store,) = runs_in(url_of(name), servers['rclone' if kind == 'proxy' else kind])
    assert store.url.rpartition('/')[2].startswith(f'{local.name}_'), 'its timestamp, as of the folder'
    pointer = read_pointer(store, 'hf_model')
    assert (pointer.newest, pointer.step) == (f'hf_model_iter_{LAST}', {'unit': 'iter', 'number': LAST})
    expected = bytes_in(local / 'hf_model')
    assert files_of_newest(store) == expected and len(expected) > 3
    prefixes = folders_in(store)
    assert len(prefixes & {*pointer.saves}) <= hook.get('upload_keep', 10)
    assert all('xhf_manifest.json' in store.sizes(save) for save in pointer.saves)
    best = read_pointer(store, 'hf_model_best')
    assert prefixes == {*pointer.saves, *(best.saves if best else ())}
    assert not [path.name for path in local.iterdir() if '.kept' in path.name]
    log = log_of(local)
    assert SECRET not in log and KEY not in log
    assert f'uploaded iter_{LAST} to {store.url}/hf_model_iter_{LAST}' in log
    if name in ('moto', 'lost_rank'):  # ranks share the files, or else rank 0 uploads all
        assert ('in place of other ranks' in log) == (name == 'lost_rank')


def test_a_store_that_is_away_stops_nothing(results):
    """Training ends, the save is there, what was not uploaded is told, and nothing is left on disk."""
    local = Path(check(results, 'never_there')[0])
    assert_whole(local / 'hf_model')
    log = log_of(local)
    assert log.count('uploads: not finished within exit_wait_secs=3 s') == 1 and log.count('waiting for uploads') == 1
    assert 'not uploaded: hf_model, iter_' in log
    assert not [path.name for path in local.iterdir() if '.kept' in path.name]


@pytest.mark.parametrize('name', REFUSED)
def test_refused_before_training(results, name):
    (message,) = {*check(results, name)}
    assert REFUSED[name][1] in message and SECRET not in message


# Objects: names, parts, refusals


@pytest.fixture(params=['moto', 'rclone'])
def kind(request, monkeypatch):
    monkeypatch.setattr(Store, 'pauses_secs', ())
    return request.param


@pytest.fixture
def store(servers, kind, request):
    return Store.open(f's3://{BUCKET}/{abs(hash(request.node.name))}/läufe', servers[kind])


def test_objects(store):
    store.require_usable()
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


@pytest.mark.parametrize('nbytes', [1_000, 2 * PART + 12_345])
def test_a_store_that_knows_no_checksums_in_headers(servers, tmp_path, nbytes):
    """Of OVH, Qumulo, older MinIO and Ceph."""
    (tmp_path / 'b.bin').write_bytes(random.Random(nbytes).randbytes(nbytes))
    with faulty_proxy(servers['moto']['endpoint_url']) as proxy:
        proxy.knows_checksums = False
        store = Store.open(f's3://{BUCKET}/no_checksums', dict(endpoint_url=proxy.url))
        store.require_usable()
        store.put_file('a/b.bin', tmp_path / 'b.bin')
        assert store.sizes('a') == {'b.bin': nbytes}
        store.delete(['a/b.bin'])
        assert store.sizes('a') == {}


def test_refusals_tell_no_secret(servers, kind, monkeypatch):
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', SECRET[::-1])
    get_filesystem_class('s3').clear_instance_cache()  # has what other tests opened
    for bucket in ('no-such-bucket', *([BUCKET] if kind == 'rclone' else [])):  # moto takes any credentials
        with pytest.raises(StoreError, match='upload_to') as caught:
            Store.open(f's3://{bucket}/b', servers[kind]).require_usable()
        assert f's3://{bucket}/b' in str(caught.value)
        assert not any(secret in str(caught.value) for secret in (KEY, SECRET, SECRET[::-1]))


def test_an_older_botocore_gets_only_options_that_it_has(servers, kind, monkeypatch):
    """1.34 lacks the validation of checksums, and refuses it with a TypeError; every version refuses this one."""
    monkeypatch.setitem(objects._S3_CONFIG, 'an_option_of_later_versions', 'when_required')
    get_filesystem_class('s3').clear_instance_cache()
    Store.open(f's3://{BUCKET}/older', servers[kind]).require_usable()
