"""Checkpoints of XTuner V1 with fused experts: where V1 is installed, it says which tensors of a folder these are."""

from __future__ import annotations

import json
import sys
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.checks.compare import assert_loads_clean, assert_same_folder_tensors
from tests.helpers.checks.converted import config_of, convert, refused
from tests.helpers.models import xtuner_v1, zoo
from tests.helpers.models.model_folder import edit_json
from tests.helpers.runs.made_checkpoint import save_dcp

pytestmark = pytest.mark.modern_only  # the stand-in has Qwen3's names


@pytest.fixture
def folders(tmp_path):
    """A checkpoint of V1, in fp32, and the folder of transformers with its weights, in bfloat16."""
    zoo.build('qwen3_moe').to(torch.bfloat16).save_pretrained(tmp_path / 'trained')
    state = xtuner_v1.of_folder(tmp_path / 'trained').float().state_dict()
    assert any('fused_w1w3' in name for name in state)
    return save_dcp({'model': state}, tmp_path / 'ckpt-step-5' / 'weights'), tmp_path / 'trained'


@pytest.mark.parametrize('options', [(), ('--dtype', 'bfloat16')])
def test_where_v1_is_installed_it_splits_them(folders, tmp_path, capsys, options):
    weights, trained = folders
    with xtuner_v1.imported():
        out = convert(weights, tmp_path / 'out', '--base', trained, *options)
    assert_same_folder_tensors(out, trained)
    assert_loads_clean(out, AutoModelForCausalLM)
    assert dict(config_of(out)) == dict(config_of(trained))
    assert 'fp32_keys_pattern, are not applied' in capsys.readouterr().err
    assert json.loads((out / 'xhf_manifest.json').read_text())['iteration'] == 5


def test_where_it_is_not_or_cannot_they_are_refused(folders, tmp_path, capsys):
    weights, trained = folders

    def refusal(*options):
        return refused(capsys, weights, tmp_path / 'out', '--base', trained, *options)

    with mock.patch.dict(sys.modules, {'xtuner.v1.model': None}):
        line = refusal()
        assert 'layers.0.experts.fused_w1w3.weight' in line and 'install XTuner V1' in line
    with xtuner_v1.imported():
        assert "None or 'bfloat16'" in refusal('--dtype', 'float32')
        assert 'XTuner V1 says what was trained' in refusal('--architecture', 'Qwen3MoeForCausalLM')
        with mock.patch.object(sys.modules['xtuner.v1.model'], 'get_model_config_from_hf', side_effect=ValueError('x')):
            assert 'XTuner V1 cannot build the model of its config.json (ValueError: x)' in refusal()
        edit_json(trained / 'config.json', auto_map={'AutoConfig': 'configuration_own.OwnConfig'})
        assert '--trust-remote-code' in refusal()
