"""What the hook says of an adapter that was trained on other weights than those of its base."""

import pytest
import torch

from tests.helpers.runs.hook_runs import log_of
from tests.helpers.runs.toy_run import ToyLM, run_config, train


@pytest.mark.parametrize(
    ('lora', 'part', 'is_told'),
    [('adapter', 'q_proj', True), ('merge', 'q_proj', False), ('adapter', 'lora_', False), ('adapter', None, True)],
    ids=['weights of the base', 'merged', 'other weights', 'gone'],
)
def test_weights_that_load_from_puts_over_the_base_are_told(lora, part, is_told, tmp_path):
    model = {'lora': True, 'base': 'base'}
    state = {name: tensor for name, tensor in ToyLM(**model).state_dict().items() if part and part in name}
    file = tmp_path / 'stage1.pth'
    torch.save({'state_dict': state, 'meta': {}}, file)
    config = run_config(tmp_path / 'run', hook={'lora': lora}, stage=None, max_iters=1, model=model)
    if part is None:
        config['model']['pretrained_pth'] = '/gone.pth'
    else:
        config['load_from'] = str(file)
    said = log_of(train(config).log_dir)
    assert (f'the adapter was trained on base with the weights of {file}' in said) == (is_told and part is not None)
    assert ('/gone.pth: no such file or folder' in said) == (part is None)
