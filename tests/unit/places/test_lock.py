"""One run at a time per folder, and sweeping that leaves live runs alone; processes that die are in test_kills."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from tests.helpers.runs.small_saves import failing, hidden
from tests.helpers.runs.tiny_checkpoint import commit_one, put_partial, put_whole, visible
from xhf_hooks.errors import TargetError
from xhf_hooks.places import lock
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.runs.access import lock_targets


def test_a_second_run_is_told_who_holds_the_folder_and_waits_for_one_that_is_ending(tmp_path, claim):
    first, second = claim(), CheckpointFolder(tmp_path / 'hf_model', 1)
    with pytest.raises(TargetError, match=re.escape(f'in use by process {os.getpid()} on ')) as caught:
        second.lock_and_recover()
    assert 'out_dir' in str(caught.value)
    threading.Timer(0.5, first.unlock).start()
    second.lock_and_recover()
    second.unlock()
    second.unlock()  # a second time is no error
    assert hidden(tmp_path) == set()


def test_a_folder_that_cannot_be_written_is_told_with_what_to_change(claim, monkeypatch):
    monkeypatch.setattr(os, 'open', failing(errno.EROFS, instead_of=os.open))
    with pytest.raises(
        TargetError, match=r'cannot be written: .*Read-only file system; set out_dir to a folder that can'
    ):
        claim()


@pytest.mark.parametrize('kind', ['no locks', 'local locks'])
def test_where_hosts_do_not_see_locks_an_earlier_run_is_named(tmp_path, monkeypatch, claim, said, kind):
    """As on Lustre without ``flock``, and with ``localflock``."""
    if kind == 'local locks':
        monkeypatch.setattr(lock, 'mount_of', lambda device: ('lustre', {'rw', 'localflock'}))
    else:
        monkeypatch.setattr(lock.fcntl, 'flock', failing(errno.ENOSYS, instead_of=lock.fcntl.flock))
    for left in ('', 'process 1 on far-away'):
        if left:
            (tmp_path / '.hf_model.lock').write_text(left)
        folder = claim()
        commit_one(folder, 5)
        folder.unlock()
        assert not folder.lock.works_across_hosts
        assert [path.name for path in tmp_path.iterdir()] == ['hf_model']
        assert len(said) == bool(left) and all(left in each for each in said)


def test_a_run_whose_lock_was_removed_leaves_that_of_the_next_one(tmp_path, claim):
    """It was taken for dead, and its lock file was removed, as the error says."""
    thought_dead = claim()
    thought_dead.lock.path.unlink()
    later = claim()
    thought_dead.unlock()
    assert not CheckpointFolder(tmp_path / 'hf_model', 1).lock.acquire()
    later.unlock()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('why', ['it lives', 'it is protected'])
def test_sweep_leaves_alone_what_it_cannot_lock(tmp_path, monkeypatch, why):
    """A run that lives; the leftovers of a colleague, or in a folder that was made read-only. The others are swept."""
    dead, other = (CheckpointFolder(tmp_path / name / 'hf_model', 1) for name in ('dead', 'other'))
    for folder in (dead, other):
        folder.path.parent.mkdir()
    if why == 'it lives':
        other.lock_and_recover()
    else:

        def is_protected(path: object, *flags: object) -> bool:
            return path == other.lock.path

        monkeypatch.setattr(os, 'open', failing(errno.EACCES, when=is_protected, instead_of=os.open))
    staged = put_partial(other, '.hf_model.staging-0000000000aa')
    put_whole(dead, '.hf_model.previous-0000000000aa', 3)
    put_partial(dead, '.hf_model.staging-0000000000bb')
    log = mock.Mock()
    lock_targets(log, [CheckpointFolder(tmp_path / 'now' / 'hf_model', 1)], 1, [], remove_leftovers_in=tmp_path)
    log.info.assert_called_once_with(f'removed what a killed run left in {dead.path.parent}')
    assert staged.is_dir() and visible(dead.path.parent) == {'hf_model': 3} and hidden(dead.path.parent) == set()
    warnings = [call.args[0] for call in log.warning.call_args_list]
    assert len(warnings) == (why == 'it is protected')
    assert all(str(staged.parent) in each and 'Permission denied' in each for each in warnings)


def test_a_process_forked_by_the_holder_does_not_hold_the_lock(tmp_path):
    """As a data loader worker that lives on when rank 0 was killed; the lock stays while the holder lives."""
    code = """
import os, sys, time
from pathlib import Path
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
folder = CheckpointFolder(Path(sys.argv[1]), 1)
folder.lock_and_recover()
if os.fork() == 0:
    print('forked', os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""
    command = [sys.executable, '-c', code, str(tmp_path / 'hf_model')]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    worker = int(holder.stdout.readline().split()[1])
    try:
        second = CheckpointFolder(tmp_path / 'hf_model', 1)
        assert not second.lock.acquire()
        holder.kill()
        holder.wait()
        os.kill(worker, 0)  # it lives
        assert second.lock.acquire()
    finally:
        os.kill(worker, signal.SIGKILL)
        second.unlock()


def test_a_run_that_writes_a_save_or_is_ending_is_waited_for(tmp_path, claim, said, monkeypatch):
    """A preempted run, when its replacement starts: for as long as something changes there."""
    monkeypatch.setattr(lock, '_SAVE_PATIENCE_SECS', 2.0)
    first, second = claim(), lock.RunLock(tmp_path / 'hf_model')
    assert not second.acquire(0.2, said.append)
    assert said == [f'{first.path}: waiting for {second.holder}, which saves there, to end']
    staged = first.open_staging() / 'model.safetensors'

    def end() -> None:
        for number in range(3):
            staged.write_bytes(bytes(number))
            time.sleep(0.5)  # longer than the patience with a run that does nothing
        first.abort()
        for _ in range(10):
            first.lock.show_progress()
            time.sleep(0.1)
        first.unlock()

    thread = threading.Thread(target=end)
    thread.start()
    assert second.acquire(0.4)
    thread.join()
    second.release()


def test_nothing_is_left_of_locks_that_are_released(tmp_path):
    """A loop of ``save_hf`` with a folder for each step."""
    before = len(os.listdir('/proc/self/fd'))
    for number in range(20):
        one = lock.RunLock(tmp_path / f'step_{number}')
        assert one.acquire()
        one.release()
    assert len(os.listdir('/proc/self/fd')) == before and len(lock._held) == 0
    assert list(tmp_path.iterdir()) == []
