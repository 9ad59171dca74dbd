"""What a signal does besides asking for a save: what it did before, in its time."""

import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from xhf_hooks.options import RunOptions
from xhf_hooks.runs.ends import save_requests
from xhf_hooks.runs.ends.run_end import RunEnd
from xhf_hooks.runs.ends.save_requests import SaveRequests
from xhf_hooks.runs.telemetry import RunLog


@pytest.fixture(autouse=True)
def handlers():
    numbers = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


LOG = RunLog(logging.getLogger('test'), 'test')
#: Two runs with one trainer, as two hooks are, may have the same signal.
TRAINER = nullcontext()


def listening(*signals: str) -> RunEnd:
    end = RunEnd([], TRAINER, RunOptions(save_on_signal=signals), LOG)
    end.begin()
    end.listen()
    return end


def test_the_clock_requests_a_save_after_the_time_without_one(monkeypatch):
    """It is restarted by each save, and by what it has requested. No signal is handled."""
    now = [100.0]
    monkeypatch.setattr(save_requests, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    before = signal.getsignal(signal.SIGUSR2)
    requests = SaveRequests.start(LOG, (), interval_secs=60)
    found = []
    for seconds in (59, 1, 30, 30, 29, 1, 0):
        now[0] += seconds
        found.append(requests.is_due())
    assert found == [False, False, True, False, False, False, True], 'one iteration later'
    now[0] += 59
    assert not requests.is_due(vote_now=True)
    now[0] += 1
    assert requests.is_due(vote_now=True) and not requests.is_due(vote_now=True)
    now[0] += 59
    requests.restart_clock()
    now[0] += 59
    assert not requests.is_due(vote_now=True)
    requests.close()
    assert signal.getsignal(signal.SIGUSR2) is before


@pytest.mark.parametrize('own_handler', [False, True])
def test_training_goes_on_after_sigusr2(own_handler):
    called = []
    before = (lambda *args: called.append(args)) if own_handler else signal.SIG_DFL  # which would kill
    signal.signal(signal.SIGUSR2, before)
    end = listening('SIGUSR2')
    assert not end.requests.is_due(vote_now=True)
    signal.raise_signal(signal.SIGUSR2)
    assert len(called) == own_handler and not end.signals.ends_after_save(end)
    assert [end.requests.is_due() for _ in range(3)] == [False, True, False], 'one iteration later'
    end.close()
    assert signal.getsignal(signal.SIGUSR2) is before


def test_signals_take_their_effect_at_once_where_there_will_be_no_save():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end = listening('SIGINT')
    signal.raise_signal(signal.SIGINT)
    assert end.signals.ends_after_save(end)
    end.close()
    with pytest.raises(KeyboardInterrupt):
        end.signals.answer(end)


def test_a_signal_to_two_hooks_takes_effect_when_both_have_saved():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ends = [listening('SIGINT'), listening('SIGINT', 'SIGUSR2')]
    signal.raise_signal(signal.SIGINT)
    ends[0].signals.answer(ends[0])
    assert [end.signals.ends_after_save(end) for end in ends] == [False, True]
    ends[0].close()
    with pytest.raises(KeyboardInterrupt):
        ends[1].signals.answer(ends[1])
    ends[1].close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_process_1_of_a_container_ends_though_signals_do_nothing_there(monkeypatch):
    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, 'kill', lambda *args: None)
    monkeypatch.setattr(os, '_exit', end)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run_end = listening('SIGTERM')
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        run_end.signals.answer(run_end)
    run_end.close()


def test_a_forked_child_ends_as_ever():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end = listening('SIGTERM', 'SIGUSR2')
    with mock.patch.object(os, 'getpid', return_value=1):
        signal.raise_signal(signal.SIGUSR2)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert not end.requests.is_due(vote_now=True)
    end.close()


class OneOfTwo:
    """Stands in for the collective of one of two ranks, which this test asks one after the other."""

    world_size, is_connected = 2, True

    def __init__(self, rank: int, votes: list[list[Sequence[int]]]) -> None:
        self.rank, self._votes, self._n_votes = rank, votes, 0

    def stage(self, name: str) -> Any:
        return nullcontext()

    def start_maxima(self, numbers: Sequence[int], stage: str) -> Callable[[], list[int]]:
        if self._n_votes == len(self._votes):
            self._votes.append([])
        vote = self._votes[self._n_votes]
        vote.append(numbers)
        self._n_votes += 1

        def answer() -> list[int]:
            assert len(vote) == 2, 'one rank votes alone'
            return [max(column) for column in zip(*vote, strict=True)]

        return answer

    def close(self) -> None:
        pass


#: Seconds of an iteration, and the most iterations that lie between two votes.
ITERATIONS = [(0.001, 16), (0.1, 10), (0.3, 3), (5.0, 1)]


@pytest.mark.parametrize(('secs', 'most'), ITERATIONS)
def test_ranks_vote_once_a_second_by_the_clock_of_rank_0(secs, most, monkeypatch):
    """The other rank's clock runs ten times as fast, and rank 0's first iteration is a short one."""
    now, votes = 0.0, list[list[Sequence[int]]]()
    monkeypatch.setattr(save_requests.time, 'monotonic', lambda: now)
    ranks = []
    for rank in (0, 1):
        connected = SimpleNamespace(connect=lambda rank=rank: OneOfTwo(rank, votes))
        monkeypatch.setattr(save_requests, 'Collective', connected)
        ranks.append(SaveRequests.start(LOG, [signal.SIGUSR2]))
    voted_at, saved_at, due_at = list[int](), list[int](), list[int]()
    for number in range(1, 101):
        n_before, began = len(votes), now
        if number in (20, 60):
            ranks[1].ask(signal.SIGUSR2)
            due_at.append(number)
        now = began + (secs if number > 1 else 0.0001)
        is_due = [ranks[0].is_due()]
        now = began + 10 * secs * number  # on the other rank
        is_due.append(ranks[1].is_due())
        now = began + (secs if number > 1 else 0.0001)
        assert is_due in ([False, False], [True, True])
        saved_at += [number] * is_due[0]
        voted_at += [number] * (len(votes) - n_before)
    assert max(later - earlier for earlier, later in pairwise(voted_at)) == most
    assert voted_at[:2] == [1, 2], 'the first iterations may be short, so votes become rarer step by step'
    assert all(later <= 2 * earlier for earlier, later in pairwise(voted_at))
    assert len(saved_at) == 2
    assert all(0 < saved - due <= most + 1 for saved, due in zip(saved_at, due_at, strict=True))
    for requests in ranks:
        requests.close()
