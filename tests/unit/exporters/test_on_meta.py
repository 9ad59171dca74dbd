"""Models on the meta device, and the config that their classes are given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.models.families import MODELS
from tests.helpers.models.zoo import build
from tests.helpers.runs.engines import save_folder
from xhf_hooks.exporters.on_meta import call_on_meta


class WithRates(nn.Module):
    """As InternVL's vision model: ``[x.item() for x in torch.linspace(0, config.drop_path_rate, n_layers)]``."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 2) for rate in torch.linspace(0, 0.1, 2) if rate.item() < 1])
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer('n_steps', torch.tensor(7))
        self.register_buffer('none', None)
        if tied:
            self.layers[1].weight = self.layers[0].weight


def test_a_class_that_reads_values_while_it_is_built():
    model = call_on_meta(WithRates)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == {
        **{f'layers.{n}.weight': (2, 3) for n in range(2)},
        **{f'layers.{n}.bias': (2,) for n in range(2)},
        'frozen': (2,),
        'n_steps': (),
    }
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert model.layers[0].weight is model.layers[1].weight
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ['frozen']
    assert not nn.Linear(1, 1).weight.is_meta  # everybody else's parameters are where they were


def test_a_class_that_cannot_be_built_says_why():
    def build_wrong() -> nn.Module:
        raise KeyError('hidden_size')

    with pytest.raises(KeyError, match='hidden_size'):
        call_on_meta(build_wrong)


def test_a_model_that_save_pretrained_has_saved_before(tmp_path):
    """With transformers 4.48, it resets in the live config that the parts' attention has been chosen."""
    model = build('donut', models=MODELS)
    model.save_pretrained(tmp_path / 'expected')
    save_folder(model, tmp_path / 'hf_model')
    names = ('model.safetensors', 'config.json')
    assert all((tmp_path / 'hf_model' / n).read_bytes() == (tmp_path / 'expected' / n).read_bytes() for n in names)
