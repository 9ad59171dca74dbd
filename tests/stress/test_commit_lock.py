"""One run at a time per folder, and sweeping that leaves live runs alone."""

from __future__ import annotations

import errno
import multiprocessing
import re
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.helpers.ranks import HANG_SECS, start_process
from tests.helpers.tiny_checkpoint import commit_one, put_partial, put_whole, visible
from xhf_hooks.errors import TargetError
from xhf_hooks.places import lock
from xhf_hooks.places.checkpoint_folder import CheckpointFolder, sweep_dead_runs


def hold(final: Path, connection: Connection) -> None:
    """Runs in a process of its own: claims the folder and keeps it until told to end."""
    CheckpointFolder(final, 1).claim()
    connection.send('claimed')
    connection.recv()


class Holder:
    """Another process that holds a folder."""

    def __init__(self, final: Path) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.process = start_process(hold, final, theirs)
        assert self.connection.poll(HANG_SECS) and self.connection.recv() == 'claimed'


@pytest.fixture
def holder(tmp_path):
    (tmp_path / 'run').mkdir()
    made = Holder(tmp_path / 'run' / 'hf_model')
    yield made
    made.process.kill()
    made.process.join()


def test_second_run_is_told_who_holds_the_folder(tmp_path, holder):
    folder = CheckpointFolder(tmp_path / 'run' / 'hf_model', 1)
    with pytest.raises(TargetError, match=re.escape(f'in use by process {holder.process.pid} on ')) as caught:
        folder.claim()
    assert 'out_dir' in str(caught.value)


def test_a_run_that_is_just_ending_is_waited_for(tmp_path, holder):
    holder.connection.send('end')
    CheckpointFolder(tmp_path / 'run' / 'hf_model', 1).claim()


def test_lock_goes_with_a_killed_process(tmp_path, holder):
    holder.process.kill()
    holder.process.join()
    folder = CheckpointFolder(tmp_path / 'run' / 'hf_model', 1, warn=(said := []).append)
    folder.claim()
    assert said == []


def test_released_lock_leaves_no_file(tmp_path):
    folder = CheckpointFolder(tmp_path / 'hf_model', 1)
    folder.claim()
    folder.release()
    assert list(tmp_path.iterdir()) == []
    folder.release()  # a second time is no error


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
        assert len(said) == bool(left) and all('process 1 on far-away' in each for each in said)


def test_sweep_leaves_live_runs_alone(tmp_path, holder):
    live = CheckpointFolder(tmp_path / 'run' / 'hf_model', 1)
    staged = put_partial(live, '.hf_model.staging-00aa')
    dead = CheckpointFolder(tmp_path / 'dead' / 'hf_model', 1)
    dead.final.parent.mkdir()
    put_whole(dead, '.hf_model.previous-00aa', 3)
    put_partial(dead, '.hf_model.staging-00bb')

    assert sweep_dead_runs(tmp_path, 'hf_model') == [tmp_path / 'dead']
    assert staged.is_dir()
    assert visible(tmp_path / 'dead') == {'hf_model': 3}
    assert [path.name for path in dead.final.parent.iterdir()] == ['hf_model']
