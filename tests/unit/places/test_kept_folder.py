"""A save that is being read stays, whole and under one name, while the next ones come and go."""

from __future__ import annotations

import json
import os

import pytest

from tests.helpers.tiny_checkpoint import commit_one, content, visible
from xhf_hooks.errors import TargetError
from xhf_hooks.format import strict_json
from xhf_hooks.integrity.check import check_folder
from xhf_hooks.integrity.manifest import MANIFEST_NAME, read_commit, read_manifest
from xhf_hooks.places import kept_folder
from xhf_hooks.places.checkpoint_folder import CheckpointFolder, sweep_dead_runs
from xhf_hooks.places.kept_folder import KeptFolder

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


@pytest.fixture(params=['links', 'open files'])
def is_linked(request, monkeypatch):
    """With hard links, and as on file systems without them."""
    if request.param == 'open files':

        def refuse(*args: object, **options: object) -> None:
            raise PermissionError('no links here')

        monkeypatch.setattr(kept_folder.os, 'link', refuse)
    return request.param == 'links'


@pytest.fixture
def folder(tmp_path):
    made = CheckpointFolder(tmp_path / 'hf_model', 1)
    made.claim()
    return made


def kept_names(parent):
    return [path.name for path in parent.iterdir() if '.kept-' in path.name]


def test_it_stays_while_saves_come_and_go(folder, tmp_path, is_linked):
    commit_one(folder, 1)
    (folder.final / 'notes.txt').write_text('of somebody else')
    before = {path.name: path.read_bytes() for path in folder.final.iterdir()}
    kept = KeptFolder.keep(folder.final)
    assert kept.is_linked is is_linked
    for number in (2, 3):
        commit_one(folder, number)
    assert {path.name: path.read_bytes() for path in kept.path.iterdir()} == {
        name: data for name, data in before.items() if name != 'notes.txt'
    }
    assert read_commit(kept.path).step.number == 1
    check_folder(kept.path, strict_json.read(kept.path / MANIFEST_NAME), 'full')
    assert content(folder.final) == 3
    kept.release()
    kept.release()
    assert kept_names(tmp_path) == []


def test_release_closes_what_it_opened(folder, is_linked):
    commit_one(folder, 1)
    before = len(os.listdir('/proc/self/fd'))
    kept = KeptFolder.keep(folder.final)
    assert (len(os.listdir('/proc/self/fd')) > before) is not is_linked
    kept.release()
    assert len(os.listdir('/proc/self/fd')) == before


def test_files_in_folders_are_kept_too(folder, is_linked):
    commit_one(folder, 1)
    manifest = strict_json.read(folder.final / MANIFEST_NAME)
    (folder.final / 'adapter').mkdir()
    (folder.final / 'adapter' / 'config.json').write_text('{}')
    manifest['files']['adapter/config.json'] = {'nbytes': 2, 'crc32': '00000000'}
    (folder.final / MANIFEST_NAME).write_text(json.dumps(manifest))
    kept = KeptFolder.keep(folder.final)
    assert (kept.path / 'adapter' / 'config.json').read_text() == '{}'
    kept.release()
    assert kept_names(folder.final.parent) == []


def test_the_next_run_removes_what_a_killed_one_kept(folder, tmp_path):
    commit_one(folder, 1)
    KeptFolder.keep(folder.final)
    assert len(kept_names(tmp_path)) == 1
    folder.open_staging()
    assert len(kept_names(tmp_path)) == 1, 'a save of the same run leaves it to its readers'
    folder.abandon()
    folder.release()
    again = CheckpointFolder(tmp_path / 'hf_model', 1)
    again.claim()
    assert kept_names(tmp_path) == [] and visible(tmp_path) == {'hf_model': 1}


def test_other_timestamps_are_swept(tmp_path):
    for stamp in ('20261122_000000', '20261122_000001'):
        made = CheckpointFolder(tmp_path / stamp / 'hf_model', 1)
        made.claim()
        commit_one(made, 1)
        KeptFolder.keep(made.final)
        if stamp.endswith('0'):
            made.release()
    sweep_dead_runs(tmp_path, 'hf_model')
    assert kept_names(tmp_path / '20261122_000000') == [], 'of a run that has ended'
    assert len(kept_names(tmp_path / '20261122_000001')) == 1, 'of a live run'


def test_what_is_no_save_is_refused(tmp_path):
    (tmp_path / 'hf_model').mkdir()
    with pytest.raises(TargetError, match='not a complete save'):
        KeptFolder.keep(tmp_path / 'hf_model')
    assert kept_names(tmp_path) == [] and read_manifest(tmp_path / 'hf_model') is None


def test_a_file_that_has_gone_is_told(folder, tmp_path):
    commit_one(folder, 1)
    next(folder.final.glob('*.safetensors')).unlink()
    with pytest.raises(TargetError, match='cannot be kept'):
        KeptFolder.keep(folder.final)
    assert kept_names(tmp_path) == []
