"""Trainers of TRL on two ranks."""

from __future__ import annotations

import pytest

from tests.helpers.models.model_folder import save_model
from tests.trainers.compare import assert_saved, run

ENGINES = {'zero2': ('deepspeed', 2), 'zero3': ('deepspeed', 3), 'fsdp2': ('torch', None)}
RUNS = [('sft', 'zero3'), ('sft', 'fsdp2'), ('lora', 'zero3'), ('dpo', 'zero2'), ('dpo', 'zero3')]


@pytest.mark.parametrize('trainer, engine', RUNS)
def test_trl(tmp_path, trainer, engine):
    base, out = save_model('llama', tmp_path / 'base'), tmp_path / 'out'
    said = run('trl_run.py', trainer, engine, base, out)
    assert_saved(out, out / 'theirs', base, said, ENGINES[engine])
