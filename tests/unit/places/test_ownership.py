"""Whose folder is it? What is not ours stays, what is ours goes only after a commit, and no cleaning up ends a save."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers.runs.tiny_checkpoint import commit_one, content, put_partial, put_whole, visible
from tests.unit.places.test_commit import both_ways, claimed, hidden  # noqa: F401
from xhf_hooks.errors import TargetError
from xhf_hooks.integrity.manifest import MANIFEST_NAME
from xhf_hooks.places import checkpoint_folder
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.claim import sweep_dead_runs
from xhf_hooks.places.file_system import new_name


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


OWN = [own_folder, own_file, own_link, own_name_for_another_save, of_a_newer_version]


def tree(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [each for each in path.rglob('*') if each.is_file()]
    return {str(each): each.read_bytes() for each in files}


# Older saves


@pytest.mark.parametrize('make', OWN)
def test_what_has_the_name_of_an_older_save_stays_and_that_save_gets_another_name(tmp_path, both_ways, make):  # noqa: F811
    own = tmp_path / 'hf_model_iter_1'
    make(own)
    before = tree(own)
    folder = claimed(tmp_path / 'hf_model', 3, said := [])
    for number in (1, 2):
        commit_one(folder, number)
    assert content(tmp_path / 'hf_model_iter_1_2') == 1
    (warning,) = said
    assert str(own) in warning and str(tmp_path / 'hf_model_iter_1_2') in warning
    folder.release()
    folder = claimed(tmp_path / 'hf_model', 3)  # and is known as ours by another run
    for number in (3, 4):
        commit_one(folder, number)
    assert tree(own) == before and not (tmp_path / 'hf_model_iter_1_2').exists()
    assert [content(tmp_path / f'hf_model_iter_{number}') for number in (2, 3)] == [2, 3]


def test_a_smaller_max_keep_ckpts_deletes_nothing_before_the_first_save(tmp_path):
    """The newest save had diverged, and was removed."""
    folder = claimed(tmp_path / 'hf_model', 3)
    for number in (1, 2, 3):
        commit_one(folder, number)
    folder.release()
    shutil.rmtree(tmp_path / 'hf_model')
    folder = claimed(tmp_path / 'hf_model', 1)
    folder.open_staging()
    folder.abort()
    assert visible(tmp_path) == {'hf_model_iter_1': 1, 'hf_model_iter_2': 2}
    commit_one(folder, 4)
    assert visible(tmp_path) == {'hf_model': 4}


def test_saves_after_going_back_to_an_older_one_are_newer_than_those_of_the_diverged_run(tmp_path, both_ways):  # noqa: F811
    folder = claimed(tmp_path / 'hf_model', 3)
    for number in (10, 20, 30, 40):
        commit_one(folder, number)
    folder.release()
    shutil.rmtree(tmp_path / 'hf_model')
    os.rename(tmp_path / 'hf_model_iter_20', tmp_path / 'hf_model')
    folder = claimed(tmp_path / 'hf_model', 2)
    for number in (21, 22):
        commit_one(folder, number)
    assert visible(tmp_path) == {'hf_model': 22, 'hf_model_iter_21': 21}


def test_a_file_of_the_save_that_somebody_edited_is_set_apart(tmp_path):
    folder = claimed(tmp_path / 'hf_model', 1, said := [])
    plan_files = {'config.json': '{"a": 1}'}
    commit_one(folder, 1)
    for name, text in plan_files.items():  # as if saved with it
        manifest = json.loads((folder.path / MANIFEST_NAME).read_text())
        manifest['files'][name] = {'nbytes': len(text), 'crc32': '00000000'}
        (folder.path / MANIFEST_NAME).write_text(json.dumps(manifest))
        (folder.path / name).write_text('{"a": 2}')
    commit_one(folder, 2)
    assert (tmp_path / 'hf_model_others_iter_1' / 'config.json').read_text() == '{"a": 2}'
    assert [path.name for path in (tmp_path / 'hf_model_others_iter_1').iterdir()] == ['config.json'] and len(said) == 1


def test_a_folder_behind_a_link_in_a_save_is_not_emptied(tmp_path):
    """The link has the name of a folder that the save had."""
    folder = claimed(tmp_path / 'hf_model', 1)
    commit_one(folder, 1)
    own_folder(tmp_path / 'mine')
    (folder.path / 'adapter').symlink_to(tmp_path / 'mine')
    manifest = json.loads((folder.path / MANIFEST_NAME).read_text())
    manifest['files']['adapter/thesis.tex'] = {'nbytes': 4, 'crc32': '00000000'}
    (folder.path / MANIFEST_NAME).write_text(json.dumps(manifest))
    commit_one(folder, 2)
    assert (tmp_path / 'mine' / 'thesis.tex').read_text() == 'mine'


# Leftovers


@pytest.mark.parametrize('kind', ['staging', 'previous', 'kept', 'discarded'])
def test_a_leftover_whose_manifest_is_not_understood_stays(tmp_path, kind):
    """A newer version of this package has left it."""
    left = new_name(tmp_path / 'hf_model', kind)
    of_a_newer_version(left)
    folder = claimed(tmp_path / 'hf_model', 1, said := [])
    commit_one(folder, 1)
    assert (left / 'thesis.tex').read_text() == 'mine' and content(folder.path) == 1
    (warning,) = said
    assert str(left) in warning and 'upgrade xhf_hooks' in warning


def test_a_manifest_that_cannot_be_read_is_not_a_missing_one(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path / 'hf_model', 1, warn=(said := []).append)
    left = put_whole(folder, new_name(folder.path, 'previous').name, 1)
    read, stale = Path.read_bytes, OSError(errno.ESTALE, 'Stale file handle')

    def read_or_fail(path: Path) -> bytes:
        if path.parent == left:
            raise stale
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, 'read_bytes', read_or_fail)
        folder.claim()
    assert content(left) == 1 and 'Stale file handle' in said[0]
    commit_one(folder, 2)
    assert visible(tmp_path) == {'hf_model': 2} and hidden(tmp_path) == {'.hf_model.lock'}


def test_what_a_command_added_to_a_kept_save_survives_the_death_of_the_run(tmp_path):
    folder = claimed(tmp_path / 'hf_model', 1)
    commit_one(folder, 1)
    kept = folder.keep()
    own_folder(kept.path / 'results')
    kept.release()  # moving it had failed
    folder.release()
    claimed(tmp_path / 'hf_model', 1)
    assert (tmp_path / 'hf_model_others_iter_1' / 'results' / 'thesis.tex').read_text() == 'mine'
    assert hidden(tmp_path) == {'.hf_model.lock'}


# Cleaning up is a warning


def test_saves_and_runs_go_on_when_nothing_can_be_deleted(tmp_path, monkeypatch):
    """An evaluation as another user wrote into the saves: each is told once, and removed when that is possible."""

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, 'Permission denied', str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, 'rmtree', refuse)
        for first in (1, 4):
            folder = claimed(tmp_path / 'hf_model', 1, said := [])
            for number in range(first, first + 3):
                commit_one(folder, number)
                folder.abort()
            folder.release()
            assert visible(tmp_path) == {'hf_model': first + 2}
            assert len(said) == len(set(said)) > 0 and all('Permission denied' in each for each in said)
    claimed(tmp_path / 'hf_model', 1).release()
    assert hidden(tmp_path) == set()


@pytest.mark.parametrize('call', ['iterdir', 'rename'])
def test_recovery_that_fails_does_not_keep_a_run_from_starting(tmp_path, monkeypatch, call):
    folder = CheckpointFolder(tmp_path / 'hf_model', 1, warn=(said := []).append)
    left = put_whole(folder, new_name(folder.path, 'previous').name, 1)

    def refuse(*args: Any) -> None:
        raise OSError(errno.EIO, 'Input/output error')

    with monkeypatch.context() as patch:
        where = {'iterdir': Path, 'rename': os}[call]
        if call == 'iterdir':
            monkeypatch.setattr(folder.others, 'older', dict)
            monkeypatch.setattr(folder.others, 'guard', lambda bases: None)
            monkeypatch.setattr(folder, '_refuse_bases', lambda bases: None)
        patch.setattr(where, call, refuse)
        folder.claim()
    assert said and content(left) == 1
    commit_one(folder, 2)
    assert visible(tmp_path) == {'hf_model': 2} and hidden(tmp_path) == {'.hf_model.lock'}


def test_a_name_that_cannot_be_flushed_is_told_and_the_older_save_stays(tmp_path, monkeypatch):
    folder = claimed(tmp_path / 'hf_model', 1, said := [])
    commit_one(folder, 1)
    flush = checkpoint_folder.fsync

    def refuse(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, 'Input/output error')
        flush(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, 'fsync', refuse)
        commit_one(folder, 2)
    (left,) = hidden(tmp_path) - {'.hf_model.lock'}
    assert (content(folder.path), content(tmp_path / left)) == (2, 1) and 'new save is complete' in said[0]
    commit_one(folder, 3)
    assert visible(tmp_path) == {'hf_model': 3} and hidden(tmp_path) == {'.hf_model.lock'}


# Renames that fail


class Renames:
    """``os.rename`` on a file system without RENAME_EXCHANGE, where some fail."""

    def __init__(self, failing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self._rename, self._failing = os.rename, failing
        monkeypatch.setattr(checkpoint_folder, 'exchange', lambda one, other: False)
        monkeypatch.setattr(os, 'rename', self)

    def __call__(self, old: Path, new: Path) -> None:
        if any(f'.{kind}-' in Path(old).name for kind in self._failing):
            raise OSError(errno.EIO, 'Input/output error', str(old), None, str(new))
        self._rename(old, new)


def test_a_save_that_cannot_get_its_name_gives_it_back_to_the_previous_one(tmp_path, monkeypatch):
    folder = claimed(tmp_path / 'hf_model')
    commit_one(folder, 1)
    with monkeypatch.context() as patch:
        Renames(('staging',), patch)
        with pytest.raises(OSError, match='Input/output error') as caught:
            commit_one(folder, 2)
        folder.abort()
    assert 'missing' not in str(caught.value)
    assert visible(tmp_path) == {'hf_model': 1} and hidden(tmp_path) == {'.hf_model.lock'}


def test_if_that_fails_too_the_error_says_where_the_previous_save_is(tmp_path, monkeypatch):
    folder = claimed(tmp_path / 'hf_model')
    commit_one(folder, 1)
    with monkeypatch.context() as patch:
        Renames(('staging', 'previous'), patch)
        with pytest.raises(TargetError, match='is missing') as caught:
            commit_one(folder, 2)
        folder.abort()
    (left,) = hidden(tmp_path) - {'.hf_model.lock'}
    assert str(tmp_path / left) in str(caught.value) and content(tmp_path / left) == 1
    folder.open_staging()
    folder.abort()
    assert visible(tmp_path) == {'hf_model': 1} and hidden(tmp_path) == {'.hf_model.lock'}


def test_an_exchange_that_fails_but_has_happened_loses_no_save(tmp_path, monkeypatch):
    """As on a file system whose server did it, and whose answer was lost."""
    folder = claimed(tmp_path / 'hf_model')
    commit_one(folder, 1)
    exchange = checkpoint_folder.exchange

    def exchange_and_fail(one: Path, other: Path) -> None:
        exchange(one, other)
        raise OSError(errno.EIO, 'Input/output error')

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, 'exchange', exchange_and_fail)
        with pytest.raises(OSError, match='Input/output error'):
            commit_one(folder, 2)
        folder.abort()
    (left,) = hidden(tmp_path) - {'.hf_model.lock'}
    assert (content(folder.path), content(tmp_path / left)) == (2, 1)


def test_what_somebody_puts_there_at_the_last_moment_is_not_deleted(tmp_path, monkeypatch):
    (tmp_path / 'hf_model').mkdir()
    folder = claimed(tmp_path / 'hf_model', 1, said := [])
    exchange = checkpoint_folder.exchange

    def write_and_exchange(one: Path, other: Path) -> bool:
        (other / 'thesis.tex').write_text('mine')
        return exchange(one, other)

    monkeypatch.setattr(checkpoint_folder, 'exchange', write_and_exchange)
    commit_one(folder, 1)
    assert content(folder.path) == 1 and (tmp_path / 'hf_model_others' / 'thesis.tex').read_text() == 'mine'
    assert 'thesis.tex' in said[0]


# The base


def make_saves(parent: Path) -> CheckpointFolder:
    folder = CheckpointFolder(parent / 'hf_model', 3)
    folder.claim()
    for number in (1, 2, 3):
        commit_one(folder, number)
    folder.release()
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


@pytest.mark.parametrize('is_relative', [False, True])
@pytest.mark.parametrize('name', BASES)
def test_a_run_that_would_delete_its_base_is_refused(tmp_path, monkeypatch, name, is_relative):
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
    base = Path(BASES[name]) if is_relative else tmp_path / BASES[name]
    for max_keep in (1, -1):
        with pytest.raises(TargetError, match=r'is the base model that this run starts from.* set out_dir to another'):
            CheckpointFolder(folder.path, max_keep).claim([base])
    assert tree(tmp_path) == before
    CheckpointFolder(folder.path, 3).claim([tmp_path / 'elsewhere', 'organization/name', tmp_path])


def test_a_base_that_is_moved_among_the_saves_stays(tmp_path):
    """Its name is a link, so it is still known."""
    base = make_saves(tmp_path / 'earlier').path
    (tmp_path / 'base').symlink_to(base)
    folder = CheckpointFolder(tmp_path / 'out' / 'hf_model', 1, warn=(said := []).append)
    folder.claim([tmp_path / 'base'])
    commit_one(folder, 4)
    moved = tmp_path / 'out' / 'hf_model_iter_3'
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
