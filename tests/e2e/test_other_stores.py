"""Saves of two ranks in the store that XHF_TEST_STORE names, such as gs://bucket/tests.

The store's library must be installed, and must find the store in the environment (CONTRIBUTING.md). The tests delete
what they write there.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NOT_TESTED
from tests.distributed.test_hook_runs import log_dir_of, run
from tests.helpers.scenarios import run_scenarios
from tests.helpers.stored_saves import bytes_in, download_newest
from xhf_hooks.cli import verify
from xhf_hooks.integrity.manifest import MANIFEST_NAME
from xhf_hooks.places.objects import open_store
from xhf_hooks.places.store import read_pointer

STORE = os.environ.get('XHF_TEST_STORE')
SAVES = dict(interval=1, by_epoch=False, max_shard_size='20KB', bucket_size='10KB')
LAST = 3
#: Name to options of the hook; the name is the option with the URL. Two saves are kept.
RUNS: dict[str, dict[str, Any]] = {
    'upload_to': dict(upload_keep=2),
    'out_dir': dict(max_keep_ckpts=2, async_save=True, verify='full'),
}


@pytest.fixture(scope='module')
def url() -> Iterator[str]:
    if STORE is None:
        pytest.skip(f'{NOT_TESTED}a store other than S3: needs XHF_TEST_STORE=URL')
    own = f'{STORE.rstrip("/")}/{uuid.uuid4().hex[:8]}/läufe'
    yield own
    store = open_store(own)
    store._fs.rm(store._root, recursive=True)


@pytest.fixture(scope='module')
def results(url, tmp_path_factory):
    root = tmp_path_factory.mktemp('runs')
    hooks = {'local': {}, **{name: {**hook, name: f'{url}/{name}'} for name, hook in RUNS.items()}}
    scenarios = {
        name: partial(run, dict(hook={**SAVES, **hook}, stage=3, max_iters=LAST), root / name)
        for name, hook in hooks.items()
    }
    return root, run_scenarios(scenarios, 2)


def files_of(folder: Path) -> dict[str, bytes]:
    """The files but the manifest, which names the run."""
    return {name: data for name, data in bytes_in(folder).items() if name != MANIFEST_NAME}


@pytest.mark.parametrize('name', RUNS)
def test_the_newest_save_is_that_on_disk(results, url, tmp_path, name):
    store = open_store(f'{url}/{name}')
    pointer = read_pointer(store, 'hf_model')
    assert (pointer.newest, pointer.step['number'], len(pointer.saves)) == (f'hf_model_iter_{LAST}', LAST, 2)
    downloaded = download_newest(store, tmp_path)
    local = files_of(log_dir_of(results, 'local') / 'hf_model')
    assert files_of(downloaded) == local and len(local) > 3
    assert verify.main([str(downloaded)]) == verify.SAME
    keys = [path.removeprefix(f'{store._root}/') for path in store._fs.find(store._root)]
    assert {key.partition('/')[0] for key in keys} == {*pointer.saves, 'hf_model.json'}
    assert 'failed' not in next(log_dir_of(results, name).rglob('*.log')).read_text()
