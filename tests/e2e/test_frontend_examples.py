"""Each script of configs/frontends trains on two processes, and what it saves is the model, complete."""

from __future__ import annotations

import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.helpers.model_folder import save_model
from tests.helpers.ranks import REPO_ROOT
from xhf_hooks.cli.verify import main

pytestmark = pytest.mark.modern_only
EXAMPLES = sorted((REPO_ROOT / 'configs' / 'frontends').glob('*.py'))


@pytest.mark.parametrize('script', EXAMPLES, ids=lambda script: script.stem)
def test_it_runs(script, tmp_path):
    base, out = save_model('llama', tmp_path / 'base'), tmp_path / 'out'
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--local-addr', 'localhost']
    command = [*launch, '--nproc_per_node', '2', str(script), str(base), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=REPO_ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert main([str(out / 'hf_model')]) == 0
    before, after = (load_file(folder / 'model.safetensors') for folder in (base, out / 'hf_model'))
    assert before.keys() == after.keys()
    assert any((before[name].float() != after[name].float()).any() for name in before)
