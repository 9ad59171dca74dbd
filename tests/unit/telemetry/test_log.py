"""What the log says of a run's saves."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from xhf_hooks.telemetry import Progress, RunLog, log_preparations, log_save


@pytest.fixture()
def log(caplog):
    caplog.set_level(logging.INFO)
    return RunLog(logging.getLogger('test_report'), 'Door')


def test_what_will_be_saved_fits_in_a_terminal(log, caplog):
    """What, where, when and how, each in a row of 100 columns, after what MMEngine writes before a message."""
    plan = SimpleNamespace(placements=[0] * 20, files=[0], nbytes=6_000_000)
    log_preparations(
        log,
        plan,
        SimpleNamespace(left_out=[], notes=[]),
        when='every 80 iterations, at the end of training',
        how='positional writer, in the background; about 32 MB of extra memory on the busiest rank',
        where=Path('/data/work_dirs/llama3_8b_instruct_full_alpaca_zero3/20261122_222917/hf_model'),
    )
    (message,) = caplog.messages
    rows = f'11/22 22:29:19 - mmengine - INFO - {message}'.splitlines()
    assert max(map(len, rows)) <= 100
    assert [row.split()[0] for row in rows[1:]] == ['what', 'where', 'when', 'how']
    assert rows[1] == '    what   20 tensors, 6.0 MB in 1 file'


def test_what_a_save_has_cost_fits_in_a_terminal(log, caplog):
    stages = ('plan', 'staging', 'write', 'tally', 'commit')
    cost = SimpleNamespace(
        nbytes=812_000_000_000,
        seconds=123.456,
        stalled_secs=123.456,
        gbytes_per_sec=6.5,
        peak_extra_nbytes=32_000_000,
        stage_secs=dict.fromkeys(stages, 0.12) | {'write': 122.86},
    )
    path = Path('/data/work_dirs/run/20261122_222917/hf_model')
    log_save(log, SimpleNamespace(cost=cost, step=SimpleNamespace(label='iter_1000'), path=path, warnings=['slow']))
    warning, message = caplog.messages
    rows = f'11/22 22:29:19 - mmengine - INFO - {message}'.splitlines()
    assert warning == 'Door: slow' and max(map(len, rows)) <= 100
    assert message.startswith('Door: saved iter_1000 to hf_model, 812000.0 MB in 123.46 s\n')
    assert [row.split()[0] for row in rows[1:]] == ['cost', 'stages']


def test_a_long_save_tells_its_progress(log, caplog, monkeypatch):
    monkeypatch.setattr(Progress, 'interval_secs', 0.0)
    progress = Progress(log, 'iter_500', 3_000_000_000)
    for _ in range(2):
        progress.wrote(500_000_000)
    assert caplog.messages[-1] == 'Door: saving iter_500, 1.00 of 3.00 GB'
    monkeypatch.setattr(Progress, 'interval_secs', 60.0)
    progress.wrote(1)
    assert len(caplog.messages) == 2
