"""From staging to the name of the newest save: what is there is always whole, what was there goes last.

A save that is being read stays, under one name, while the next ones come and go.
"""

import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.helpers.runs.small_saves import LOCK, commit_with, hidden
from tests.helpers.runs.tiny_checkpoint import commit_one, content, stage, visible
from xhf_hooks.errors import IncompleteError, TargetError
from xhf_hooks.files import manifest
from xhf_hooks.files.check import check_folder
from xhf_hooks.files.manifest import read_manifest
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.places import checkpoint_folder, pinned_save, sibling_folders
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.file_system import files_in
from xhf_hooks.places.sibling_folders import SiblingFolders


def test_a_reader_never_finds_the_name_missing(folder, monkeypatch):
    """It looks after each call that renames something."""
    commit_one(folder, 1)
    rename, found = os.rename, []

    def rename_and_look(old: Path, new: Path) -> None:
        rename(old, new)
        found.append(content(folder.path))

    monkeypatch.setattr(os, 'rename', rename_and_look)
    commit_one(folder, 2)
    assert found == [2]  # when the old one is deleted


def save_all(folder: CheckpointFolder, numbers: Iterable[int]) -> None:
    """A run's saves, and its end."""
    for number in numbers:
        commit_one(folder, number)
    folder.unlock()


@pytest.mark.parametrize(
    ('max_keep', 'runs', 'older'),
    [
        (1, [(1, 2)], []),
        (3, [(1, 2, 3, 4, 5)], [3, 4]),
        (-1, [(1, 2, 3)], [1, 2]),
        (3, [(1, 2, 2)], [1]),  # saved again after a resume: one save, not two
        (3, [(47, 48, 49, 50), (31, 32, 33)], [31, 32]),  # the run went back: its saves are the newer ones
    ],
)
def test_older_saves(max_keep, runs, older, tmp_path, both_ways, claim):
    (tmp_path / 'hf_model').mkdir()  # that it is there, and empty, is no reason to stop
    for numbers in runs:
        save_all(claim(max_keep), numbers)
    assert visible(tmp_path) == {'hf_model': runs[-1][-1], **{f'hf_model_iter_{n}': n for n in older}}
    assert hidden(tmp_path) == set()


@pytest.mark.parametrize(
    ('max_keep', 'runs', 'older'),
    [
        (1, [(1, 2, 3, 4, 5, 6, 7, 8)], [3, 6]),
        (2, [(1, 2, 3, 4, 5, 6, 7, 8)], [3, 6, 7]),
        (1, [(2, 4, 5, 7, 8, 11, 12)], [4, 7, 11]),  # no save at 3, 6 or 9: the first one after it stays
        (1, [(4, 5), (3, 6)], [3]),  # the run went back, and its first save of 3 to 5 is now another one
        (1, [(3, 4), (3, 4)], [3]),
        (-1, [(3, 4, 5)], [3, 4]),
    ],
)
def test_the_first_save_of_every_three_iterations_stays(max_keep, runs, older, tmp_path, both_ways, claim):
    for numbers in runs:
        save_all(claim(max_keep, keep_every=3, is_resumed=True), numbers)
    assert visible(tmp_path) == {'hf_model': runs[-1][-1], **{f'hf_model_iter_{n}': n for n in older}}
    assert hidden(tmp_path) == set()


#: Of two trainings in one folder: for each, its options and the iterations of its saves; the folders at the end.
TRAININGS = {
    'each keeps its own for good': (
        (dict(keep_every=10, is_resumed=False), (7, 14, 21, 28, 35)),
        (dict(keep_every=10, is_resumed=False), (8, 16, 24, 32, 40)),
        {'': 40, **{f'_iter_{n}': n for n in (14, 16, 21, 24, 32, 35)}},
    ),
    'the second keeps none for good': (
        (dict(keep_every=3, is_resumed=False), (1, 3, 4, 6)),
        (dict(max_keep=2, is_resumed=False), (1, 2, 3)),
        {'': 3, '_iter_2': 2, '_iter_3': 3, '_iter_6': 6},
    ),
    'at the same iterations': (
        (dict(max_keep=-1, is_resumed=False), (1, 2)),
        (dict(max_keep=-1, is_resumed=False), (1, 2)),
        {'': 2, '_iter_1': 1, '_iter_1_2': 1, '_iter_2': 2},
    ),
    'it goes on behind the last save': (
        (dict(keep_every=3), (4, 5)),
        (dict(keep_every=3), (5, 8, 9)),
        {'': 9, '_iter_4': 4, '_iter_8': 8},
    ),
    'it begins before the last save': (
        (dict(keep_every=3), (4, 5)),
        (dict(keep_every=3), (3, 6)),
        {'': 6, '_iter_3': 3, '_iter_4': 4},
    ),
}


