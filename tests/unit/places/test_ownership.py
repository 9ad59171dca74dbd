"""Whose folder is it? What is not ours stays, what is ours goes only after a commit, and no cleaning up ends a save."""

import errno
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from tests.helpers.checks.compare import bytes_in
from tests.helpers.runs.small_saves import LOCK, commit_with, failing, hidden
from tests.helpers.runs.tiny_checkpoint import commit_one, content, put_partial, put_whole, visible
from xhf_hooks.errors import TargetError
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.places import checkpoint_folder, replacement
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.file_system import new_name
from xhf_hooks.runs.access import sweep_dead_runs


def own_folder(path: Path) -> None:
    path.mkdir()
    (path / 'thesis.tex').write_text('mine')


def own_file(path: Path) -> None:
    path.write_text('mine')


def own_link(path: Path) -> None:
    """To a save of ours that was put elsewhere."""
    elsewhere = CheckpointFolder(path.parent / 'elsewhere' / 'hf_model', 1)
    commit_one(elsewhere, 1)
    path.symlink_to(elsewhere.path)


def own_name_for_another_save(path: Path) -> None:
    elsewhere = CheckpointFolder(path.parent / 'elsewhere' / 'hf_model', 1)
    commit_one(elsewhere, 9)
    os.rename(elsewhere.path, path)


def of_a_newer_version(path: Path) -> None:
    own_folder(path)
    (path / MANIFEST_NAME).write_text('{"format_version": 99}')


def tree(path: Path) -> dict[str, bytes]:
    return {'': path.read_bytes()} if path.is_file() else bytes_in(path)


# Older saves


@pytest.mark.parametrize(
    'make',
    [own_folder, own_file, own_link, own_name_for_another_save, of_a_newer_version],
    ids=lambda make: make.__name__,
)
def test_what_has_the_name_of_an_older_save_stays_and_that_save_gets_another_name(
    tmp_path, both_ways, claim, said, make
):
    own = tmp_path / 'hf_model_iter_1'
    make(own)
    before = tree(own)
    folder = claim(3)
    for number in (1, 2):
        commit_one(folder, number)
    assert content(tmp_path / 'hf_model_iter_1_2') == 1
    (warning,) = said
    assert str(own) in warning and str(tmp_path / 'hf_model_iter_1_2') in warning
    folder.unlock()
    folder = claim(3)  # and is known as ours by another run
    for number in (3, 4):
        commit_one(folder, number)
    assert tree(own) == before and not (tmp_path / 'hf_model_iter_1_2').exists()
    assert [content(tmp_path / f'hf_model_iter_{number}') for number in (2, 3)] == [2, 3]


@pytest.mark.parametrize(
    ('is_restored', 'max_keep', 'expected'),
    [(False, 1, {'hf_model': 4}), (True, 2, {'hf_model': 4, 'hf_model_iter_2': 2})],
    ids=['the newest was removed', 'an older one was put in its place'],
)
def test_going_back_to_an_older_save(tmp_path, both_ways, claim, is_restored, max_keep, expected):
    """The newest save had diverged. What commits from now on is newer; before that, nothing is deleted."""
    folder = claim(3)
    for number in (1, 2, 3):
        commit_one(folder, number)
    folder.unlock()
    shutil.rmtree(tmp_path / 'hf_model')
    if is_restored:
        os.rename(tmp_path / 'hf_model_iter_2', tmp_path / 'hf_model')
    before = visible(tmp_path)
    folder = claim(max_keep)
    folder.open_staging()
    folder.abort()
    assert visible(tmp_path) == before
    commit_one(folder, 4)
    assert visible(tmp_path) == expected


def test_a_folder_behind_a_link_in_a_save_is_not_emptied(tmp_path, folder):
    """The link has the name of a folder that the save had."""
    commit_with(folder, 1, 'adapter/thesis.tex', 'mine')
    os.rename(folder.path / 'adapter', tmp_path / 'mine')
    (folder.path / 'adapter').symlink_to(tmp_path / 'mine')
    commit_one(folder, 2)
    assert (tmp_path / 'mine' / 'thesis.tex').read_text() == 'mine'


# Leftovers


@pytest.mark.parametrize('kind', ['staging', 'previous', 'kept', 'discarded'])
def test_a_leftover_whose_manifest_is_not_understood_stays(tmp_path, claim, said, kind):
    """A newer version of this package has left it."""
    left = new_name(tmp_path / 'hf_model', kind)
    of_a_newer_version(left)
    commit_one(claim(), 1)
    assert (left / 'thesis.tex').read_text() == 'mine' and content(tmp_path / 'hf_model') == 1
    (warning,) = said
    assert str(left) in warning and 'upgrade xhf_hooks' in warning


