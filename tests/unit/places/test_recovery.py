"""What killed runs leave behind, what is refused to be replaced, and what another user left."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.runs.small_saves import LOCK, hidden
from tests.helpers.runs.tiny_checkpoint import commit_one, content, put_partial, put_whole, visible
from xhf_hooks.errors import TargetError
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.file_system import new_name

NOBODY = 65_534
ITER_4 = {'hf_model_iter_4': 4}
#: Of a killed run: complete folders with numbers, partial ones, how many saves are kept; what the next run makes of it
#: before it has saved anything.
LEFT = {
    'a partial first save': ({}, ['staging'], 1, {}),
    'a partial save': ({'hf_model': 1}, ['staging'], 1, {'hf_model': 1}),
    'killed between the manifest and the rename': ({'staging': 4}, [], 1, {'hf_model': 4}),
    'killed between two renames, without exchange': ({'previous': 4}, ['staging'], 1, {'hf_model': 4}),
    'killed before the old one was deleted': ({'hf_model': 5, 'staging': 4}, [], 1, {'hf_model': 5, **ITER_4}),
    'or was given its name': ({'hf_model': 5, 'previous': 4}, [], 3, {'hf_model': 5, **ITER_4}),
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
    folder.lock_and_recover()
    assert (visible(tmp_path), hidden(tmp_path)) == (expected, mine | LOCK)
    commit_one(folder, 6)
    folder.unlock()
    assert len(visible(tmp_path)) <= max_keep and hidden(tmp_path) == mine


def test_of_two_whole_folders_the_later_commit_gets_the_name(tmp_path, folder):
    """Killed after the manifest of iteration 3, with which a run that went back follows iteration 5."""
    commit_one(folder, 5)
    commit_one(folder, 3)
    other = put_whole(folder, 'other', 5)
    os.rename(folder.path, new_name(folder.path, 'staging'))
    os.rename(other, folder.path)
    folder.recover()
    assert (visible(tmp_path), hidden(tmp_path)) == ({'hf_model': 3, 'hf_model_iter_5': 5}, LOCK)


def test_others_files_survive_a_death_between_moving_and_deleting(tmp_path, folder):
    commit_one(folder, 1)
    (folder.path / 'eval.json').write_text('result')
    os.rename(folder.path, new_name(folder.path, 'discarded'))
    put_whole(folder, 'hf_model', 2)
    folder.recover()
    assert (tmp_path / 'hf_model_others_iter_1' / 'eval.json').read_text() == 'result'
    shutil.rmtree(tmp_path / 'hf_model_others_iter_1')
    assert (visible(tmp_path), hidden(tmp_path)) == ({'hf_model': 2}, LOCK)


@pytest.mark.parametrize('kind', ['foreign_folder', 'broken_manifest', 'link', 'file'])
def test_what_is_not_ours_is_refused(tmp_path, claim, kind):
    """And not held: the user clears the place and starts again, in a notebook in the same process."""
    own = tmp_path / 'hf_model'
    if kind == 'file':
        own.write_text('mine')
    elif kind == 'link':
        own.symlink_to(tmp_path)
    else:
        own.mkdir()
        name = 'config.json' if kind == 'foreign_folder' else 'xhf_manifest.json'
        (own / name).write_text('{"format_version": 2, "files": {}, "step": 5}')
    with pytest.raises(TargetError, match=r'did not write|is not a folder'):
        claim()
    assert [*tmp_path.iterdir()] == [own]
    own.rename(tmp_path / 'moved')
    claim()


@contextlib.contextmanager
def user(number: int) -> Iterator[None]:
    before = os.geteuid()
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.needs('root')
@pytest.mark.parametrize('takes_all', [False, True])
def test_an_evaluation_as_another_user_wrote_into_a_save(said, tmp_path, takes_all):
    """In a container it is root; its results stay, and saves and runs go on. What cannot be deleted is told once."""
    # What a first save imports is imported here: the other user may be unable to read the environment, as on CI.
    commit_one(CheckpointFolder(tmp_path / 'hf_model', 1), 1)
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        os.chown(parent, NOBODY, NOBODY)
        folder = CheckpointFolder(parent / 'hf_model', 1, warn=said.append)
        with user(NOBODY):
            folder.lock_and_recover()
            commit_one(folder, 1)
        (folder.path / 'eval').mkdir()
        (folder.path / 'eval' / 'result.json').write_text('{}')
        if takes_all:
            os.chown(folder.path, 0, 0)
        with user(NOBODY):
            for number in (2, 3, 4):
                commit_one(folder, number)
                folder.abort()
            folder.unlock()
            again = CheckpointFolder(folder.path, 1)
            again.lock_and_recover()
            again.unlock()
        (result,) = parent.glob('*/eval/result.json')
        assert content(folder.path) == 4 and str(result.parents[1]) in ' '.join(said) and len(said) == 1
        assert takes_all or result.parents[1].name == 'hf_model_others_iter_1'
        shutil.rmtree(result.parents[1])
        assert (visible(parent), hidden(parent)) == ({'hf_model': 4}, set())
