"""A tiny model shaped like InternVL, with its code in its own folder as on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.helpers.models.zoo import NOISE_STD, ODD_DECODER, VISION_TOWER, fitted

if TYPE_CHECKING:
    import torch
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
        self.force_image_size = self.vision_config.image_size
        self.downsample_ratio = 0.5
        self.min_dynamic_patch = self.max_dynamic_patch = 1
        self.use_thumbnail = False

    def to_dict(self):
        output = super().to_dict()
        for name in ('vision_config', 'llm_config'):
            output[name] = getattr(self, name).to_dict()
        return output
"""
MODELING = """
import torch
from torch import nn
from transformers import CLIPVisionModel, LlamaForCausalLM, PreTrainedModel

from .configuration_tiny_internvl import TinyInternVLConfig


class TinyInternVisionModel(CLIPVisionModel):
    def __init__(self, config):
        super().__init__(config)
        # As in modeling_intern_vit.py
        self.dpr = [x.item() for x in torch.linspace(0, 0.1, config.num_hidden_layers)]


class TinyInternVLModel(PreTrainedModel):
    config_class = TinyInternVLConfig
    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config)
        config.llm_config._attn_implementation = 'eager'  # XTuner asks for flash_attention_2
        self.vision_model = TinyInternVisionModel(config.vision_config)
        self.language_model = LlamaForCausalLM(config.llm_config)
        seen, size = config.vision_config.hidden_size, config.llm_config.hidden_size
        self.mlp1 = nn.Sequential(nn.LayerNorm(seen), nn.Linear(seen, size), nn.GELU(), nn.Linear(size, size))
        self.post_init()

    def extract_feature(self, pixel_values):
        patches = self.vision_model(pixel_values).last_hidden_state[:, 1:]
        return self.mlp1(patches.mean(dim=1, keepdim=True))
"""
CODE = {'configuration_tiny_internvl.py': CONFIGURATION, 'modeling_tiny_internvl.py': MODELING}


def load_internvl(folder: Path) -> PreTrainedModel:
    """Load the model like ``InternVL_V1_5``. Makes the folder if it does not exist."""
    import torch
    from transformers import AutoModel

    if not folder.exists():
        make_internvl(folder)
    return AutoModel.from_pretrained(folder, trust_remote_code=True, torch_dtype=torch.float32)


def make_internvl(folder: Path, dtype: torch.dtype | None = None) -> None:
    """Make a folder with code, config and weights, but without a tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel

    folder.mkdir(parents=True)
    for name, code in CODE.items():
        (folder / name).write_text(code)
    auto_map = {
        'AutoConfig': 'configuration_tiny_internvl.TinyInternVLConfig',
        'AutoModel': 'modeling_tiny_internvl.TinyInternVLModel',
    }
    llm = {**fitted(ODD_DECODER), 'architectures': ['InternLM2ForCausalLM']}  # by which XTuner chooses the prompt
    config = {'vision_config': VISION_TOWER, 'llm_config': llm, 'auto_map': auto_map}
    (folder / 'config.json').write_text(json.dumps({**config, 'model_type': 'tiny_internvl'}))
    made = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = AutoModel.from_config(made, trust_remote_code=True)
        for parameter in model.parameters():
            parameter.data += NOISE_STD * torch.randn(parameter.shape)
    save_file(model.to(dtype).state_dict(), folder / 'model.safetensors', metadata={'format': 'pt'})
