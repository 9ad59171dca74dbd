"""A save that is being read stays, whole and under one name, while the next ones come and go."""

from __future__ import annotations

import json
import os

import pytest

from tests.helpers.runs.tiny_checkpoint import commit_one, content, visible
from xhf_hooks.format import strict_json
from xhf_hooks.integrity.check import check_folder
from xhf_hooks.integrity.manifest import MANIFEST_NAME, read_manifest
from xhf_hooks.places import kept_save
from xhf_hooks.places.checkpoint_folder import CheckpointFolder


@pytest.fixture
def folder(tmp_path):
    made = CheckpointFolder(tmp_path / 'hf_model', 1)
    made.claim()
    return made


def kept_names(parent):
    return [path.name for path in parent.iterdir() if '.kept-' in path.name]


@pytest.mark.parametrize('has_links', [True, False])
def test_it_stays_while_saves_come_and_go(folder, tmp_path, monkeypatch, has_links):
    """With hard links, and as on file systems without them. What others added is not kept."""
    monkeypatch.setattr(kept_save, 'clone', lambda source, to: False)
    if not has_links:

        def refuse(*args: object, **options: object) -> None:
            raise PermissionError('no links here')

        monkeypatch.setattr(kept_save.os, 'link', refuse)
    commit_one(folder, 1)
    manifest = strict_json.read(folder.path / MANIFEST_NAME)
    (folder.path / 'adapter').mkdir()
    (folder.path / 'adapter' / 'config.json').write_text('{}')
    manifest['files']['adapter/config.json'] = {'nbytes': 2, 'crc32': 'a3a6bf43'}
    (folder.path / MANIFEST_NAME).write_text(json.dumps(manifest))
    (folder.path / 'notes.txt').write_text('of somebody else')
    kept = folder.keep()
    for path in kept.path.rglob('*.*'):
        is_link = os.path.samefile(path, folder.path / path.relative_to(kept.path))
        assert is_link == (has_links and path.suffix == '.safetensors')
    for number in (2, 3):
        commit_one(folder, number)
    check_folder(kept.path, read_manifest(kept.path))
    assert {p.relative_to(kept.path).as_posix() for p in kept.path.rglob('*') if p.is_file()} == {
        *manifest['files'],
        MANIFEST_NAME,
    }
    assert content(folder.path) == 3
    kept.release()
    kept.release()
    assert kept_names(tmp_path) == []


def test_the_next_run_removes_what_a_killed_one_kept(folder, tmp_path):
    commit_one(folder, 1)
    folder.keep()
    folder.open_staging()
    assert len(kept_names(tmp_path)) == 1, 'a save of the same run leaves it to its readers'
    folder.abort()
    folder.release()
    again = CheckpointFolder(tmp_path / 'hf_model', 1)
    again.claim()
    assert kept_names(tmp_path) == [] and visible(tmp_path) == {'hf_model': 1}
