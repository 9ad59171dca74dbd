"""What a signal does besides asking for a save: what it did before, in its time."""

import logging
import os
import signal
from types import SimpleNamespace
from unittest import mock

import pytest

from xhf_hooks.background import save_on_signal
from xhf_hooks.background.save_on_signal import SaveRequests
from xhf_hooks.saves.telemetry import RunLog


@pytest.fixture(autouse=True)
def handlers():
    numbers = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def requests_of(*signals: str) -> SaveRequests:
    return SaveRequests(RunLog(logging.getLogger('test'), 'test'), signals)


def test_the_clock_requests_a_save_after_the_time_without_one(monkeypatch):
    """It is restarted by each save, and by what it has requested. No signal is handled."""
    now = [100.0]
    monkeypatch.setattr(save_on_signal, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    before = signal.getsignal(signal.SIGUSR2)
    requests = SaveRequests(RunLog(logging.getLogger('test'), 'test'), (), interval_secs=60)
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
    requests = requests_of('SIGUSR2')
    assert not requests.is_due(vote_now=True)
    signal.raise_signal(signal.SIGUSR2)
    assert len(called) == own_handler and requests.ending_signal is None
    assert [requests.is_due() for _ in range(3)] == [False, True, False], 'one iteration later'
    requests.close()
    assert signal.getsignal(signal.SIGUSR2) is before


def test_signals_take_their_effect_at_once_where_there_will_be_no_save():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    requests = requests_of('SIGINT')
    signal.raise_signal(signal.SIGINT)
    requests.close()
    with pytest.raises(KeyboardInterrupt):
        requests.end_process()


def test_a_forked_child_ends_as_ever():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    requests = requests_of('SIGTERM', 'SIGUSR2')
    with mock.patch.object(os, 'getpid', return_value=1):
        signal.raise_signal(signal.SIGUSR2)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert not requests.is_due(vote_now=True)
    requests.close()
