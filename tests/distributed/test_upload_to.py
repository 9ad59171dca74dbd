"""upload_to on real ranks, against servers that speak S3, that fail, hang, and are away."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed.test_hook_runs import run
from tests.distributed.test_on_saved import scalars
from tests.helpers.assert_intact import assert_whole
from tests.helpers.faulty_proxy import AwayFor, EachInTurn, Fault, faulty_proxy
from tests.helpers.s3_servers import BUCKET, CREDENTIALS, KEY, SECRET, s3_server
from tests.helpers.scenarios import check, run_scenarios
from tests.helpers.stored_saves import download_newest
from xhf_hooks.errors import XhfError
from xhf_hooks.places.objects import open_store
from xhf_hooks.places.store import read_pointer

#: Reads all weights of a save.
READS = [
    *(sys.executable, '-c'),
    'import json, sys; from pathlib import Path; weights = Path(sys.argv[1]).glob("*.safetensors"); '
    'print(json.dumps({"iteration": int(sys.argv[2]), "weights": sum(len(file.read_bytes()) for file in weights)}))',
    *('{path}', '{step}'),
]
EVERY = dict(interval=1, by_epoch=False, max_shard_size='20KB', bucket_size='10KB')
LAST = 5
#: Name to server and further options of the hook.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    'moto': ('moto', dict(upload_keep=2)),
    'rclone_async': ('rclone', dict(async_save=True)),
    'not_shared': ('moto', {}),
    'no_links': ('moto', dict(on_saved=READS)),
    'files': ('file', dict(upload_keep=1)),
    'fails_in_turn': ('proxy', {}),
    'hangs': ('proxy', {}),
    'best': ('moto', dict(save_best='acc')),
}
REFUSED = {
    'no_such_bucket': dict(upload_to='s3://no-such-bucket/run'),
    'no_library': dict(upload_to='oss://bucket/run'),
    'read_only': dict(upload_to='proxy'),
}
#: Of requests for the objects of saves, after the preflight.
OF_SAVES = '/hf_model_iter_'


def faults() -> dict[str, Any]:
    """Name of a run to what the proxy does to its requests."""

    def of_saves(name: str) -> Any:
        def matters(method: str, path: str) -> bool:
            return f'/{name}/' in path and (OF_SAVES in path or (method == 'PUT' and 'hf_model.json' in path))

        return matters

    return {
        'fails_in_turn': EachInTurn(of_saves('fails_in_turn'), (503, 'cut', 403, 500, 'lose', 404)),
        'hangs': AwayFor(of_saves('hangs'), 3.0, 'hang'),
        'never_there': AwayFor(lambda method, path: f'/never_there/läufe{OF_SAVES}' in path, 1e9),
        'read_only': AwayFor(lambda method, path: '/read_only/' in path, 1e9, 403),
    }


def upload(name: str, hook: dict[str, Any], work_dir: Path) -> str:
    """A run of some saves. Runs on: all ranks."""
    from xhf_hooks.background import upload as uploading
    from xhf_hooks.places import kept_folder

    def no_links(*args: Any, **options: Any) -> None:
        raise PermissionError('no links here')

    options: dict[str, Any] = dict(hook={**EVERY, **hook}, stage=3, max_iters=LAST)
    if name == 'best':
        options.update(max_iters=4, scores=[0.5, 0.7])
    with (
        mock.patch.object(uploading.Uploads, 'patience_secs', 5.0),
        mock.patch.object(uploading, 'is_shared', lambda *args: False) if name == 'not_shared' else mock.MagicMock(),
        mock.patch.object(kept_folder.os, 'link', no_links) if name == 'no_links' else mock.MagicMock(),
    ):
        return run(options, work_dir)


def best_of_two_runs(hook: dict[str, Any], root: Path) -> str:
    """The second run begins on a fresh disk, and its scores are worse. Runs on: all ranks."""
    how = dict(hook={**EVERY, 'save_best': 'acc', **hook}, stage=3)
    run({**how, 'max_iters': 4, 'scores': [0.5, 0.7]}, root / 'first')
    return run({**how, 'max_iters': 2, 'scores': [0.6]}, root / 'second')


def lost_rank(hook: dict[str, Any], work_dir: Path) -> str:
    """Rank 1 uploads nothing, as if its thread had died. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks.background.upload import Uploads

    def never(*args: Any) -> None:
        pass

    with (
        mock.patch.object(Uploads, 'patience_secs', 1.0),
        mock.patch.object(Uploads, 'work', never) if dist.get_rank() == 1 else mock.MagicMock(),
    ):
        return run(dict(hook={**EVERY, **hook}, stage=3, max_iters=2), work_dir)


