"""What killed runs leave behind, and what is refused to be replaced."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.helpers.ranks import HANG_SECS, start_process
from tests.helpers.tiny_checkpoint import commit_one, put_partial, put_whole, visible
from xhf_hooks.errors import TargetError
from xhf_hooks.integrity.manifest import read_commit
from xhf_hooks.places.checkpoint_folder import CheckpointFolder, sweep_dead_runs

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


def hidden(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir() if path.name.startswith('.')} - {'.hf_model.lock'}


# Leftovers


def test_partial_staging_is_deleted(tmp_path):
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=1)
    commit_one(folder, 1)
    put_partial(folder, '.hf_model.staging')
    folder.recover()
    assert (visible(tmp_path), hidden(tmp_path)) == ({'hf_model': 1}, set())


def test_partial_staging_of_a_first_save_is_deleted(tmp_path):
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=1)
    put_partial(folder, '.hf_model.staging')
    folder.recover()
    assert (visible(tmp_path), hidden(tmp_path)) == ({}, set())


def test_whole_staging_of_a_first_save_gets_its_name(tmp_path):
    """Killed between the manifest and the rename."""
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=1)
    put_whole(folder, '.hf_model.staging', 4)
    folder.recover()
    assert (visible(tmp_path), hidden(tmp_path)) == ({'hf_model': 4}, set())


def test_set_aside_folder_comes_back(tmp_path):
    """Without exchange: killed after the old one was put aside, before the new one had the name."""
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=1)
    put_whole(folder, '.hf_model.previous', 4)
    put_partial(folder, '.hf_model.staging')
    folder.recover()
    assert (visible(tmp_path), hidden(tmp_path)) == ({'hf_model': 4}, set())


def test_both_whole_and_the_name_free(tmp_path):
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=1)
    put_whole(folder, '.hf_model.previous', 4)
    put_whole(folder, '.hf_model.staging', 5)
    folder.recover()
    found = visible(tmp_path)
    assert list(found) == ['hf_model'] and found['hf_model'] in (4, 5)
    assert hidden(tmp_path) == set()


@pytest.mark.parametrize('leftover', ['.hf_model.staging', '.hf_model.previous'])
@pytest.mark.parametrize(
    ('max_keep', 'expected'),
    [(1, {'hf_model': 5}), (3, {'hf_model': 5, 'hf_model_iter_4': 4}), (-1, {'hf_model': 5, 'hf_model_iter_4': 4})],
)
def test_displaced_folder_becomes_an_archive_or_goes(tmp_path, leftover, max_keep, expected):
    """Killed after the new one had the name, before the old one was archived or deleted."""
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep)
    put_whole(folder, 'hf_model', 5)
    put_whole(folder, leftover, 4)
    folder.recover()
    assert (visible(tmp_path), hidden(tmp_path)) == (expected, set())


def test_archives_beyond_max_keep_go(tmp_path):
    """Killed between the commit and the deletion of what it made outdated."""
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=-1)
    for number in (1, 2, 3, 4):
        commit_one(folder, number)
    CheckpointFolder(tmp_path / 'hf_model', max_keep=2).recover()
    assert visible(tmp_path) == {'hf_model': 4, 'hf_model_iter_3': 3}


def test_of_two_whole_folders_the_later_commit_gets_the_name(tmp_path):
    """Killed after the manifest of iteration 3, with which a run that went back follows iteration 5."""
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=1)
    commit_one(folder, 5)
    commit_one(folder, 3)
    os.rename(folder.final, tmp_path / '.hf_model.staging-0123456789ab')
    other = CheckpointFolder(tmp_path / 'elsewhere' / 'hf_model', max_keep=1)
    commit_one(other, 5)
    os.rename(other.final, folder.final)
    CheckpointFolder(tmp_path / 'hf_model', max_keep=1).recover()
    (tmp_path / 'elsewhere').rmdir()
    assert (visible(tmp_path), hidden(tmp_path)) == ({'hf_model': 3}, set())


def test_all_leftovers_of_several_deaths_go(tmp_path):
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=1)
    commit_one(folder, 1)
    for name in ('staging-00aa', 'staging-00bb', 'previous-00cc', 'discarded-00dd', 'staging'):
        put_partial(folder, f'.hf_model.{name}')
    for name in ('shared-00ee', 'probe-00ff'):
        (tmp_path / f'.hf_model.{name}').write_text('')
    (tmp_path / '.hf_model.mine').write_text('')
    folder.claim()
    folder.release()
    assert (visible(tmp_path), hidden(tmp_path)) == ({'hf_model': 1}, {'.hf_model.mine'})


def test_others_files_survive_a_death_between_moving_and_deleting(tmp_path):
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=1)
    commit_one(folder, 1)
    (folder.final / 'eval.json').write_text('result')
    os.rename(folder.final, tmp_path / '.hf_model.previous-00aa')
    commit_one(CheckpointFolder(tmp_path / 'hf_model', max_keep=1), 2)
    CheckpointFolder(tmp_path / 'hf_model', max_keep=1).recover()
    assert (tmp_path / 'hf_model_others_iter_1' / 'eval.json').read_text() == 'result'
    shutil.rmtree(tmp_path / 'hf_model_others_iter_1')
    assert (visible(tmp_path), hidden(tmp_path)) == ({'hf_model': 2}, set())


def test_claim_recovers(tmp_path):
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep=1)
    put_whole(folder, '.hf_model.previous', 4)
    folder.claim()
    assert visible(tmp_path) == {'hf_model': 4}


def commit_and_die_while_deleting(final: Path, max_keep: int, unlinks: int) -> None:
    """Runs in a process of its own: SIGKILL once the last commit has deleted ``unlinks`` files."""
    folder = CheckpointFolder(final, max_keep)
    for number in range(1, max_keep + 1):
        commit_one(folder, number)
    unlink, done = os.unlink, []

    def unlink_or_die(*args, **kwargs):
        if len(done) == unlinks:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(args)
        unlink(*args, **kwargs)

    os.unlink = unlink_or_die
    commit_one(folder, max_keep + 1)


@pytest.mark.parametrize('unlinks', [0, 1, 2, 3, 4])
@pytest.mark.parametrize('max_keep', [1, 2])
def test_killed_while_deleting_the_old_one(tmp_path, max_keep, unlinks):
    """Whatever has a visible name is whole, at once and after the next run's sweep."""
    work_dir = tmp_path / 'run' / '20240101'
    work_dir.mkdir(parents=True)
    process = start_process(commit_and_die_while_deleting, work_dir / 'hf_model', max_keep, unlinks)
    process.join(HANG_SECS)
    assert process.exitcode == -signal.SIGKILL
    newest = max_keep + 1
    assert visible(work_dir)['hf_model'] == newest
    sweep_dead_runs(tmp_path / 'run', 'hf_model')
    found = visible(work_dir)
    assert found['hf_model'] == newest and len(found) <= max_keep + 1
    assert hidden(work_dir) == set()


