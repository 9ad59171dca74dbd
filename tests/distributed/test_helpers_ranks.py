"""`run_ranks` and `run_scenarios` are only worth their cost if they can't pass by accident."""

import os
import signal
import time
from functools import partial

import pytest

from tests.helpers import ranks
from tests.helpers.ranks import RankFailures, run_ranks
from tests.helpers.scenarios import ScenarioFailure, check, run_scenarios


def raise_on(bad_rank, wait_secs=0.0):
    rank = int(os.environ['RANK'])
    print(f'output of rank {rank}')
    if rank == bad_rank:
        raise ValueError('no space left in this test')
    time.sleep(wait_secs)
    return rank


def die_on(bad_rank):
    if int(os.environ['RANK']) == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL)


def exit_quietly():
    os._exit(0)


def test_peers_of_a_failed_rank_are_stopped_and_all_is_told(monkeypatch):
    monkeypatch.setattr(ranks, 'PEER_GRACE_SECS', 1.0)
    with pytest.raises(RankFailures) as failure:
        run_ranks(raise_on, 2, 1, 1000.0, init=None, timeout_secs=300)
    message = str(failure.value)
    assert 'raise_on: ranks [0, 1] of 2 failed' in message and 'rank 1 had failed 1 s before' in message
    assert 'ValueError: no space left in this test' in message and 'in raise_on' in message  # the stack of rank 0
    assert 'output of rank 0' in message and 'output of rank 1' in message


def test_a_rank_that_hangs():
    with pytest.raises(RankFailures, match=r'time limit of 3 s is over(.|\n)*in raise_on'):
        run_ranks(raise_on, 1, None, 1000.0, init=None, timeout_secs=3)


def test_a_rank_that_dies_or_leaves_without_a_word():
    with pytest.raises(RankFailures, match=r'ranks \[1\] of 2(.|\n)*died: killed by SIGKILL'):
        run_ranks(die_on, 2, 1, init=None, timeout_secs=300)
    assert run_ranks(die_on, 2, 1, init=None, timeout_secs=300, expected_deaths={1}) == [None, None]
    with pytest.raises(RankFailures, match='died: exit status 0'):
        run_ranks(exit_quietly, 1, init=None, timeout_secs=300)


def test_a_scenario_that_fails_on_one_rank():
    results = run_scenarios({'fails': partial(raise_on, 1), 'works': partial(raise_on, None)}, 2, init='torch')
    assert check(results, 'works') == [0, 1]
    with pytest.raises(ScenarioFailure, match=r'on 1 of 2 ranks(.|\n)*--- rank 1(.|\n)*no space left in this test'):
        check(results, 'fails')
