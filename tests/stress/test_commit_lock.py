"""One run at a time per folder, and sweeping that leaves live runs alone."""

from __future__ import annotations

import errno
import multiprocessing
import re
from unittest import mock

import pytest

from tests.helpers.ranks.launch import HANG_SECS, start_process
from tests.helpers.runs.tiny_checkpoint import commit_one, put_partial, put_whole, visible
from xhf_hooks.errors import TargetError
from xhf_hooks.places import lock
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.claim import claim_targets, sweep_dead_runs


def hold(final, connection) -> None:
    """Runs in a process of its own: claims the folder and keeps it until told to end."""
    CheckpointFolder(final, 1).claim()
    connection.send('claimed')
    connection.recv()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds ``run/hf_model``, and a connection by which it is told to end."""
    (tmp_path / 'run').mkdir()
    connection, theirs = multiprocessing.Pipe()
    process = start_process(hold, tmp_path / 'run' / 'hf_model', theirs)
    assert connection.poll(HANG_SECS) and connection.recv() == 'claimed'
    yield process, connection
    process.kill()
    process.join()


def test_a_second_run_is_told_who_holds_the_folder_and_waits_for_one_that_is_ending(tmp_path, holder):
    process, connection = holder
    folder = CheckpointFolder(tmp_path / 'run' / 'hf_model', 1)
    with pytest.raises(TargetError, match=re.escape(f'in use by process {process.pid} on ')) as caught:
        folder.claim()
    assert 'out_dir' in str(caught.value)
    connection.send('end')
    folder.claim()
    folder.release()
    folder.release()  # a second time is no error
    assert list((tmp_path / 'run').iterdir()) == []


@pytest.mark.parametrize('kind', ['no locks', 'local locks'])
def test_where_hosts_do_not_see_locks_an_earlier_run_is_named(tmp_path, monkeypatch, kind):
    """As on Lustre without ``flock``, and with ``localflock``."""
    if kind == 'local locks':
        monkeypatch.setattr(lock, '_locks_are_local', lambda path: True)
    else:

        def refuse(fd, how):
            raise OSError(errno.ENOSYS, 'Function not implemented')

        monkeypatch.setattr(lock.fcntl, 'flock', refuse)
    for left in ('', 'process 1 on far-away'):
        folder = CheckpointFolder(tmp_path / 'hf_model', 1, warn=(said := []).append)
        if left:
            (tmp_path / '.hf_model.lock').write_text(left)
        folder.claim()
        commit_one(folder, 5)
        folder.release()
        assert not folder.lock.is_seen
        assert [path.name for path in tmp_path.iterdir()] == ['hf_model']
        assert len(said) == bool(left) and all(left in each for each in said)


def test_a_run_whose_lock_was_removed_leaves_that_of_the_next_one(tmp_path):
    """It was taken for dead, and its lock file was removed, as the error says."""
    thought_dead, later = CheckpointFolder(tmp_path / 'hf_model', 1), CheckpointFolder(tmp_path / 'hf_model', 1)
    thought_dead.claim()
    thought_dead.lock.path.unlink()
    later.claim()
    thought_dead.release()
    assert not CheckpointFolder(tmp_path / 'hf_model', 1).lock.acquire()
    later.release()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_that_cannot_be_reached_are_a_warning(tmp_path, monkeypatch):
    """Of a colleague, or in a folder that was made read-only to protect it. The others are swept."""
    for name in ('dead', 'protected'):
        (tmp_path / name).mkdir()
        put_partial(CheckpointFolder(tmp_path / name / 'hf_model', 1), '.hf_model.staging-0000000000aa')
    acquire = lock.RunLock.acquire

    def refuse(self, patience_secs=0.0):
        if self.path.parent.name == 'protected':
            raise PermissionError(errno.EACCES, 'Permission denied', str(self.path))
        return acquire(self, patience_secs)

    monkeypatch.setattr(lock.RunLock, 'acquire', refuse)
    folder, log = CheckpointFolder(tmp_path / 'now' / 'hf_model', 1, warn=(said := []).append), mock.Mock()
    claim_targets(log, [folder], 1, [], sweep=tmp_path)
    folder.release()
    (warning,) = [*said, *(call.args[0] for call in log.warning.call_args_list)]
    assert str(tmp_path / 'protected') in warning and 'Permission denied' in warning
    assert [*(tmp_path / 'dead').iterdir()] == [] and len([*(tmp_path / 'protected').iterdir()]) == 1


def test_sweep_leaves_live_runs_alone(tmp_path, holder):
    staged = put_partial(CheckpointFolder(tmp_path / 'run' / 'hf_model', 1), '.hf_model.staging-0000000000aa')
    dead = CheckpointFolder(tmp_path / 'dead' / 'hf_model', 1)
    dead.path.parent.mkdir()
    put_whole(dead, '.hf_model.previous-0000000000aa', 3)
    put_partial(dead, '.hf_model.staging-0000000000bb')
    sweep_dead_runs(log := mock.Mock(), tmp_path, 'hf_model')
    log.info.assert_called_once_with(f'removed what a killed run left in {tmp_path / "dead"}')
    assert staged.is_dir() and visible(tmp_path / 'dead') == {'hf_model': 3}
    assert [path.name for path in dead.path.parent.iterdir()] == ['hf_model']
