"""One run at a time per folder, and sweeping that leaves live runs alone."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.helpers.ranks import HANG_SECS, start_process
from tests.helpers.tiny_checkpoint import commit_one, put_partial, put_whole, visible
from xhf_hooks.errors import TargetError
from xhf_hooks.places import lock
from xhf_hooks.places.checkpoint_folder import CheckpointFolder, sweep_dead_runs
from xhf_hooks.places.lock import RunLock

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


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
    CheckpointFolder(tmp_path / 'run' / 'hf_model', 1).claim()


def test_released_lock_leaves_no_file(tmp_path):
    folder = CheckpointFolder(tmp_path / 'hf_model', 1)
    folder.claim()
    folder.release()
    assert list(tmp_path.iterdir()) == []
    folder.release()  # a second time is no error


# Where hosts do not see each other's locks. Other hosts are other names in the file's sign.


@pytest.fixture(params=['no locks', 'local locks'])
def lockless(request, monkeypatch):
    """As on Lustre without ``flock``, and with ``localflock``. Forked holders are so, too."""
    monkeypatch.setattr(RunLock, 'beat_secs', 0.2)
    if request.param == 'local locks':
        monkeypatch.setattr(lock, '_locks_are_local', lambda path: True)
    else:

        def refuse(fd, how):
            raise OSError(errno.ENOSYS, 'Function not implemented')

        monkeypatch.setattr(lock.fcntl, 'flock', refuse)


class FarRun(threading.Thread):
    """What a run on another host does to the lock file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.ended = path, threading.Event()
        self._sign(0)
        self.start()

    def run(self) -> None:
        number = 0
        while not self.ended.wait(0.05):
            number += 1
            self._sign(number)

    def _sign(self, number: int) -> None:
        with open(self.path, 'r+b' if self.path.exists() else 'wb') as file:
            file.write(f'process 1 on far-away, beat {number}'.encode())

    def end(self) -> None:
        self.ended.set()
        self.join()


@pytest.fixture
def far_run(tmp_path):
    made = FarRun(tmp_path / '.hf_model.lock')
    yield made
    made.end()


def test_a_run_on_another_host_shows_life(tmp_path, lockless, far_run):
    put_partial(CheckpointFolder(tmp_path / 'hf_model', 1), '.hf_model.staging-00aa')
    with pytest.raises(TargetError, match='in use by process 1 on far-away'):
        CheckpointFolder(tmp_path / 'hf_model', 1).claim()
    assert (tmp_path / '.hf_model.staging-00aa').is_dir()


def test_a_dead_run_on_another_host_is_found_dead(tmp_path, lockless, far_run):
    far_run.end()
    put_whole(CheckpointFolder(tmp_path / 'hf_model', 1), 'hf_model', 4)
    folder = CheckpointFolder(tmp_path / 'hf_model', 1)
    folder.claim()
    assert (tmp_path / '.hf_model.lock').read_text().startswith(f'process {os.getpid()} on ')
    commit_one(folder, 5)
    folder.release()
    assert visible(tmp_path) == {'hf_model': 5}
    assert [path.name for path in tmp_path.iterdir()] == ['hf_model']


def test_a_holder_goes_on_showing_life(tmp_path, lockless):
    folder = CheckpointFolder(tmp_path / 'hf_model', 1)
    folder.claim()
    first = (tmp_path / '.hf_model.lock').read_text()
    wait_until(lambda: (tmp_path / '.hf_model.lock').read_text() != first)
    folder.release()
    assert not (tmp_path / '.hf_model.lock').exists()
    wait_until(lambda: not any(thread.name == 'xhf-lock' for thread in threading.enumerate()))


def wait_until(is_so) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize('age_secs', [0, 10_000])
def test_where_nothing_is_known_only_the_lifeless_is_swept(tmp_path, lockless, age_secs):
    """Another timestamp of the work_dir, whose run may be alive on another host."""
    other = CheckpointFolder(tmp_path / '20260101' / 'hf_model', 1)
    other.final.parent.mkdir()
    staged = put_partial(other, '.hf_model.staging-00aa')
    (other.final.parent / '.hf_model.lock').write_text('process 1 on far-away')
    for path in (*staged.iterdir(), staged, other.final.parent / '.hf_model.lock'):
        then = path.stat().st_mtime - age_secs
        os.utime(path, (then, then))
    swept = sweep_dead_runs(tmp_path, 'hf_model')
    assert staged.is_dir() == (not age_secs) and swept == ([staged] if age_secs else [])


def test_sweep_leaves_live_runs_alone(tmp_path, holder):
    live = CheckpointFolder(tmp_path / 'run' / 'hf_model', 1)
    staged = put_partial(live, '.hf_model.staging')
    dead = CheckpointFolder(tmp_path / 'dead' / 'hf_model', 1)
    dead.final.parent.mkdir()
    put_whole(dead, '.hf_model.previous', 3)
    put_partial(dead, '.hf_model.staging')

    swept = sweep_dead_runs(tmp_path, 'hf_model')
    assert {path.parent.name for path in swept} == {'dead'}
    assert staged.is_dir()
    assert visible(tmp_path / 'dead') == {'hf_model': 3}
    assert [path.name for path in dead.final.parent.iterdir()] == ['hf_model']
