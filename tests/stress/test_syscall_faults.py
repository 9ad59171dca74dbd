"""A fault, or the end of the process, at every single file-system call of a save: nothing is lost, nothing is partial.

The calls are those that reach the kernel's door (an LD_PRELOAD library, tests/helpers/fault_layer.c), whoever makes
them: this package, Python, transformers or the safetensors library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import fault_layer
from tests.helpers.ranks import python_path

LEAST_CALLS = 50  # of one run of one save; fewer would mean that the layer sees too little
#: After these many calls of a save of 65, a kill leaves the new save, by and large.
KILLS = {'kill': 60, 'kill_keeping_two': 60, 'kill_without_exchange': 60}


@pytest.fixture(scope='module')
def reports(tmp_path_factory):
    """One process for all; on a file system in memory, where fsync costs nothing."""
    root = tmp_path_factory.mktemp('every_call')
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64m', 'tmpfs', root], check=True)
    try:
        layer = fault_layer.environment(tmp_path_factory.mktemp('layer'))
        environment = {**os.environ, **layer, 'PYTHONPATH': python_path(), 'CUDA_VISIBLE_DEVICES': ''}
        command = [sys.executable, '-m', 'tests.helpers.syscall_faults', str(root)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return {path.stem: json.loads(path.read_text()) for path in root.glob('*.json')}
    finally:
        subprocess.run(['umount', root], check=True)


def value(reports, name):
    assert 'error' not in reports[name], reports[name]['error']
    return reports[name]['value']


@pytest.mark.parametrize(('name', 'text'), [('eio', 'Input/output error'), ('enospc_keeping_two', 'No space left')])
def test_each_call_fails_once(reports, name, text):
    """Each time the error is ours, a whole folder has the name, and the next run saves."""
    found = value(reports, name)
    assert found['calls'] >= LEAST_CALLS
    assert len(found['errors']) + len(found['unharmed']) == found['calls']
    assert all(text in message for message in found['errors'].values()), found['errors']
    # Only what comes after the commit, and clears up, may fail unnoticed
    assert len(found['errors']) >= found['calls'] // 2


def test_each_write_may_take_less_than_it_was_given(reports):
    found = value(reports, 'short')
    assert found['errors'] == {} and len(found['unharmed']) == found['calls']


@pytest.mark.parametrize('name', KILLS)
def test_killed_at_each_call(reports, name):
    assert value(reports, name)['deaths'] >= KILLS[name]


def test_the_moment_of_the_commit_is_one_call(reports):
    """Killed before it, the old save is there, after it the new one: both happened, and nothing else."""
    found = value(reports, 'kill')
    assert 0 < found['committed'] < found['deaths']


def test_without_exchange_only_the_moment_of_the_commit_has_no_name(reports):
    assert value(reports, 'kill_without_exchange')['missing_until_next_run'] <= 1


def test_what_cannot_be_deleted_is_in_nobodys_way(reports):
    """A reader holds files of the old save open on NFS: saves go on, and the next run clears up."""
    found = value(reports, 'undeletable')
    assert any('discarded' in name for name in found['left'])
    assert found['then'] == [] and found['newest'] == found['number']
