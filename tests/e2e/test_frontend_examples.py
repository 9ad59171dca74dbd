"""Each script of configs/frontends trains on two processes, and what it saves is the model, complete."""

import json

import pytest
from safetensors.torch import load_file

from tests.helpers.models.model_folder import save_model
from tests.helpers.ranks.launch import REPO_ROOT, run_program
from xhf_hooks.offline.commands.verify import main

EXAMPLES = sorted((REPO_ROOT / 'configs' / 'frontends').glob('*.py'))


@pytest.mark.parametrize('script', EXAMPLES, ids=lambda script: script.stem)
def test_it_runs(script, tmp_path):
    base, out = save_model('llama', tmp_path / 'base'), tmp_path / 'out'
    ranks = run_program(script, base, out, world_size=2)
    for done in ranks:
        assert done.returncode == 0, done.stderr[-3000:]
    if 'trainer' in script.stem:  # logging is not set up, and Trainer turns use_cache off while it trains
        assert ['HFCheckpointCallback: saved iter_4 to hf_model' in done.stderr for done in ranks] == [True, False]
        for name in ('config.json', 'generation_config.json'):
            used = [json.loads((folder / name).read_text()).get('use_cache') for folder in (base, out / 'hf_model')]
            assert used[0] == used[1]
    assert main([str(out / 'hf_model')]) == 0
    before, after = (load_file(folder / 'model.safetensors') for folder in (base, out / 'hf_model'))
    assert before.keys() == after.keys()
    assert any((before[name].float() != after[name].float()).any() for name in before)