def refused(hook: dict[str, Any], work_dir: Path) -> str:
    """The message of a run that must not start. Runs on: all ranks."""
    from tests.helpers.toy_run import ToyLM

    with (
        mock.patch.object(ToyLM, 'forward', side_effect=AssertionError('training began')),
        pytest.raises(XhfError) as caught,
    ):
        run(dict(hook={**EVERY, **hook}, stage=3), work_dir)
    return str(caught.value)


def two_runs(hook: dict[str, Any], work_dir: Path) -> str:
    """Another run takes the same URL during this one. Runs on: all ranks."""
    import torch.distributed as dist

    from xhf_hooks.places import store as stored

    claim, other = stored.StoredSaves.claim, []

    def claim_twice(self: stored.StoredSaves) -> None:
        claim(self)
        if not other:
            other.append(stored.StoredSaves(self.url, self.name, 1, self._options))
            claim(other[0])

    with mock.patch.object(stored.StoredSaves, 'claim', claim_twice) if dist.get_rank() == 0 else mock.MagicMock():
        return run(dict(hook={**EVERY, **hook}, stage=3, max_iters=1), work_dir)


@pytest.fixture(scope='module')
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp('uploads')


@pytest.fixture(scope='module')
def servers(root) -> Iterator[dict[str, dict[str, Any]]]:
    """Kind to backend_args."""
    with (
        s3_server('moto', root / 'moto') as moto,
        s3_server('rclone', root / 'rclone') as rclone,
        faulty_proxy(rclone.port) as proxy,
    ):
        plans = faults()

        def decide(method: str, path: str) -> Fault:
            return next((fault for plan in plans.values() if (fault := plan(method, path)) is not None), None)

        proxy.decide = decide
        through = {
            'endpoint_url': f'http://127.0.0.1:{proxy.port}',
            'config_kwargs': {'read_timeout': 2, 'connect_timeout': 2},
        }
        yield {'moto': moto.backend_args, 'rclone': rclone.backend_args, 'proxy': through, 'file': {}}


def place(name: str, kind: str, servers: dict[str, Any], root: Path) -> dict[str, Any]:
    url = (root / 'stored' / name).as_uri() if kind == 'file' else f's3://{BUCKET}/{name}/läufe'
    return dict(upload_to=url, backend_args=servers[kind] or None)


@pytest.fixture(scope='module')
def results(servers, root):
    scenarios: dict[str, Any] = {}
    for name, (kind, hook) in RUNS.items():
        scenarios[name] = partial(upload, name, {**hook, **place(name, kind, servers, root)}, root / name)
    never = {**place('never_there', 'proxy', servers, root), 'exit_wait_secs': 3}
    scenarios['never_there'] = partial(upload, 'never_there', never, root / 'never_there')
    scenarios['lost_rank'] = partial(lost_rank, place('lost_rank', 'moto', servers, root), root / 'lost_rank')
    scenarios['two_runs'] = partial(two_runs, place('two_runs', 'moto', servers, root), root / 'two_runs')
    where = place('best_again', 'moto', servers, root)
    scenarios['best_again'] = partial(best_of_two_runs, where, root / 'best_again')
    for name, hook in REFUSED.items():
        if hook['upload_to'] == 'proxy':
            hook = place(name, 'proxy', servers, root)
        elif 'no_such' in name:
            hook = dict(hook, backend_args=servers['rclone'])
        scenarios[name] = partial(refused, hook, root / name)
    return run_scenarios(scenarios, 3, env=CREDENTIALS)


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def bytes_in(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}


