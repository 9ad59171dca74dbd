"""What a signal does besides asking for a save: what it did before, in its time."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from unittest import mock

import pytest

from xhf_hooks.background.save_on_signal import SaveRequests
from xhf_hooks.errors import XhfError
from xhf_hooks.telemetry import RunLog


class Ended(Exception):
    """Raised by the user's handler."""


def end(number, frame):
    raise Ended


@pytest.fixture(autouse=True)
def handlers():
    numbers = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def requests_of(*signals: str, wait_secs: float = 60) -> SaveRequests:
    return SaveRequests(RunLog(logging.getLogger('test'), 'test'), signals=signals, wait_secs=wait_secs)


@pytest.mark.parametrize('own_handler', [False, True])
def test_training_goes_on_after_sigusr2(own_handler):
    called = []
    before = (lambda *args: called.append(args)) if own_handler else signal.SIG_DFL  # which would kill
    signal.signal(signal.SIGUSR2, before)
    requests = requests_of('SIGUSR2')
    assert not requests.is_due(at_once=True)
    signal.raise_signal(signal.SIGUSR2)
    assert len(called) == own_handler and not requests.must_end
    assert [requests.is_due() for _ in range(3)] == [False, True, False], 'one iteration later'
    requests.close()
    assert signal.getsignal(signal.SIGUSR2) is before


def test_sigterm_takes_its_effect_after_the_save():
    signal.signal(signal.SIGTERM, end)
    requests = requests_of('SIGTERM')
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # a scheduler sends it to torchrun, which sends it on
    assert requests.must_end and requests.is_due(at_once=True)
    with pytest.raises(Ended):
        requests.end_process()
    requests.close()


def test_a_default_handler_gets_the_signal_again():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    requests = requests_of('SIGTERM')
    signal.raise_signal(signal.SIGTERM)
    with mock.patch.object(os, 'kill') as kill:
        requests.end_process()
    assert kill.call_args_list == [mock.call(os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_lets_training_go_on_is_kept():
    called = []
    signal.signal(signal.SIGTERM, lambda *args: called.append('user'))
    requests = requests_of('SIGTERM', wait_secs=0.2)
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
        assert requests.is_due(at_once=True)
        requests.end_process()
    assert called == ['user', 'user'] and not requests.must_end
    requests.end_process()
    time.sleep(0.4)
    assert called == ['user', 'user'], 'both saves were made in time'
    requests.close()


def test_no_save_in_time_ends_the_process_without(caplog):
    signal.signal(signal.SIGTERM, end)
    requests = requests_of('SIGTERM', wait_secs=0.1)
    with pytest.raises(Ended):
        signal.raise_signal(signal.SIGTERM)
        assert requests.must_end
        time.sleep(60)
    assert 'no save was made within exit_wait_secs' in caplog.text
    requests.close()


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


def test_training_outside_of_the_main_thread_is_refused():
    found: list[Exception] = []

    def build() -> None:
        try:
            requests_of('SIGTERM')
        except XhfError as error:
            found.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert len(found) == 1 and 'main thread' in str(found[0])
