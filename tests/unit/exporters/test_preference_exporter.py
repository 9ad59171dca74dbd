"""DPO and ORPO: the policy goes out, never the reference model beside it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.helpers.adapted import adapted, around, merged_by_peft
from tests.helpers.compare import assert_same_folder_tensors
from tests.helpers.engines import save_folder
from tests.helpers.zoo import build
from xhf_hooks.exporters import HuggingFaceExporter, LoraExporter, exporter_for
from xhf_hooks.sources import source_for

REFERENCES = ('ref_llm', 'ref_model')


def trained(policy: nn.Module, reference: str | None = 'ref_llm') -> nn.Module:
    """XTuner's DPO; without a reference its ORPO, and its DPO that disables the adapter to get one.

    The reference comes first, and has the weights that training started from.
    """
    if reference is None:
        model = around(llm=policy)
        model.ref_llm = None
        return model
    frozen = build('llama', seed=5).requires_grad_(False)
    return around(**{reference: frozen}, llm=policy)


@pytest.mark.parametrize('reference', REFERENCES)
def test_full_policy(reference, tmp_path):
    policy = build('llama')
    policy.save_pretrained(tmp_path / 'expected')
    model = trained(policy, reference)
    save_folder(model, tmp_path / 'hf_model')
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'hf_model')
    exporter = exporter_for(model, None)
    exporter.entries(source_for(model).specs(), None)
    assert type(exporter) is HuggingFaceExporter
    assert set(exporter.left_out) == {f'{reference}.{name}' for name in policy.state_dict()}


@pytest.mark.parametrize('reference', [*REFERENCES, None])
@pytest.mark.parametrize('lora', ['adapter', 'merge', 'both'])
def test_policy_with_an_adapter(lora, reference, tmp_path):
    policy = adapted('llama')
    policy.save_pretrained(tmp_path / 'adapter')
    merged_by_peft(policy, tmp_path / 'merge')
    model = trained(policy, reference)
    save_folder(model, tmp_path / 'hf_model', lora=lora)
    assert_same_folder_tensors(tmp_path / ('adapter' if lora == 'adapter' else 'merge'), tmp_path / 'hf_model')
    if lora == 'both':
        assert_same_folder_tensors(tmp_path / 'adapter', tmp_path / 'hf_model' / 'adapter')
    exporter = exporter_for(model, None, lora=lora)
    exporter.entries(source_for(model).specs(), None)
    assert type(exporter) is LoraExporter
    of_reference = {name for name in model.state_dict() if not name.startswith('llm.')}
    assert of_reference <= set(exporter.left_out)
    assert len(of_reference) == (0 if reference is None else 21)
    if lora != 'adapter':
        assert set(exporter.left_out) == of_reference


def test_reference_that_is_a_copy_of_the_policy(tmp_path):
    """XTuner's ``create_reference_model``: equal weights, of which only the policy's have moved since."""
    policy = build('qwen2')
    model = around(llm=policy, ref_llm=copy.deepcopy(policy).requires_grad_(False))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 1
    policy.save_pretrained(tmp_path / 'expected')
    save_folder(model, tmp_path / 'hf_model')
    assert_same_folder_tensors(tmp_path / 'expected', tmp_path / 'hf_model')