@pytest.mark.parametrize('case', TRAININGS)
def test_two_trainings_save_into_one_folder(case, tmp_path, both_ways, claim):
    """The newest saves are counted over both. What a training keeps for good, no other one deletes."""
    *runs, expected = TRAININGS[case]
    for options, numbers in runs:
        save_all(claim(**options), numbers)
    assert visible(tmp_path) == {f'hf_model{suffix}': n for suffix, n in expected.items()}
    assert hidden(tmp_path) == set()


@pytest.mark.parametrize('max_keep', [1, 2])
def test_what_others_put_into_a_save_is_set_apart(tmp_path, both_ways, claim, said, max_keep):
    """An evaluation's result, a converted model, a link, an edited file: when their save goes, they stay."""
    folder = claim(max_keep)
    commit_with(folder, 1, 'config.json', '{"a": 1}')
    (folder.path / 'config.json').write_text('{"a": 2}')
    (folder.path / 'eval').mkdir()
    (folder.path / 'eval' / 'result.json').write_text('{"score": 1}')
    (folder.path / 'model.gguf').write_bytes(b'gguf')
    (folder.path / 'data').symlink_to(tmp_path)
    for number in range(2, max_keep + 2):
        commit_one(folder, number)
    apart = tmp_path / 'hf_model_others_iter_1'
    assert (apart / 'eval' / 'result.json').read_text() == '{"score": 1}'
    assert (apart / 'model.gguf').read_bytes() == b'gguf' and (apart / 'config.json').read_text() == '{"a": 2}'
    assert (apart / 'data').is_symlink() and tmp_path.is_dir()
    (warning,) = said
    assert 'config.json, data, eval/result.json and 1 more in the save of iter_1' in warning and str(apart) in warning
    shutil.rmtree(apart)
    assert visible(tmp_path)['hf_model'] == max_keep + 1
    assert hidden(tmp_path) == LOCK
    commit_one(folder, max_keep + 2)
    assert len(said) == 1


@pytest.mark.parametrize('damage', ['missing', 'truncated', 'header', 'a flipped bit'])
def test_damaged_staging_is_refused(folder, tmp_path, damage):
    """A disk or its controller may flip a bit after the checksum was taken and the file was flushed."""
    commit_one(folder, 1)
    save = stage(folder, 2)
    path = folder.staging / save.plan.files[1].name
    data = bytearray(path.read_bytes())
    data[20 if damage == 'header' else -1] ^= damage in ('header', 'a flipped bit')
    path.write_bytes(data[:-1] if damage == 'truncated' else data)
    if damage == 'missing':
        path.unlink()
    with pytest.raises(IncompleteError, match=path.name):
        folder.commit(save, 'full' if damage == 'a flipped bit' else 'sizes')
    folder.abort()
    assert visible(tmp_path) == {'hf_model': 1}
    assert hidden(tmp_path) == LOCK


def test_commit_does_not_replace_what_somebody_put_there_meanwhile(claim, tmp_path, said, both_ways):
    """``claim`` found the name free; hours later it holds files that are not ours. The saves get other names."""
    folder = claim(max_keep=2)
    folder.path.mkdir()
    (folder.path / 'notes.txt').write_text('mine')
    for number in (1, 2, 3):
        commit_one(folder, number)
    assert [*folder.path.iterdir()] == [folder.path / 'notes.txt']
    folder.path.rename(tmp_path / '.moved')
    assert visible(tmp_path) == {'hf_model_iter_2': 2, 'hf_model_iter_3': 3}
    assert said[2] == (
        f'{folder.path} holds files that this package did not write, so it was left alone. The new save is in '
        f'{folder.path}_iter_3. Move hf_model away; then the next save is named hf_model again'
    )
    commit_one(folder, 4)
    assert visible(tmp_path) == {'hf_model': 4, 'hf_model_iter_3': 3} and len(said) == 3


