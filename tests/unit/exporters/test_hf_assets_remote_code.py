"""A model of trust_remote_code: its modelling code goes into the folder, which then loads on its own."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from tests.helpers.remote_code import use_modules_cache
from xhf_hooks.exporters import HuggingFaceExporter
from xhf_hooks.sources import source_for

CONFIGURATION = """
from transformers import PretrainedConfig


class RemoteConfig(PretrainedConfig):
    model_type = 'xhf_remote'

    def __init__(self, width=3, **kwargs):
        self.width = width
        super().__init__(**kwargs)
"""
MODELING = """
from transformers import PreTrainedModel

from .configuration_remote import RemoteConfig
from .remote_part import make_weight


class RemoteModel(PreTrainedModel):
    config_class = RemoteConfig

    def __init__(self, config):
        super().__init__(config)
        self.weight = make_weight(config.width)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, x):
        return x @ self.weight
"""
PART = """
import torch


def make_weight(width):
    return torch.nn.Parameter(torch.full((width, width), 0.5))
"""
CODE = {'configuration_remote.py': CONFIGURATION, 'modeling_remote.py': MODELING, 'remote_part.py': PART}


@pytest.fixture
def remote_base(tmp_path, monkeypatch):
    """A folder with its own modelling code in several files; transformers' copy of the code goes to tmp_path too."""
    use_modules_cache(tmp_path / 'modules', monkeypatch)
    base = tmp_path / 'remote_base'
    base.mkdir()
    for name, code in CODE.items():
        (base / name).write_text(code)
    auto_map = {'AutoConfig': 'configuration_remote.RemoteConfig', 'AutoModel': 'modeling_remote.RemoteModel'}
    (base / 'config.json').write_text(json.dumps({'model_type': 'xhf_remote', 'auto_map': auto_map, 'width': 5}))
    save_file({'weight': torch.rand(5, 5)}, base / 'model.safetensors', metadata={'format': 'pt'})
    return base


def test_remote_code_travels_with_the_folder(remote_base, tmp_path):
    model = AutoModel.from_pretrained(remote_base, trust_remote_code=True)
    before = model.config.to_dict()
    found = tmp_path / 'found'
    found.mkdir()
    exporter = HuggingFaceExporter(model, None)
    exporter.entries(source_for(model).specs(), None)
    assert exporter.write_hf_assets(found, None, ()) == []
    assert set(CODE) <= {path.name for path in found.iterdir()}
    assert model.config.to_dict() == before

    shutil.rmtree(remote_base)  # the new folder must be enough
    save_file(model.state_dict(), found / 'model.safetensors', metadata={'format': 'pt'})
    loaded = AutoModel.from_pretrained(found, trust_remote_code=True)
    assert type(loaded).__name__ == 'RemoteModel' and loaded.config.width == 5
    assert torch.equal(loaded.weight, model.weight)
