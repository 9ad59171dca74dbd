"""TRL's SFTTrainer on two ranks."""

from __future__ import annotations

from tests.helpers.model_folder import save_model
from tests.trainers.compare import assert_saved, run


def test_trl(tmp_path):
    base, out = save_model('llama', tmp_path / 'base'), tmp_path / 'out'
    said = run('trl_sft.py', base, out)
    assert_saved(out, out / 'theirs', base, said)