@pytest.mark.parametrize('call', ['read_bytes', 'rename', 'iterdir'])
def test_a_leftover_that_cannot_be_recovered_now_stays_and_the_run_starts(tmp_path, monkeypatch, said, call):
    """A manifest that cannot be read is not a missing one."""
    folder = CheckpointFolder(tmp_path / 'hf_model', 1, warn=said.append)
    left = put_whole(folder, new_name(folder.path, 'previous').name, 1)
    where = os if call == 'rename' else Path
    stale = failing(errno.ESTALE, when=lambda path, *to: left in (path, path.parent), instead_of=getattr(where, call))
    with monkeypatch.context() as patch:
        if call == 'iterdir':
            patch.setattr(folder.siblings, 'older', dict)
            patch.setattr(folder.siblings, 'guard', lambda bases: None)
            patch.setattr(folder, '_refuse_bases', lambda bases: None)
            stale = failing(errno.ESTALE, instead_of=Path.iterdir)
        patch.setattr(where, call, stale)
        folder.lock_and_recover()
    assert content(left) == 1 and 'Stale file handle' in said[0]
    commit_one(folder, 2)
    assert visible(tmp_path) == {'hf_model': 2} and hidden(tmp_path) == LOCK


# Cleaning up is a warning


def test_saves_and_runs_go_on_when_nothing_can_be_deleted(tmp_path, monkeypatch, claim, said):
    """An evaluation as another user wrote into the saves: each is told once, and removed when that is possible."""

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, 'Permission denied', str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, 'rmtree', refuse)
        for first in (1, 4):
            said.clear()
            folder = claim()
            for number in range(first, first + 3):
                commit_one(folder, number)
                folder.abort()
            folder.unlock()
            assert visible(tmp_path) == {'hf_model': first + 2}
            assert len(said) == len(set(said)) > 0 and all('Permission denied' in each for each in said)
    claim().unlock()
    assert hidden(tmp_path) == set()


def test_a_name_that_cannot_be_flushed_is_told_and_the_older_save_stays(tmp_path, monkeypatch, folder, said):
    commit_one(folder, 1)
    refuse = failing(errno.EIO, when=lambda path: path == tmp_path, instead_of=checkpoint_folder.fsync)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, 'fsync', refuse)
        commit_one(folder, 2)
    (left,) = hidden(tmp_path) - LOCK
    assert (content(folder.path), content(tmp_path / left)) == (2, 1) and 'new save is complete' in said[0]
    commit_one(folder, 3)
    assert visible(tmp_path) == {'hf_model': 3} and hidden(tmp_path) == LOCK


# Renames that fail


@pytest.mark.parametrize('kinds', [('staging',), ('staging', 'previous')], ids=' and '.join)
def test_a_save_that_cannot_get_its_name_gives_it_back_to_the_previous_one(tmp_path, monkeypatch, folder, kinds):
    """Without exchange. If that fails, too, the error says where the previous save is; the next save restores it."""
    commit_one(folder, 1)

    def has_kind(old: Path, new: Path) -> bool:
        return any(f'.{kind}-' in old.name for kind in kinds)

    with monkeypatch.context() as patch:
        patch.setattr(replacement, 'exchange', lambda one, other: False)
        patch.setattr(os, 'rename', failing(errno.EIO, when=has_kind, instead_of=os.rename))
        with pytest.raises((OSError, TargetError), match='Input/output error') as caught:
            commit_one(folder, 2)
        folder.abort()
    for left in hidden(tmp_path) - LOCK:
        assert str(tmp_path / left) in str(caught.value) and content(tmp_path / left) == 1
    assert ('is missing' in str(caught.value)) == ('hf_model' not in visible(tmp_path)) == ('previous' in kinds)
    folder.open_staging()
    folder.abort()
    assert visible(tmp_path) == {'hf_model': 1} and hidden(tmp_path) == LOCK


def test_an_exchange_that_fails_but_has_happened_loses_no_save(tmp_path, monkeypatch, folder):
    """As on a file system whose server did it, and whose answer was lost."""
    commit_one(folder, 1)
    exchange = replacement.exchange

    def exchange_and_fail(one: Path, other: Path) -> None:
        exchange(one, other)
        raise OSError(errno.EIO, 'Input/output error')

    with monkeypatch.context() as patch:
        patch.setattr(replacement, 'exchange', exchange_and_fail)
        with pytest.raises(OSError, match='Input/output error'):
            commit_one(folder, 2)
        folder.abort()
    (left,) = hidden(tmp_path) - LOCK
    assert (content(folder.path), content(tmp_path / left)) == (2, 1)


