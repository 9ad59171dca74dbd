"""Two hooks of one run, and what they must not share."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.helpers.models.zoo.llamas import odd_llama
from xhf_hooks.errors import TargetError
from xhf_hooks.options import RunOptions
from xhf_hooks.saves.manager import CheckpointManager
from xhf_hooks.saves.telemetry import RunLog
from xhf_hooks.saves.unwrap import unwrap


class Run:
    pass


def saves_of(run: Run, folder: Path, url: str) -> CheckpointManager:
    log = RunLog(logging.getLogger('test'), 'test')
    return CheckpointManager(unwrap(odd_llama()), folder, RunOptions(upload_to=url), log, run=run)


def test_two_hooks_that_upload_to_the_same_place_are_refused(tmp_path):
    """Each would take it from the other at every save. Other names or URLs are fine, and so is a run after another."""
    run, url = Run(), (tmp_path / 'store').as_uri()
    one = saves_of(run, tmp_path / 'one' / 'hf_model', url)
    with pytest.raises(TargetError, match=f'{url}/hf_model is in use by another run of this process'):
        saves_of(run, tmp_path / 'two' / 'hf_model', f'{url}/')
    for folder, elsewhere in ((tmp_path / 'two' / 'merged', url), (tmp_path / 'two' / 'hf_model', f'{url}/two')):
        saves_of(run, folder, elsewhere).close()
    one.close()
    saves_of(run, tmp_path / 'two' / 'hf_model', url).close()
