"""What xhf-verify says of an adapter that peft would not load, or that does not fit the base model beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.fuzz_templates import make_model
from tests.helpers.model_folder import edit_json
from xhf_hooks.verify.folder import verify_folder


@pytest.fixture(scope='module')
def adapter(tmp_path_factory):
    """``model``, an adapter of all linear layers' kinds, and ``base``."""
    folder = tmp_path_factory.mktemp('adapter')
    make_model('adapter', folder)
    return folder


@pytest.fixture
def copy(adapter, tmp_path):
    folder = Path(shutil.copytree(adapter, tmp_path / 'copy'))
    edit_json(folder / 'model' / 'adapter_config.json', base_model_name_or_path=str(folder / 'base'))
    return folder


def problems(folder: Path) -> list[str]:
    return [f.text for f in verify_folder(folder / 'model').findings if f.kind == 'problem']


def test_a_good_one(copy):
    assert problems(copy) == []


@pytest.mark.parametrize(
    ('field', 'value', 'said'),
    [
        ('modules_to_save', ['lm_head'], 'modules_to_save names lm_head, but the folder has no such tensors'),
        ('modules_to_save', 'lm_head', "modules_to_save is 'lm_head', expected a list"),
        ('alpha_pattern', [0, 0], "alpha_pattern is '[0, 0]', expected an object"),
        ('rank_pattern', 7, "rank_pattern is '7', expected an object"),
        ('task_type', '7', 'peft cannot read it'),
        ('peft_type', None, 'peft_type is None, expected a string'),
        ('peft_type', [1], 'peft_type is [1], expected a string'),
    ],
)
def test_a_config_that_peft_refuses(copy, field, value, said):
    edit_json(copy / 'model' / 'adapter_config.json', **{field: value})
    (found,) = problems(copy)
    assert said in found


@pytest.mark.parametrize('base', ['a' * 5000, 'a\0b', '', None, 7])
def test_a_base_model_that_is_no_path(copy, base):
    edit_json(copy / 'model' / 'adapter_config.json', base_model_name_or_path=base)
    findings = verify_folder(copy / 'model').findings
    assert any(f.kind == 'unchecked' and 'is not on this machine' in f.text for f in findings)


def test_shapes_of_another_base_model(copy):
    file = copy / 'model' / 'adapter_model.safetensors'
    tensors = load_file(file)
    name = sorted(name for name in tensors if name.endswith('lora_B.weight'))[0]
    tensors[name] = torch.zeros(999, 2)
    save_file(tensors, file, {'format': 'pt'})
    (found,) = problems(copy)
    assert 'pairs do not fit' in found and '(999, 40), the base model has (24, 40)' in found


@pytest.mark.parametrize(
    ('changed', 'said'),
    [
        ({'target_modules': ['no_such_layer']}, 'peft cannot adapt'),
        ({'target_modules': ['q_proj']}, 'tensors unexpected'),
        ({'use_dora': True}, 'tensors missing'),
        ({'layers_to_transform': [0]}, 'tensors unexpected'),
    ],
)
def test_a_config_that_peft_makes_something_else_of(copy, changed, said):
    edit_json(copy / 'model' / 'adapter_config.json', **changed)
    (found,) = problems(copy)
    assert said in found