@pytest.mark.parametrize('max_keep', [1, -1])
def test_a_save_is_kept_though_the_manifest_of_the_newest_is_gone(claim, tmp_path, said, max_keep):
    folder = claim(max_keep)
    commit_one(folder, 1)
    (folder.path / 'xhf_manifest.json').unlink()
    for number in (2, 3):
        commit_one(folder, number)
    kept = folder.pin()
    assert content(kept.path) == 3
    kept.unpin()
    older = {'hf_model_iter_2': 2} if max_keep == -1 else {}
    assert visible(tmp_path) == {'hf_model': 1, **older, 'hf_model_iter_3': 3} and len(said) == 2


def test_a_disk_that_is_too_small_is_told_with_what_to_change(folder, tmp_path):
    folder.require_disk_space(1)
    with pytest.raises(TargetError, match=r'set out_dir to one on a larger disk$') as caught:
        folder.require_disk_space(10**18)
    assert str(tmp_path) in str(caught.value) and '1.00 EB are needed' in str(caught.value)
    with pytest.raises(TargetError, match=r'larger disk, or keep fewer saves$'):
        CheckpointFolder(folder.path, 3).require_disk_space(10**18)


@pytest.mark.parametrize('has_links', [True, False])
def test_it_stays_while_saves_come_and_go(folder, tmp_path, monkeypatch, has_links):
    """With hard links, and as on file systems without them. What others added is not kept."""
    monkeypatch.setattr(pinned_save, 'clone', lambda source, to: False)
    if not has_links:

        def refuse(*args: object, **options: object) -> None:
            raise PermissionError('no links here')

        monkeypatch.setattr(pinned_save.os, 'link', refuse)
    commit_with(folder, 1, 'adapter/config.json', '{}')
    (folder.path / 'notes.txt').write_text('of somebody else')
    kept = folder.pin()
    for name, path in files_in(kept.path).items():
        is_link = os.path.samefile(path, folder.path / name)
        assert is_link == (has_links and path.suffix == '.safetensors')
    for number in (2, 3):
        commit_one(folder, number)
    saved = read_manifest(kept.path)
    check_folder(kept.path, saved)
    assert files_in(kept.path).keys() == {*saved.files, MANIFEST_NAME} >= {'adapter/config.json'}
    assert content(folder.path) == 3
    kept.unpin()
    kept.unpin()
    assert hidden(tmp_path) == LOCK


def test_the_next_run_removes_what_a_killed_one_kept_but_not_what_a_command_added(claim, tmp_path):
    folder = claim()
    commit_one(folder, 1)
    kept, with_results = folder.pin(), folder.pin()
    (with_results.path / 'results').mkdir()
    (with_results.path / 'results' / 'score.json').write_text('mine')
    folder.open_staging()
    folder.abort()
    assert kept.path.is_dir(), 'a save of the same run leaves it to its readers'
    folder.unlock()
    claim()
    apart = tmp_path / 'hf_model_others_iter_1'
    assert (apart / 'results' / 'score.json').read_text() == 'mine'
    shutil.rmtree(apart)
    assert hidden(tmp_path) == LOCK and visible(tmp_path) == {'hf_model': 1}


def test_the_folder_above_may_be_a_link(tmp_path):
    (tmp_path / 'disk').mkdir()
    (tmp_path / 'out').symlink_to(tmp_path / 'disk')
    folder = CheckpointFolder(tmp_path / 'out' / 'hf_model', 1)
    folder.lock_and_recover()
    save_all(folder, (1, 2))
    assert visible(tmp_path / 'disk') == {'hf_model': 2}


@pytest.fixture
def targets(tmp_path) -> tuple[CheckpointFolder, CheckpointFolder]:
    """Of the newest and the best save, with one each."""
    newest = CheckpointFolder(tmp_path / 'hf_model', 1)
    both = newest, newest.extra_target('best')
    for each in both:
        each.lock_and_recover()
        commit_one(each, 1)
    return both


@pytest.mark.parametrize('then', ['next save', 'end', 'best'])
def test_nobody_waits_for_what_a_commit_deletes_until_the_next_save_or_the_end(targets, tmp_path, monkeypatch, then):
    """Until then it has a name that the next run sweeps."""
    folder, best = targets
    may_delete, deleted = threading.Event(), list[str]()

    def delete_later(path: Path) -> None:
        assert may_delete.wait(60)
        deleted.append(path.name.partition('-')[0])
        shutil.rmtree(path)

    monkeypatch.setattr(sibling_folders, 'remove_tree', delete_later)
    folder.commit(stage(folder, 2))
    assert deleted == [] and visible(tmp_path)['hf_model'] == 2
    assert len([name for name in hidden(tmp_path) if name.startswith('.hf_model.discarded-')]) == 1
    if then == 'best':  # another target, with deletions of its own
        stage(best, 2)
        assert deleted == []
    threading.Timer(0.2, may_delete.set).start()
    if then == 'next save':
        stage(folder, 3)
    else:
        folder.unlock()
    assert deleted == ['.hf_model.discarded']
    best.abort(), folder.abort()
    assert [name for name in hidden(tmp_path) if 'discarded' in name] == []


