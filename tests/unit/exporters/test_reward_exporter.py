"""A reward model goes out as the sequence classifier that XTuner's ``RewardModel.to_hf`` builds, head included."""

import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.helpers.checks.compare import assert_loads_clean, assert_same_folder_tensors
from tests.helpers.checks.config_fields import assert_same_config
from tests.helpers.models.adapted import adapt, around
from tests.helpers.models.zoo import NOISE_STD, available, build
from tests.helpers.runs.engines import save_folder
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters import HuggingFaceExporter, exporter_for
from xhf_hooks.xtuner import RewardExporter

FAMILIES = [family for family in ('llama', 'qwen2', 'qwen3', 'mixtral', 'gemma2') if available(family)]


def reward_model(family: str, lora: dict | None = None, backbone: nn.Module | None = None) -> nn.Module:
    """XTuner's: ``llm`` is the causal model's own ``model``, ``v_head`` a linear layer to one number."""
    backbone = backbone or build(family).model
    head = nn.Linear(backbone.config.hidden_size, 1, bias=False)
    head.weight.data = NOISE_STD * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(2))
    if lora is not None:
        backbone = adapt(backbone, task_type='FEATURE_EXTRACTION', **lora)
    return around(llm=backbone, v_head=head)


def as_xtuner_saves_it(model: nn.Module, folder: Path) -> None:
    """The lines of ``RewardModel.to_hf`` (``xtuner/model/reward.py``), on a copy."""
    config = copy.deepcopy(model.llm.config)
    config.num_labels = 1
    classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.model.load_state_dict(model.llm.state_dict())
    classifier.score.load_state_dict(model.v_head.state_dict())
    classifier.save_pretrained(folder)


def assert_same_scores(classifier: nn.Module, model: nn.Module) -> None:
    """A classifier scores the last token, training all."""
    tokens = torch.tensor([[5, 9, 7]])
    trained = model.v_head(model.llm.eval()(input_ids=tokens)[0])[0]
    found = classifier.eval()(input_ids=tokens).logits[0]
    assert torch.allclose(found, trained[-1], atol=1e-6) and not torch.allclose(found, trained[0], atol=1e-6)


@pytest.mark.parametrize('family', FAMILIES)
def test_folder_is_xtuners(family, tmp_path):
    model = reward_model(family)
    as_xtuner_saves_it(model, tmp_path / 'expected')
    _, committed = save_folder(model, tmp_path / 'hf_model')
    assert_same_folder_tensors(tmp_path / 'expected', committed.path)
    assert_same_config(tmp_path / 'hf_model', tmp_path / 'expected')
    loaded = assert_loads_clean(committed.path, AutoModelForSequenceClassification)
    assert loaded.num_labels == 1 and loaded.config.id2label == {0: 'LABEL_0'}
    assert_same_scores(loaded, model)


def test_exporters_are_chosen():
    assert type(exporter_for(reward_model('llama'), None)) is RewardExporter
    assert type(exporter_for(reward_model('llama', {}), None)) is RewardExporter
    assert type(exporter_for(reward_model('llama'), 'llm')) is HuggingFaceExporter  # the backbone, as asked
    assert type(exporter_for(around(llm=build('llama')), None)) is HuggingFaceExporter


@pytest.mark.parametrize('targets', [r'layers\.0\..*_proj', 'all-linear'])
def test_adapter_alone_has_the_head(targets, tmp_path):
    build('llama').save_pretrained(tmp_path / 'base')
    backbone = AutoModelForCausalLM.from_pretrained(tmp_path / 'base').model
    model = reward_model('llama', dict(target_modules=targets), backbone)
    save_folder(model, tmp_path / 'hf_model', lora='adapter')
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'base', num_labels=1)
    loaded = PeftModel.from_pretrained(base, tmp_path / 'hf_model')
    assert_same_scores(loaded, model)
    loaded.save_pretrained(tmp_path / 'again')  # peft's own names and nothing lost
    assert_same_folder_tensors(tmp_path / 'again', tmp_path / 'hf_model')


def test_family_without_a_classifier():
    model = around(llm=build('whisper'), v_head=nn.Linear(35, 1))
    with pytest.raises(ModelError, match='there is no class for a reward model with the backbone WhisperFor'):
        exporter_for(model, None)