# What is not ours is not replaced


def test_foreign_folder_is_refused(tmp_path):
    final = tmp_path / 'hf_model'
    final.mkdir()
    (final / 'config.json').write_text('{}')
    with pytest.raises(TargetError, match='did not write'):
        CheckpointFolder(final, 1).claim()
    assert (final / 'config.json').read_text() == '{}'


def test_file_is_refused(tmp_path):
    (tmp_path / 'hf_model').write_text('mine')
    with pytest.raises(TargetError, match='is not a folder'):
        CheckpointFolder(tmp_path / 'hf_model', 1).claim()
    assert (tmp_path / 'hf_model').read_text() == 'mine'


@pytest.mark.parametrize('target_exists', [True, False])
def test_symlink_is_refused(tmp_path, target_exists):
    if target_exists:
        (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'hf_model').symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(TargetError, match='is not a folder'):
        CheckpointFolder(tmp_path / 'hf_model', 1).claim()


@pytest.mark.parametrize('text', ['', '{', '[]', '{"step": 5}', '{"step": {"unit": "iter", "number": 5}}'])
def test_a_broken_manifest_makes_no_folder_of_ours(tmp_path, text):
    final = tmp_path / 'hf_model'
    final.mkdir()
    (final / 'xhf_manifest.json').write_text(text)
    assert read_commit(final) is None
    with pytest.raises(TargetError):
        CheckpointFolder(final, 1).claim()


def test_parent_that_is_a_file(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(TargetError, match=r'cannot be written.*set out_dir'):
        CheckpointFolder(tmp_path / 'file' / 'hf_model', 1).claim()


def test_a_refused_folder_is_not_held(tmp_path):
    """The user clears the place and starts again, in a notebook in the same process."""
    final = tmp_path / 'hf_model'
    final.write_text('mine')
    refused = CheckpointFolder(final, 1)
    with pytest.raises(TargetError):
        refused.claim()
    final.unlink()
    assert CheckpointFolder(final, 1)._lock.acquire()
