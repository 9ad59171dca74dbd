"""What killed runs leave behind, and what is refused to be replaced."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.helpers.runs.tiny_checkpoint import commit_one, content, put_partial, put_whole, visible
from xhf_hooks.errors import TargetError
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.file_system import new_name

NOBODY = 65_534
ITER_4 = {'hf_model_iter_4': 4}


def hidden(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir() if path.name.startswith('.')} - {'.hf_model.lock'}


# Leftovers

#: Of a killed run: complete folders with numbers, partial ones, how many saves are kept; what the next run makes of it
#: before it has saved anything.
LEFT = {
    'a partial first save': ({}, ['staging'], 1, {}),
    'a partial save': ({'hf_model': 1}, ['staging'], 1, {'hf_model': 1}),
    'killed between the manifest and the rename': ({'staging': 4}, [], 1, {'hf_model': 4}),
    'killed between two renames, without exchange': ({'previous': 4}, ['staging'], 1, {'hf_model': 4}),
    'killed before the old one was deleted': ({'hf_model': 5, 'staging': 4}, [], 1, {'hf_model': 5, **ITER_4}),
    'or was archived': ({'hf_model': 5, 'previous': 4}, [], 3, {'hf_model': 5, **ITER_4}),
    'several deaths': ({'hf_model': 1}, ['staging', 'staging', 'previous', 'discarded'], 1, {'hf_model': 1}),
}


@pytest.mark.parametrize('case', LEFT)
def test_what_a_killed_run_left_is_completed_or_deleted(tmp_path, case):
    whole, partial, max_keep, expected = LEFT[case]
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep)
    for name, number in whole.items():
        put_whole(folder, name if name == 'hf_model' else new_name(folder.path, name).name, number)
    for kind in partial:
        put_partial(folder, new_name(folder.path, kind).name)
    mine = {f'.hf_model.{name}' for name in ('mine', 'previous', 'staging-1')}
    for name in ('.hf_model.shared-0000000000ee', *mine):
        (tmp_path / name).write_text('')
    folder.claim()
    assert (visible(tmp_path), hidden(tmp_path)) == (expected, mine)
    commit_one(folder, 6)
    folder.release()
    assert len(visible(tmp_path)) <= max_keep and hidden(tmp_path) == mine


def test_of_two_whole_folders_the_later_commit_gets_the_name(tmp_path):
    """Killed after the manifest of iteration 3, with which a run that went back follows iteration 5."""
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=1)
    commit_one(folder, 5)
    commit_one(folder, 3)
    os.rename(folder.path, tmp_path / '.hf_model.staging-0123456789ab')
    other = CheckpointFolder(tmp_path / 'elsewhere' / 'hf_model', max_keep=1)
    commit_one(other, 5)
    os.rename(other.path, folder.path)
    CheckpointFolder(tmp_path / 'hf_model', max_keep=1).recover()
    (tmp_path / 'elsewhere').rmdir()
    assert (visible(tmp_path), hidden(tmp_path)) == ({'hf_model': 3, 'hf_model_iter_5': 5}, set())


def test_others_files_survive_a_death_between_moving_and_deleting(tmp_path):
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=1)
    commit_one(folder, 1)
    (folder.path / 'eval.json').write_text('result')
    os.rename(folder.path, new_name(folder.path, 'discarded'))
    put_whole(folder, 'hf_model', 2)
    CheckpointFolder(tmp_path / 'hf_model', max_keep=1).recover()
    assert (tmp_path / 'hf_model_others_iter_1' / 'eval.json').read_text() == 'result'
    shutil.rmtree(tmp_path / 'hf_model_others_iter_1')
    assert (visible(tmp_path), hidden(tmp_path)) == ({'hf_model': 2}, set())


# What is not ours is not replaced


@pytest.mark.parametrize('kind', ['foreign_folder', 'broken_manifest', 'link', 'file'])
def test_what_is_not_ours_is_refused(tmp_path, kind):
    """And not held: the user clears the place and starts again, in a notebook in the same process."""
    final = tmp_path / 'hf_model'
    if kind == 'file':
        final.write_text('mine')
    elif kind == 'link':
        final.symlink_to(tmp_path)
    else:
        final.mkdir()
        name = 'config.json' if kind == 'foreign_folder' else 'xhf_manifest.json'
        (final / name).write_text('{"format_version": 2, "files": {}, "step": 5}')
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(TargetError, match=r'did not write|is not a folder'):
        CheckpointFolder(final, 1).claim()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    final.rename(tmp_path / 'moved')
    CheckpointFolder(final, 1).claim()


# Other users


@pytest.fixture
def nobodys_folder():
    """Of a user who is not root, as which this process works in it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


@contextlib.contextmanager
def as_root():
    os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(NOBODY)


@pytest.mark.needs('root')
@pytest.mark.parametrize('takes_all', [False, True])
def test_an_evaluation_as_another_user_wrote_into_a_save(nobodys_folder, takes_all):
    """In a container it is root; its results stay, and saves and runs go on. What cannot be deleted is told once."""
    folder = CheckpointFolder(nobodys_folder / 'hf_model', 1, warn=(said := []).append)
    folder.claim()
    commit_one(folder, 1)
    with as_root():
        (folder.path / 'eval').mkdir()
        (folder.path / 'eval' / 'result.json').write_text('{}')
        if takes_all:
            os.chown(folder.path, 0, 0)
    for number in (2, 3, 4):
        commit_one(folder, number)
        folder.abort()
    folder.release()
    again = CheckpointFolder(nobodys_folder / 'hf_model', 1)
    again.claim()
    again.release()
    (result,) = nobodys_folder.glob('*/eval/result.json')
    assert content(folder.path) == 4 and str(result.parents[1]) in ' '.join(said) and len(said) == 1 + takes_all
    assert takes_all or result.parents[1].name == 'hf_model_others_iter_1'
    with as_root():
        shutil.rmtree(result.parents[1])
    assert (visible(nobodys_folder), hidden(nobodys_folder)) == ({'hf_model': 4}, set())
