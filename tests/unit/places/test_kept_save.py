"""A save that is being read stays, whole and under one name, while the next ones come and go."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.helpers.runs.tiny_checkpoint import commit_one, content, visible
from tests.unit.places.conftest import LOCK, commit_with, hidden
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.integrity.check import check_folder
from xhf_hooks.integrity.manifest import read_manifest
from xhf_hooks.places import kept_save
from xhf_hooks.places.file_system import files_in


@pytest.mark.parametrize('has_links', [True, False])
def test_it_stays_while_saves_come_and_go(folder, tmp_path, monkeypatch, has_links):
    """With hard links, and as on file systems without them. What others added is not kept."""
    monkeypatch.setattr(kept_save, 'clone', lambda source, to: False)
    if not has_links:

        def refuse(*args: object, **options: object) -> None:
            raise PermissionError('no links here')

        monkeypatch.setattr(kept_save.os, 'link', refuse)
    commit_with(folder, 1, 'adapter/config.json', '{}')
    (folder.path / 'notes.txt').write_text('of somebody else')
    kept = folder.keep()
    for name, path in files_in(kept.path).items():
        is_link = os.path.samefile(path, folder.path / name)
        assert is_link == (has_links and path.suffix == '.safetensors')
    for number in (2, 3):
        commit_one(folder, number)
    saved = read_manifest(kept.path)
    check_folder(kept.path, saved)
    assert files_in(kept.path).keys() == {*saved.files, MANIFEST_NAME} >= {'adapter/config.json'}
    assert content(folder.path) == 3
    kept.release()
    kept.release()
    assert hidden(tmp_path) == LOCK


def test_the_next_run_removes_what_a_killed_one_kept_but_not_what_a_command_added(claim, tmp_path):
    folder = claim()
    commit_one(folder, 1)
    kept, with_results = folder.keep(), folder.keep()
    (with_results.path / 'results').mkdir()
    (with_results.path / 'results' / 'score.json').write_text('mine')
    folder.open_staging()
    folder.abort()
    assert kept.path.is_dir(), 'a save of the same run leaves it to its readers'
    folder.release()
    claim()
    apart = tmp_path / 'hf_model_others_iter_1'
    assert (apart / 'results' / 'score.json').read_text() == 'mine'
    shutil.rmtree(apart)
    assert hidden(tmp_path) == LOCK and visible(tmp_path) == {'hf_model': 1}
