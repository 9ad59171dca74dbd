"""`run_ranks` is only worth its cost if it can't pass by accident: each way to fail is tried."""

import os
import signal
import sys
import threading
import time
from functools import partial

import pytest

from tests.helpers import ranks
from tests.helpers.ranks import RankFailures, run_ranks
from tests.helpers.scenarios import ScenarioFailure, check, run_scenarios

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


def rank():
    return int(os.environ['RANK'])


def describe_rank(word):
    return word, rank(), int(os.environ['WORLD_SIZE']), os.environ['DS_ACCELERATOR']


def raise_on(bad_rank, wait_secs=0.0):
    print(f'output of rank {rank()}')
    if rank() == bad_rank:
        raise ValueError('no space left in this test')
    time.sleep(wait_secs)


def hang_on(bad_rank):
    if rank() == bad_rank:
        sleep_with_a_telling_name()


def sleep_with_a_telling_name():
    time.sleep(1000)


def die_on(bad_rank, signal_number):
    if rank() == bad_rank:
        os.kill(os.getpid(), signal_number)
    return rank()


def exit_quietly():
    os._exit(0)


def leave_a_thread():
    threading.Thread(target=sleep_with_a_telling_name).start()


def return_what_cannot_travel():
    return lambda: None


def start_a_grandchild_and_hang(pid_file):
    if rank() == 1:
        raise ValueError('rank 1 leaves')
    grandchild = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, '-c', 'input()'])
    pid_file.write_text(str(grandchild))
    time.sleep(1000)


def sum_of_ranks():
    import torch
    import torch.distributed as dist

    total = torch.tensor([rank()])
    dist.all_reduce(total)
    return total.item()


def is_alive(pid):
    """Whether the process runs; one that only waits to be reaped (a zombie) does not."""
    try:
        with open(f'/proc/{pid}/stat') as stat:
            return stat.read().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False


def test_results_come_in_rank_order():
    results = run_ranks(describe_rank, 3, 'hello', init=None, timeout_secs=300)
    assert results == [('hello', index, 3, 'cpu') for index in range(3)]


def test_one_rank_raises():
    with pytest.raises(RankFailures) as failure:
        run_ranks(raise_on, 2, 1, init=None, timeout_secs=300)
    message = str(failure.value)
    assert 'raise_on: ranks [1] of 2 failed' in message
    assert 'ValueError: no space left in this test' in message
    assert 'output of rank 0' in message and 'output of rank 1' in message


def test_peers_of_a_failed_rank_are_not_waited_for_until_the_time_limit(monkeypatch):
    monkeypatch.setattr(ranks, 'PEER_GRACE_SECS', 1.0)
    with pytest.raises(RankFailures) as failure:
        run_ranks(raise_on, 2, 1, 1000.0, init=None, timeout_secs=300)
    message = str(failure.value)
    assert 'ranks [0, 1] of 2 failed' in message
    assert 'rank 1 had failed 1 s before' in message
    assert 'in raise_on' in message and 'no space left' in message


def test_one_rank_hangs():
    with pytest.raises(RankFailures) as failure:
        run_ranks(hang_on, 2, 0, init=None, timeout_secs=10)
    message = str(failure.value)
    assert 'hang_on: ranks [0] of 2 failed' in message
    assert 'time limit of 10 s' in message
    assert 'in sleep_with_a_telling_name' in message


def test_a_rank_that_cannot_exit_is_a_failure():
    with pytest.raises(RankFailures, match='returned, but did not exit') as failure:
        run_ranks(leave_a_thread, 1, init=None, timeout_secs=10)
    assert 'in sleep_with_a_telling_name' in str(failure.value)


def test_one_rank_is_killed():
    with pytest.raises(RankFailures, match=r'ranks \[1\] of 2(.|\n)*died: killed by SIGKILL'):
        run_ranks(die_on, 2, 1, signal.SIGKILL, init=None, timeout_secs=300)


def test_a_rank_that_is_meant_to_die():
    options = {'init': None, 'timeout_secs': 300, 'expected_deaths': {1}}
    assert run_ranks(die_on, 2, 1, signal.SIGKILL, **options) == [0, None]


def test_an_exception_is_no_expected_death():
    with pytest.raises(RankFailures, match='no space left'):
        run_ranks(raise_on, 1, 0, init=None, timeout_secs=300, expected_deaths={0})


@pytest.mark.parametrize(
    ('function', 'expected'),
    [(exit_quietly, 'died: exit status 0'), (return_what_cannot_travel, 'pickle')],
)
def test_exit_status_zero_is_not_enough(function, expected):
    with pytest.raises(RankFailures, match=expected):
        run_ranks(function, 1, init=None, timeout_secs=300)


def test_nothing_survives_a_failed_launch(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, 'PEER_GRACE_SECS', 1.0)
    pid_file = tmp_path / 'pid'
    with pytest.raises(RankFailures):
        run_ranks(start_a_grandchild_and_hang, 2, pid_file, init=None, timeout_secs=300)
    deadline = time.monotonic() + 60
    while is_alive(pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid_file.read_text())


@pytest.fixture(scope='module')
def scenario_results():
    scenarios = {
        'fails on one rank': partial(raise_on, 1),
        'fails on all ranks': partial(return_or_raise, None),
        'works afterwards': sum_of_ranks,
    }
    return run_scenarios(scenarios, 2, init='torch')


def return_or_raise(value):
    if value is None:
        raise RuntimeError(f'rank {rank()} has no value')
    return value


def test_scenario_that_works(scenario_results):
    assert check(scenario_results, 'works afterwards') == [1, 1]


@pytest.mark.parametrize(
    ('name', 'told'),
    [
        ('fails on one rank', ['on 1 of 2 ranks', '--- rank 1', 'no space left in this test']),
        ('fails on all ranks', ['on 2 of 2 ranks', 'rank 0 has no value', 'rank 1 has no value']),
    ],
)
def test_scenario_that_fails(scenario_results, name, told):
    with pytest.raises(ScenarioFailure) as failure:
        check(scenario_results, name)
    for part in told:
        assert part in str(failure.value)


def test_scenarios_need_a_process_group():
    with pytest.raises(ValueError, match='init'):
        run_scenarios({'any': sum_of_ranks}, 1, init=None)