def test_what_somebody_puts_there_at_the_last_moment_is_not_deleted(tmp_path, monkeypatch, claim, said):
    (tmp_path / 'hf_model').mkdir()
    folder = claim()
    exchange = replacement.exchange

    def write_and_exchange(one: Path, other: Path) -> bool:
        (other / 'thesis.tex').write_text('mine')
        return exchange(one, other)

    monkeypatch.setattr(replacement, 'exchange', write_and_exchange)
    commit_one(folder, 1)
    assert content(folder.path) == 1 and (tmp_path / 'hf_model_others' / 'thesis.tex').read_text() == 'mine'
    assert 'thesis.tex' in said[0]


# The base


def make_saves(parent: Path) -> CheckpointFolder:
    folder = CheckpointFolder(parent / 'hf_model', 3)
    folder.lock_and_recover()
    for number in (1, 2, 3):
        commit_one(folder, number)
    folder.unlock()
    return folder


#: How the base is named, below a folder that has the saves.
BASES = {
    'newest': 'out/hf_model',
    'newest through a link': 'link/hf_model',
    'older': 'out/hf_model_iter_1',
    'older through a link': 'base',
    'part of the newest': 'out/hf_model/llm',
    'files that are links': 'linked',
    'leftover': 'out/.hf_model.previous-0123456789ab',
}


@pytest.mark.parametrize('name', BASES)
def test_a_run_that_would_delete_its_base_is_refused(tmp_path, monkeypatch, name):
    folder = make_saves(tmp_path / 'out')
    (tmp_path / 'link').symlink_to('out')
    (tmp_path / 'base').symlink_to('out/hf_model_iter_1')
    (folder.path / 'llm').mkdir()
    (tmp_path / 'linked').mkdir()
    shard = 'model-00001-of-00003.safetensors'
    (tmp_path / 'linked' / shard).symlink_to(f'../out/hf_model_iter_2/{shard}')
    if name == 'leftover':
        put_whole(folder, Path(BASES[name]).name, 0)
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    for base, max_keep in ((Path(BASES[name]), 1), (tmp_path / BASES[name], 1), (tmp_path / BASES[name], -1)):
        with pytest.raises(
            TargetError,
            match=r'is \(or contains\) the base model that this run starts from; a save to .* set out_dir to another',
        ):
            CheckpointFolder(folder.path, max_keep).lock_and_recover([base])
    assert tree(tmp_path) == before
    CheckpointFolder(folder.path, 3).lock_and_recover([tmp_path / 'elsewhere', 'organization/name', tmp_path])


def test_a_base_that_is_moved_among_the_saves_stays(tmp_path, claim, said):
    """Its name is a link, so it is still known."""
    base = make_saves(tmp_path / 'earlier').path
    (tmp_path / 'base').symlink_to(base)
    folder = claim(bases=[tmp_path / 'base'])
    commit_one(folder, 4)
    moved = tmp_path / 'hf_model_iter_3'
    os.rename(base, moved)
    (tmp_path / 'base').unlink()
    (tmp_path / 'base').symlink_to(moved)
    for number in (5, 6, 7):
        commit_one(folder, number)
    assert content(moved) == 3 and len(said) == 1 and 'base model' in said[0]
    shutil.rmtree(folder.path)
    os.rename(moved, folder.path)
    (tmp_path / 'base').unlink()
    (tmp_path / 'base').symlink_to(folder.path)
    with pytest.raises(TargetError, match='base model'):
        commit_one(folder, 8)
    assert content(folder.path) == 3


def test_a_base_under_another_timestamp_is_not_replaced_by_what_a_killed_run_left_there(tmp_path):
    base = CheckpointFolder(tmp_path / 'earlier' / 'hf_model', 1)
    commit_one(base, 1)
    left = CheckpointFolder(tmp_path / 'other' / 'hf_model', 1)
    for number in (1, 2):
        commit_one(left, number)
    os.rename(left.path, new_name(base.path, 'staging'))
    put_partial(base, new_name(base.path, 'staging').name)
    sweep_dead_runs(mock.Mock(), tmp_path, 'hf_model', [base.path])
    assert visible(base.path.parent) == {'hf_model': 1, 'hf_model_iter_2': 2} and hidden(base.path.parent) == set()


def test_saves_that_the_user_named_like_older_ones_stay(tmp_path, claim):
    """As ``save_hf(model, 'hf_model_iter_2')`` makes them; then ``save_hf(model, 'hf_model')`` keeps one save."""
    for number in (2, 4):
        own = CheckpointFolder(tmp_path / f'hf_model_iter_{number}', 1)
        own.lock_and_recover()
        commit_one(own, number)
        own.unlock()
    folder = claim(max_keep=1)
    for number in (6, 7):
        commit_one(folder, number)
    assert visible(tmp_path) == {'hf_model': 7, 'hf_model_iter_2': 2, 'hf_model_iter_4': 4}