@pytest.mark.parametrize('name', [*RUNS, 'lost_rank'])
def test_the_newest_save_is_there(results, servers, root, tmp_path, name):
    local = Path(check(results, name)[0])
    kind, hook = RUNS.get(name, ('moto', {}))
    where = place(name, 'rclone' if kind == 'proxy' else kind, servers, root)
    store = open_store(where['upload_to'], where['backend_args'])
    last = {'lost_rank': 2, 'best': 4}.get(name, LAST)
    pointer = read_pointer(store, 'hf_model')
    assert (pointer.newest, pointer.step) == (f'hf_model_iter_{last}', {'unit': 'iter', 'number': last})
    downloaded = download_newest(store, tmp_path / 'downloaded')
    assert bytes_in(downloaded) == bytes_in(local / 'hf_model') and len(bytes_in(downloaded)) > 3
    keys = [path.removeprefix(f'{store._root}/') for path in store._fs.find(store._root)]
    prefixes = {key.partition('/')[0] for key in keys if '/' in key}
    assert len(prefixes & {*pointer.saves}) <= hook.get('upload_keep', 10)
    assert all('xhf_manifest.json' in store.sizes(save) for save in pointer.saves)
    best = read_pointer(store, 'hf_model_best')
    # An upload that is cancelled for a newer save may leave something: listed, for the next run to delete
    assert prefixes <= {*pointer.saves, *(best.saves if best else ()), *pointer.unfinished}
    assert not [path.name for path in local.iterdir() if '.kept' in path.name]
    log = next(local.rglob('*.log')).read_text()
    assert SECRET not in log and KEY not in log
    assert f'uploaded iter_{last} to {store.url}/hf_model_iter_{last}' in log


def test_ranks_share_the_files(results):
    """Where they see the folder; else rank 0 uploads all."""
    for name, alone in (('moto', False), ('lost_rank', True)):
        log = next(Path(check(results, name)[0]).rglob('*.log')).read_text()
        assert ('in place of other ranks' in log) is alone, name


def test_a_worse_model_of_a_run_on_a_fresh_disk_is_not_the_best(results, servers, root):
    log = next(Path(check(results, 'best_again')[0]).rglob('*.log')).read_text()
    where = place('best_again', 'moto', servers, root)
    store = open_store(where['upload_to'], where['backend_args'])
    assert 'best acc so far: 0.7000' in log
    assert read_pointer(store, 'hf_model_best').newest == 'hf_model_best_iter_4'


def test_a_store_that_is_away_stops_nothing(results):
    """Training ends, the save is there, what was not uploaded is told, and nothing is left on disk."""
    local = Path(check(results, 'never_there')[0])
    assert_whole(local / 'hf_model')
    log = next(local.rglob('*.log')).read_text()
    assert log.count('uploads: not finished within exit_wait_secs=3 s') == 1 and log.count('waiting for uploads') == 1
    assert 'not uploaded: hf_model, iter_' in log
    assert not [path.name for path in local.iterdir() if '.kept' in path.name]


def test_a_command_reads_what_is_uploaded(results):
    """From copies, where the file system has no links."""
    found = scalars(Path(check(results, 'no_links')[0]))
    assert found and max(found) == LAST
    for step, numbers in found.items():
        assert numbers['iteration'] == step and numbers['weights'] > 10_000


@pytest.mark.parametrize('name', REFUSED)
def test_refused_before_training(results, name):
    messages = check(results, name)
    expected = {
        'no_such_bucket': 's3://no-such-bucket/run',
        'no_library': 'object-stores.md',
        'read_only': 'cannot write',
    }[name]
    assert expected in messages[0] and 'upload_to' in messages[0] and len({*messages}) == 1
    assert SECRET not in messages[0]


def test_of_two_runs_on_one_url_the_later_goes_on(results):
    log = next(Path(check(results, 'two_runs')[0]).rglob('*.log')).read_text()
    assert 'another run saves here since 20' in log and 'not uploaded: hf_model, iter_1' in log
