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
from xhf_hooks.places.checkpoint_folder import CheckpointFolder, sweep_dead_runs


def hidden(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir() if path.name.startswith('.')} - {'.hf_model.lock'}


# Leftovers

#: Of a killed run: complete folders with numbers, partial ones, how many saves are kept; what the next run makes of it.
LEFT = {
    'a partial first save': ({}, ['staging'], 1, {}),
    'a partial save': ({'hf_model': 1}, ['staging'], 1, {'hf_model': 1}),
    'killed between the manifest and the rename': ({'.hf_model.staging': 4}, [], 1, {'hf_model': 4}),
    'killed between two renames, without exchange': ({'.hf_model.previous': 4}, ['staging'], 1, {'hf_model': 4}),
    'killed before the old one was deleted': ({'hf_model': 5, '.hf_model.staging': 4}, [], 1, {'hf_model': 5}),
    'or was archived': (
        *({'hf_model': 5, '.hf_model.previous': 4}, [], 3, {'hf_model': 5, 'hf_model_iter_4': 4}),
    ),
    'several deaths': ({'hf_model': 1}, ['staging', 'staging-00bb', 'previous', 'discarded'], 1, {'hf_model': 1}),
}  # fmt: skip


@pytest.mark.parametrize('case', LEFT)
def test_what_a_killed_run_left_is_completed_or_deleted(tmp_path, case):
    whole, partial, max_keep, expected = LEFT[case]
    folder = CheckpointFolder(tmp_path / 'hf_model', max_keep)
    for name, number in whole.items():
        put_whole(folder, name, number)
    for kind in partial:
        put_partial(folder, f'.hf_model.{kind}')
    for name in ('shared-00ee', 'probe-00ff', 'mine'):
        (tmp_path / f'.hf_model.{name}').write_text('')
    folder.claim()
    folder.release()
    assert (visible(tmp_path), hidden(tmp_path)) == (expected, {'.hf_model.mine'})


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


@pytest.mark.parametrize('unlinks', [0, 2, 4])
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


def foreign_folder(final: Path) -> None:
    final.mkdir()
    (final / 'config.json').write_text('{}')


def broken_manifest(final: Path) -> None:
    final.mkdir()
    (final / 'xhf_manifest.json').write_text('{"format_version": 2, "files": {}, "step": 5}')


def symlink(final: Path) -> None:
    (final.parent / 'elsewhere').mkdir()
    final.symlink_to(final.parent / 'elsewhere')


@pytest.mark.parametrize(
    ('make', 'words'),
    [
        (foreign_folder, 'did not write'),
        (broken_manifest, 'did not write'),
        (symlink, 'is not a folder'),
        (lambda final: final.write_text('mine'), 'is not a folder'),
    ],
)
def test_what_is_not_ours_is_refused(tmp_path, make, words):
    """And not held: the user clears the place and starts again, in a notebook in the same process."""
    final = tmp_path / 'hf_model'
    make(final)
    before = sorted(tmp_path.rglob('*'))
    refused = CheckpointFolder(final, 1)
    with pytest.raises(TargetError, match=words):
        refused.claim()
    assert sorted(tmp_path.rglob('*')) == before
    final.rename(tmp_path / 'moved')
    CheckpointFolder(final, 1).claim()


def test_parent_that_is_a_file(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(TargetError, match=r'cannot be written.*set out_dir'):
        CheckpointFolder(tmp_path / 'file' / 'hf_model', 1).claim()
