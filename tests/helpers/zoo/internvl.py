"""A tiny model shaped like InternVL, with its code in its own folder as on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.helpers.zoo import NOISE_STD, ODD_DECODER, VISION_TOWER

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIGURATION = """
from transformers import CLIPVisionConfig, LlamaConfig, PretrainedConfig


class TinyInternVLConfig(PretrainedConfig):
    model_type = 'tiny_internvl'
    is_composition = True

    def __init__(self, vision_config=None, llm_config=None, **kwargs):
        super().__init__(**kwargs)
        self.vision_config = CLIPVisionConfig(**(vision_config or {}))
        self.llm_config = LlamaConfig(**(llm_config or {}))

    def to_dict(self):
        output = super().to_dict()
        for name in ('vision_config', 'llm_config'):
            output[name] = getattr(self, name).to_dict()
        return output
"""
MODELING = """
from torch import nn
from transformers import CLIPVisionModel, LlamaForCausalLM, PreTrainedModel

from .configuration_tiny_internvl import TinyInternVLConfig


class TinyInternVLModel(PreTrainedModel):
    config_class = TinyInternVLConfig

    def __init__(self, config):
        super().__init__(config)
        self.vision_model = CLIPVisionModel(config.vision_config)
        self.language_model = LlamaForCausalLM(config.llm_config)
        size = config.llm_config.hidden_size
        self.mlp1 = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.GELU(), nn.Linear(size, size))
        self.post_init()
"""
CODE = {'configuration_tiny_internvl.py': CONFIGURATION, 'modeling_tiny_internvl.py': MODELING}


def load_internvl(folder: Path) -> PreTrainedModel:
    """Load the model like ``InternVL_V1_5``. Makes the folder if it does not exist."""
    import torch
    from transformers import AutoModel

    if not folder.exists():
        folder.mkdir(parents=True)
        for name, code in CODE.items():
            (folder / name).write_text(code)
        auto_map = {
            'AutoConfig': 'configuration_tiny_internvl.TinyInternVLConfig',
            'AutoModel': 'modeling_tiny_internvl.TinyInternVLModel',
        }
        config = {'vision_config': VISION_TOWER, 'llm_config': ODD_DECODER, 'auto_map': auto_map}
        (folder / 'config.json').write_text(json.dumps({**config, 'model_type': 'tiny_internvl'}))
        _save_weights(folder)
    return AutoModel.from_pretrained(folder, trust_remote_code=True, torch_dtype=torch.float32)


def _save_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = AutoModel.from_config(config, trust_remote_code=True)
        for parameter in model.parameters():
            parameter.data += NOISE_STD * torch.randn(parameter.shape)
    save_file(model.state_dict(), folder / 'model.safetensors', metadata={'format': 'pt'})