@pytest.mark.parametrize('which', ['best', 'newest'])
def test_a_save_waits_for_what_other_targets_delete_before_the_disk_counts_as_full(targets, monkeypatch, which):
    """Room for the newest, the best and one that is written: neither may be refused since the other is not gone yet."""
    is_asked, deleted = threading.Event(), list[Path]()

    def usage(path: Path) -> SimpleNamespace:
        is_asked.set()
        return SimpleNamespace(free=100 if deleted else 10)

    def delete_when_asked(path: Path) -> None:
        assert is_asked.wait(60)
        shutil.rmtree(path)
        deleted.append(path)

    monkeypatch.setattr(shutil, 'disk_usage', usage)
    monkeypatch.setattr(sibling_folders, 'remove_tree', delete_when_asked)
    target, other = targets if which == 'newest' else reversed(targets)
    other.commit(stage(other, 2))
    target.open_staging()
    assert deleted == [], 'nobody waits for another target as long as there is room'
    target.require_disk_space(50)
    assert len(deleted) == 1
    with pytest.raises(TargetError, match='100 bytes free, and 200 bytes are needed'):
        target.require_disk_space(200)
    target.abort()


def test_where_no_thread_can_be_started_the_commit_deletes(folder, tmp_path, monkeypatch):
    """As while the interpreter exits, when the last save may still be written."""
    commit_one(folder, 1)
    written = stage(folder, 2)
    monkeypatch.setattr(threading.Thread, 'start', mock.Mock(side_effect=RuntimeError("can't start new thread")))
    folder.commit(written)
    assert hidden(tmp_path) == LOCK and visible(tmp_path) == {'hf_model': 2}


def test_a_commit_reads_no_manifest_however_many_older_saves_there_are(claim, both_ways, tmp_path, monkeypatch):
    """It has a line for each tensor. Those of other runs are read once, before training."""
    save_all(claim(max_keep=3, keep_every=2), range(1, 10))
    monkeypatch.setattr(SiblingFolders, '_records', {})  # as in another process
    read, parse = [], manifest.parse_manifest
    monkeypatch.setattr(manifest, 'parse_manifest', lambda data, where: read.append(where) or parse(data, where))
    again = claim(max_keep=3, keep_every=2)
    assert sorted(read) == sorted(str(path) for path in tmp_path.glob(f'hf_model*/{MANIFEST_NAME}')) and len(read) == 6
    read.clear()
    monkeypatch.setattr(again.siblings.deletion, 'start', (deletions := []).append)
    for number in (10, 11, 12):
        again.commit(stage(again, number))
        assert read == []
        for delete in deletions:
            delete()
        assert [Path(where).parent.name.partition('-')[0] for where in read] == ['.hf_model.discarded'] * len(deletions)
        read.clear(), deletions.clear()
    assert visible(tmp_path) == {'hf_model': 12, **{f'hf_model_iter_{n}': n for n in (2, 4, 6, 8, 10, 11)}}


def test_a_save_that_gets_the_name_during_a_commit_is_looked_at_again(folder, both_ways, monkeypatch):
    """A user moves it there while the new one is flushed: it counts, not the one that was there before."""
    commit_one(folder, 1)
    shutil.copytree(folder.path, folder.path.with_name('apart'))
    (folder.path.with_name('apart') / 'notes.txt').write_text('of a user')

    def swap(*args: object) -> bytes:
        os.rename(folder.path, folder.path.with_name('moved'))
        (folder.path.with_name('apart') / MANIFEST_NAME).unlink()
        os.rename(folder.path.with_name('apart'), folder.path)
        return describe(*args)

    describe = checkpoint_folder.describe_folder
    monkeypatch.setattr(checkpoint_folder, 'describe_folder', swap)
    commit_one(folder, 2)
    assert (folder.path / 'notes.txt').read_text() == 'of a user'
    assert content(folder.path.with_name('hf_model_iter_2')) == 2
