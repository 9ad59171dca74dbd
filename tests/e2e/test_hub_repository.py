"""upload_to='hf://...' to a real repository, which XHF_TEST_HUB_REPO names. Its main becomes what the test uploads."""

from __future__ import annotations

import logging
import os

import pytest

from tests.conftest import NOT_TESTED
from tests.helpers.tiny_checkpoint import commit_one, iteration
from xhf_hooks.collective import Collective
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.hub import HubDestination
from xhf_hooks.places.upload import RunUploads
from xhf_hooks.telemetry import RunLog

pytestmark = pytest.mark.modern_only

REPOSITORY = os.environ.get('XHF_TEST_HUB_REPO')


@pytest.fixture
def api(monkeypatch):
    from huggingface_hub import HfApi, constants, get_token

    if REPOSITORY is None or get_token() is None:
        pytest.skip(f'{NOT_TESTED}a repository of the Hub: needs XHF_TEST_HUB_REPO=organization/name and a token')
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    hub = HfApi()
    hub.create_repo(REPOSITORY, private=True, exist_ok=True)
    before = {tag.name for tag in hub.list_repo_refs(REPOSITORY).tags}
    yield hub
    for tag in {tag.name for tag in hub.list_repo_refs(REPOSITORY).tags} - before:
        hub.delete_tag(REPOSITORY, tag=tag)


def test_each_save_is_there_whole(api, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    folder = CheckpointFolder(tmp_path / 'hf_model', 1)
    destination = HubDestination(f'hf://{REPOSITORY}', 'hf_model', is_first=True)
    log = RunLog(logging.getLogger('uploads'), 'test')
    uploads = RunUploads({'hf_model': destination}, log, wait_secs=600.0, is_shared=True)
    folder.claim()
    uploads.claim(0)
    saved = {}
    try:
        for number in (1, 2):
            commit_one(folder, number)
            saved[number] = {path.name: path.read_bytes() for path in folder.final.iterdir()}
            uploads.offer(folder.final, iteration(number), Collective())
            uploads.wait()
        places = list(uploads.uploaded)
    finally:
        uploads.end()
        folder.release()
    assert len(places) == 2, caplog.text
    for revision, number in ((places[0], 1), (places[1], 2), ('main', 2)):
        found = tmp_path / f'downloaded-{revision}'
        api.snapshot_download(REPOSITORY, revision=revision, local_dir=found)
        assert {name: (found / name).read_bytes() for name in saved[number]} == saved[number]
        weights = {path.name for path in found.glob('*.safetensors')}
        assert weights == {name for name in saved[number] if name.endswith('.safetensors')}, 'none of another save'
