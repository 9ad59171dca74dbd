"""What a signal does besides asking for a save: what it did before, in its time."""

import logging
import os
import signal
from unittest import mock

import pytest

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


@pytest.mark.parametrize('own_handler', [False, True])
def test_training_goes_on_after_sigusr2(own_handler):
    called = []
    before = (lambda *args: called.append(args)) if own_handler else signal.SIG_DFL  # which would kill
    signal.signal(signal.SIGUSR2, before)
    requests = requests_of('SIGUSR2')
    assert not requests.is_due(at_once=True)
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
    assert not requests.is_due(at_once=True)
    requests.close()
