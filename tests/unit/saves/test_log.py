"""What the log says of a run's saves."""

from __future__ import annotations

import logging

import pytest

from xhf_hooks.saves.telemetry import Progress, RunLog


@pytest.fixture()
def log(caplog):
    caplog.set_level(logging.INFO)
    return RunLog(logging.getLogger('test_report'), 'Door')


def test_a_long_save_tells_its_progress(log, caplog, monkeypatch):
    monkeypatch.setattr(Progress, 'interval_secs', 0.0)
    progress = Progress(log, 'iter_500', 3_000_000_000)
    for _ in range(2):
        progress.wrote(500_000_000)
    assert caplog.messages[-1] == 'Door: saving iter_500, 1.00 of 3.00 GB'
    monkeypatch.setattr(Progress, 'interval_secs', 60.0)
    progress.wrote(1)
    assert len(caplog.messages) == 2
