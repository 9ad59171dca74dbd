"""Each script of configs/frontends trains on two processes, and what it saves is the model, complete."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.helpers.model_folder import save_model
from tests.helpers.ranks import REPO_ROOT, run_program
from xhf_hooks.cli.verify import main

EXAMPLES = sorted((REPO_ROOT / 'configs' / 'frontends').glob('*.py'))


@pytest.mark.parametrize('script', EXAMPLES, ids=lambda script: script.stem)
def test_it_runs(script, tmp_path):
    base, out = save_model('llama', tmp_path / 'base'), tmp_path / 'out'
    for done in run_program(script, base, out, world_size=2):
        assert done.returncode == 0, done.stderr[-3000:]
    assert main([str(out / 'hf_model')]) == 0
    before, after = (load_file(folder / 'model.safetensors') for folder in (base, out / 'hf_model'))
    assert before.keys() == after.keys()
    assert any((before[name].float() != after[name].float()).any() for name in before)
