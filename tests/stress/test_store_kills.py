"""Ranks are killed at each request to a store: the pointer's save is whole, and the next run has one of its own."""

import contextlib
import json
import os
import signal
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checks.stored import folders_in, runs_in
from tests.helpers.faults.numbered import fill, tiny_model
from tests.helpers.faults.proxy import Fault, FaultyProxy, faulty_proxy
from tests.helpers.faults.s3_servers import BUCKET, CREDENTIALS, s3_server
from tests.helpers.ranks.killed import WORLD_SIZE, ending, join_group
from tests.helpers.ranks.launch import start_process
from tests.helpers.runs.engines import open_run
from tests.helpers.runs.tiny_checkpoint import iteration
from xhf_hooks.errors import XhfError
from xhf_hooks.places.objects import Store
from xhf_hooks.places.store import read_pointer
from xhf_hooks.runs.ends.upload import Uploads

pytestmark = pytest.mark.needs('stores')

SAVES = (1, 2)
#: Of so many requests one is deadly here, for all ranks and for one in turn; 1 tries all, for an hour.
STRIDE = 14
#: More than two saves need, with what comes before and after.
MOST_REQUESTS = 400


@pytest.fixture
def proxy(tmp_path):
    with s3_server('rclone', tmp_path / 'rclone') as server, faulty_proxy(server) as running:
        yield running


def live(rank: int, store: str, work_dir: str, url: str, endpoint: str) -> None:
    """One rank of a run that saves twice and uploads each save."""
    os.environ.update(CREDENTIALS)
    Uploads.patience_secs = 1.0
    join_group(rank, store)
    model = tiny_model(zero3=False)
    options = dict(max_shard_size='30KB', exit_wait_secs=60, on_error='raise')
    options |= dict(upload_to=url, upload_keep=1, storage_options={'endpoint_url': endpoint})
    status = 0
    try:
        saves = open_run(model, Path(work_dir) / 'hf_model', **options)
        try:
            for number in SAVES:
                fill(model, number)
                saves.save(iteration(number))
                saves._after_saves.uploads.wait(60)
        finally:
            saves.close()
    except XhfError:
        status = 3  # of the loss of the other rank
    os._exit(status)


class KillAt:
    """Kills ranks when the nth request comes: all, or one."""

    def __init__(self, number: int, ranks: list[Any]) -> None:
        self._number, self._ranks = number, ranks
        self._lock = threading.Lock()
        self.seen = 0

    def __call__(self, method: str, path: str) -> Fault:
        with self._lock:
            self.seen += 1
            if self.seen != self._number:
                return None
        turn = self._number // STRIDE
        for rank in self._ranks if turn % 2 else [self._ranks[turn // 2 % WORLD_SIZE]]:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(rank.pid, signal.SIGKILL)
        return 'cut' if self._number % 3 else None  # it may still arrive


def one_life(proxy: FaultyProxy, number: int, folder: Path, url: str) -> KillAt:
    """Let a run live until it ends, or is killed at a request."""
    ranks: list[Any] = []
    killer = proxy.decide = KillAt(number, ranks)
    store = folder / f'store{number}'
    with ending(ranks, f'request {number}'):
        for rank in range(WORLD_SIZE):
            ranks.append(start_process(live, rank, str(store), str(folder / 'work'), url, proxy.url))
    store.unlink(missing_ok=True)
    return killer


def check_newest(store: Store) -> str | None:
    """The pointer's save is whole."""
    pointer = read_pointer(store, 'hf_model')
    if pointer is None or pointer.newest is None:
        return None
    manifest = json.loads(store.get(f'{pointer.newest}/xhf_manifest.json'))
    for name, file in manifest['files'].items():
        data = store.get(f'{pointer.newest}/{name}')
        assert data is not None and f'{zlib.crc32(data):08x}' == file['crc32'], f'{pointer.newest}/{name}'
    return pointer.newest


def test_killed_at_requests(proxy, tmp_path):
    url, options = f's3://{BUCKET}/killed/läufe', {'endpoint_url': proxy.server_url}
    found: list[str | None] = []
    for number in range(1, MOST_REQUESTS, STRIDE):
        killer = one_life(proxy, number, tmp_path, url)
        found = [check_newest(store) for store in runs_in(url, options)]
        if killer.seen < number:
            break
    else:
        raise AssertionError('a run makes more requests than expected')
    assert number > 30 and {None, 'hf_model_iter_1', 'hf_model_iter_2'} >= {*found} and len({*found}) > 1
    killed = {store.url for store in runs_in(url, options)}
    one_life(proxy, 0, tmp_path, url)
    (last,) = (store for store in runs_in(url, options) if store.url not in killed)
    assert check_newest(last) == 'hf_model_iter_2' and folders_in(last) == {'hf_model_iter_2'}
    assert [path.name for path in (tmp_path / 'work').iterdir()] == ['hf_model']
