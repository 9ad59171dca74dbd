"""Runs that are killed at random instants of a save. With ``--times 10`` each ten times, keeping one to three saves."""

from __future__ import annotations

import random
from signal import SIGKILL, SIGTERM

import pytest

from tests.helpers.faults.kill_runs import NAME, Kind, live_and_die, next_start

#: Each writer, both signals, all ranks and one, in the background and not, at ZeRO-3 and not.
KINDS = [
    Kind('stream', False, False, SIGKILL, 'all'),
    Kind('positional', False, True, SIGKILL, 'one'),
    Kind('positional', True, False, SIGKILL, 'all'),
    Kind('parallel', False, False, SIGKILL, 'one'),
    Kind('stream', True, True, SIGKILL, 'one'),
    Kind('positional', False, False, SIGTERM, 'all'),
    Kind('parallel', True, False, SIGTERM, 'all'),
    Kind('positional', True, True, SIGTERM, 'one'),
]


@pytest.fixture(scope='module')
def parent(tmp_path_factory):
    """One folder for all lives: each starts with what the one before left."""
    return tmp_path_factory.mktemp('lives')


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_nothing_is_lost_and_the_next_run_saves(parent, kind, turn):
    max_keep = 1 + turn % 3
    first = next_start(parent, max_keep).get(NAME, 0) + 1
    death = live_and_die(parent, kind, first, random.Random(f'{kind}{turn}'), max_keep)
    found = next_start(parent, max_keep).get(NAME, 0)
    assert found >= death.committed
    if kind.victims == 'one':
        assert death.survivors, 'nobody noticed'
        assert all('not ours' not in text for text in death.survivors), death.survivors
    if kind.in_background and kind.signal is SIGTERM and kind.victims == 'all':
        assert found >= death.copied, 'the save that was being written was to be finished'
