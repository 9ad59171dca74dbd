"""What a signal does besides asking for a save: what it did before, in its time."""

from __future__ import annotations

import os
import signal
import threading
import time
from unittest import mock

import pytest

from xhf_hooks.background.save_on_signal import SignalRequests
from xhf_hooks.errors import OptionError

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


class Ended(Exception):
    """Raised by the user's handler."""


@pytest.fixture(autouse=True)
def handlers():
    numbers = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    signal.raise_signal(number)


def test_training_goes_on_after_sigusr2():
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # which would kill
    requests = SignalRequests(['SIGUSR2'], 60, lambda: None)
    assert requests.asked is None
    send(signal.SIGUSR2)
    assert requests.asked == 'SIGUSR2' and not requests.must_end
    requests.take()
    assert requests.asked is None
    requests.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_the_users_handler_of_sigusr2_is_called_too():
    called = []
    signal.signal(signal.SIGUSR2, lambda *args: called.append(args))
    requests = SignalRequests(['SIGUSR2'], 60, lambda: None)
    send(signal.SIGUSR2)
    assert len(called) == 1 and requests.asked == 'SIGUSR2'
    requests.close()


def test_sigterm_takes_its_effect_after_the_save():
    def end(number, frame):
        raise Ended

    signal.signal(signal.SIGTERM, end)
    requests = SignalRequests(['SIGTERM'], 60, lambda: None)
    send(signal.SIGTERM)
    send(signal.SIGTERM)  # a scheduler sends it to torchrun, which sends it on
    assert requests.asked == 'SIGTERM' and requests.must_end
    requests.take()
    with pytest.raises(Ended):
        requests.end()
    requests.close()


def test_a_default_handler_gets_the_signal_again():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    requests = SignalRequests(['SIGTERM'], 60, lambda: None)
    send(signal.SIGTERM)
    with mock.patch.object(os, 'kill') as kill:
        requests.end()
    assert kill.call_args_list == [mock.call(os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_lets_training_go_on_is_kept():
    called = []
    signal.signal(signal.SIGTERM, lambda *args: called.append('user'))
    requests = SignalRequests(['SIGTERM'], 60, lambda: None)
    for _ in range(2):
        send(signal.SIGTERM)
        requests.take()
        requests.end()
    assert called == ['user', 'user'] and not requests.must_end
    requests.end()
    assert called == ['user', 'user']
    requests.close()


def test_no_save_in_time_ends_the_process_without():
    def end(number, frame):
        raise Ended

    signal.signal(signal.SIGTERM, end)
    late = []
    requests = SignalRequests(['SIGTERM'], 0.1, lambda: late.append(1))
    with pytest.raises(Ended):
        send(signal.SIGTERM)
        assert requests.must_end and not late
        time.sleep(60)
    assert late == [1]
    requests.close()


def test_a_save_in_time_is_not_late():
    called, late = [], []
    signal.signal(signal.SIGTERM, lambda *args: called.append(args))
    requests = SignalRequests(['SIGTERM'], 0.2, lambda: late.append(1))
    send(signal.SIGTERM)
    requests.take()
    requests.end()
    time.sleep(0.4)
    assert len(called) == 1 and late == []
    requests.close()


def test_signals_take_their_effect_at_once_where_there_will_be_no_save():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    requests = SignalRequests(['SIGINT'], 60, lambda: None)
    send(signal.SIGINT)
    requests.close()
    with pytest.raises(KeyboardInterrupt):
        requests.end()


def test_a_forked_child_ends_as_ever():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    requests = SignalRequests(['SIGTERM', 'SIGUSR2'], 60, lambda: None)
    with mock.patch.object(os, 'getpid', return_value=1):
        send(signal.SIGUSR2)
        assert requests.asked is None
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
    requests.close()


def test_training_outside_of_the_main_thread_is_refused():
    found: list[Exception] = []

    def build() -> None:
        try:
            SignalRequests(['SIGTERM'], 60, lambda: None)
        except OptionError as error:
            found.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    assert len(found) == 1 and 'main thread' in str(found[0])
