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
from tests.distributed.test_upload_to import assert_loads, bytes_in
from tests.helpers.scenarios import run_scenarios
from tests.helpers.stored_saves import download_newest
from xhf_hooks.cli import verify
from xhf_hooks.integrity.manifest import MANIFEST_NAME
from xhf_hooks.places.objects import open_store
from xhf_hooks.places.store import read_pointer

pytestmark = pytest.mark.modern_only

STORE = os.environ.get('XHF_TEST_STORE')
SAVES = dict(interval=1, by_epoch=False, max_shard_size='20KB', bucket_size='10KB')
LAST = 3
#: Name to options of the hook; its first word is the option with the URL. Two saves are kept.
RUNS: dict[str, dict[str, Any]] = {
    'upload_to': dict(upload_keep=2),
    'out_dir': dict(max_keep_ckpts=2),
    'out_dir in the background': dict(max_keep_ckpts=2, async_save=True, verify='full'),
}


def twice(option: str, url: str, hook: dict[str, Any], work_dir: Path) -> str:
    """Two runs on one URL; the log folder of the second. Runs on: all ranks."""
    options = dict(hook={**SAVES, **hook, option: url}, stage=3, max_iters=LAST)
    run(options, work_dir)
    return run(options, work_dir)


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
    local = dict(hook=SAVES, stage=3, max_iters=LAST)
    scenarios: dict[str, Any] = {'local': partial(run, local, root / 'local')}
    for name, hook in RUNS.items():
        scenarios[name] = partial(twice, name.partition(' ')[0], f'{url}/{name}', hook, root / name)
    return root, run_scenarios(scenarios, 2)


def files_of(folder: Path) -> dict[str, bytes]:
    """The files but the manifest, which names the run."""
    return {name: data for name, data in bytes_in(folder).items() if name != MANIFEST_NAME}


@pytest.mark.parametrize('name', RUNS)
def test_the_newest_save_is_that_on_disk(results, url, tmp_path, name):
    local, log_dir = log_dir_of(results, 'local'), log_dir_of(results, name)
    store = open_store(f'{url}/{name}')
    pointer = read_pointer(store, 'hf_model')
    assert (pointer.newest, pointer.step['number']) == (f'hf_model_iter_{LAST}_2', LAST), (
        'the second run has written it'
    )
    downloaded = download_newest(store, tmp_path)
    assert files_of(downloaded) == files_of(local / 'hf_model') and len(files_of(downloaded)) > 3
    assert_loads(downloaded)
    assert verify.main([str(downloaded)]) == verify.SAME
    keys = [path.removeprefix(f'{store._root}/') for path in store._fs.find(store._root)]
    prefixes = {key.partition('/')[0] for key in keys if '/' in key}
    assert prefixes <= {*pointer.saves} and len(prefixes) == 2
    assert [key for key in keys if '/' not in key] == ['hf_model.json'], 'no probe'
    log = next(log_dir.rglob('*.log')).read_text()
    assert (log_dir / 'hf_model').exists() == (name == 'upload_to') and 'failed' not in log
