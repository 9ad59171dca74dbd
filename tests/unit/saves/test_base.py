"""The model that a run starts from is neither replaced nor deleted by it."""

import logging

import pytest
from torch import nn

from tests.helpers.models.adapted import adapted, around
from tests.helpers.models.zoo import build
from xhf_hooks import save_hf
from xhf_hooks.base_files import base_dirs_of
from xhf_hooks.errors import TargetError, XhfError
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.places.claim import claim_targets


def test_an_adapter_does_not_replace_its_base_which_is_named_through_a_link(tmp_path):
    (tmp_path / 'real').mkdir()
    (tmp_path / 'link').symlink_to('real')
    save_hf(build('llama'), tmp_path / 'real' / 'hf_model')
    model = adapted('llama')
    model.get_base_model().config._name_or_path = str(tmp_path / 'link' / 'hf_model')
    with pytest.raises(XhfError, match=r'hf_model is the base model .* set out_dir to another'):
        save_hf(model, tmp_path / 'real' / 'hf_model')
    assert (tmp_path / 'real' / 'hf_model' / 'model.safetensors').exists()


def test_each_part_of_a_model_has_a_base(tmp_path):
    """As LLaVA's llm and visual encoder in XTuner."""
    whole = around(llm=build('llama'), visual_encoder=build('qwen2'), projector=nn.Linear(1, 1))
    whole.llm.config._name_or_path, whole.visual_encoder.config._name_or_path = '/base/llm', '/base/vision'
    assert base_dirs_of(whole) == ['/base/llm', '/base/vision']


def test_the_folder_of_the_best_may_be_the_base_too(tmp_path):
    newest = CheckpointFolder(tmp_path / 'hf_model', 1)
    best = newest.beside('best')
    best.path.mkdir()
    with pytest.raises(TargetError, match=r'hf_model_best is the base model .* set out_dir to another'):
        claim_targets(logging.LoggerAdapter(logging.getLogger('test')), [newest, best], 1, [str(best.path)])
    newest.release()
