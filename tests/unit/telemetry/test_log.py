"""What the log says of a run's saves."""

from __future__ import annotations

import logging
import time

import pytest

from xhf_hooks.telemetry.log import RunLog, StallWatch

pytestmark = pytest.mark.modern_only  # it does not depend on the stack


@pytest.fixture()
def log(caplog):
    caplog.set_level(logging.INFO)
    return RunLog(logging.getLogger('test_report'), 'Door')


def save_of(seconds: float) -> float:
    """When a save began that lets training go on now."""
    return time.monotonic() - seconds


@pytest.mark.parametrize(
    'in_background, writer, option',
    [
        (False, 'positional', 'async_save=True'),
        (False, 'stream', 'out_dir that all ranks see'),
        (True, 'positional', "async_busy='skip'"),
    ],
)
def test_saves_that_take_too_much_of_training_are_warned_of_once(log, caplog, in_background, writer, option):
    watch = StallWatch(log, in_background=in_background, writer=writer)
    watch.saved(save_of(20) - 100)  # the first: there is no time between saves yet
    assert not caplog.messages
    watch.saved(save_of(20))
    (message,) = caplog.messages
    assert message.startswith('Door: training stalled for 20.0 s of the 100.0 s between two saves, 20%: set ')
    assert option in message
    watch.saved(save_of(20) + 100)
    assert len(caplog.messages) == 1


def test_saves_that_take_little_are_not_warned_of(log, caplog):
    watch = StallWatch(log, in_background=False, writer='positional')
    watch.saved(save_of(9) - 100)
    watch.saved(save_of(9))
    assert not caplog.messages
