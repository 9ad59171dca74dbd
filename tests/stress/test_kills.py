"""Runs that are killed at random instants of a save.

With ``--times 5`` all 24 kinds of runs are killed instead of a sample, each five times, and keep one to three saves.
"""

from __future__ import annotations

import random
import signal

import pytest

from tests.helpers.kill_runs import KINDS, NAME, Kind, live_and_die, next_start

#: Each writer, both signals, all ranks and one, in the background and not, at ZeRO-3 and not.
SAMPLE = [
    Kind('stream', False, False, signal.SIGKILL, 'all'),
    Kind('positional', False, True, signal.SIGKILL, 'one'),
    Kind('positional', True, False, signal.SIGKILL, 'all'),
    Kind('parallel', False, False, signal.SIGKILL, 'one'),
    Kind('stream', True, True, signal.SIGKILL, 'one'),
    Kind('positional', False, False, signal.SIGTERM, 'all'),
    Kind('parallel', True, False, signal.SIGTERM, 'all'),
    Kind('positional', True, True, signal.SIGTERM, 'one'),
]


@pytest.fixture(scope='module')
def parent(tmp_path_factory):
    """One folder for all lives: each starts with what the one before left."""
    return tmp_path_factory.mktemp('lives')


def pytest_generate_tests(metafunc):
    many = metafunc.config.getoption('--times') > 1
    metafunc.parametrize('kind', KINDS if many else SAMPLE, ids=str)


def test_nothing_is_lost_and_the_next_run_saves(parent, kind, turn):
    max_keep = 1 + turn % 3
    first = next_start(parent, max_keep).get(NAME, 0) + 1
    death = live_and_die(parent, kind, first, random.Random(f'{kind}{turn}'), max_keep)
    assert death.began >= first
    found = next_start(parent, max_keep).get(NAME, 0)
    assert found >= death.committed
    if kind.victims == 'one':
        assert all('not ours' not in text for text in death.survivors), death.survivors
        assert death.survivors, 'nobody noticed'
    if kind.in_background and kind.signal is signal.SIGTERM and kind.victims == 'all':
        assert found >= death.copied, 'the save that was being written was to be finished'
