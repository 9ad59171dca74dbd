"""Each script of configs/frontends trains on two processes, and what it saves is the model, complete."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.model_folder import save_model
from tests.helpers.ranks import REPO_ROOT, run_ranks
from xhf_hooks.cli.verify import main

pytestmark = pytest.mark.modern_only
EXAMPLES = sorted((REPO_ROOT / 'configs' / 'frontends').glob('*.py'))
#: The one that torchrun itself starts; ranks of the others are forked from a process that has its imports done.
WITH_TORCHRUN = 'fsdp'


def run_script(arguments: list[str]) -> None:
    os.chdir(REPO_ROOT)
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name='__main__')


@pytest.mark.parametrize('script', EXAMPLES, ids=lambda script: script.stem)
def test_it_runs(script, tmp_path):
    base, out = save_model('llama', tmp_path / 'base'), tmp_path / 'out'
    if script.stem == WITH_TORCHRUN:
        launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--local-addr', 'localhost']
        command = [*launch, '--nproc_per_node', '2', str(script), str(base), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPO_ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
    else:
        run_ranks(run_script, 2, [str(script), str(base), str(out)], init=None)
    assert main([str(out / 'hf_model')]) == 0
    before, after = (load_file(folder / 'model.safetensors') for folder in (base, out / 'hf_model'))
    assert before.keys() == after.keys()
    assert any((before[name].float() != after[name].float()).any() for name in before)
