"""Model classes of a training script."""

from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from xhf_hooks.compat.transformers import converts_weights


class CounterConfig(PretrainedConfig):
    model_type = 'xhf_counter'


class CounterModel(PreTrainedModel):
    """Floats, integers and booleans, a buffer that is not saved and a weight that the class leaves out."""

    config_class = CounterConfig
    _keys_to_ignore_on_save = ('left_out',)
    _keys_to_ignore_on_load_missing = ('left_out',)

    def __init__(self, config: CounterConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.left_out = nn.Parameter(torch.ones(2))
        self.register_buffer('mean', torch.ones(2, dtype=torch.float64))
        self.register_buffer('steps', torch.tensor(7))
        self.register_buffer('mask', torch.tensor([True, False]))
        self.register_buffer('scratch', torch.ones(2), persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The constructor has set them."""


class OfTheScript(transformers.PreTrainedModel):
    """A class of a training script, whose tensors are there once built."""

    config_class = CounterConfig

    def _init_weights(self, module: nn.Module) -> None:
        pass


class HasWidth(OfTheScript):
    """Its config does not say all that ``from_pretrained(folder, width=...)`` and ``__init__`` must be given."""

    _tied_weights_keys = {'head.weight': 'embedding.weight'} if converts_weights() else ['head.weight']

    def __init__(self, config: CounterConfig, width: int) -> None:
        super().__init__(config)
        self.embedding, self.q_proj = nn.Embedding(6, width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 6, bias=False)
        self.register_buffer('mask', torch.ones(width), persistent=False)  # of which a save has nothing
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.q_proj(self.embedding(input_ids))))


class WithMore(LlamaForCausalLM):
    """Its save_pretrained writes a file and a field of its own, as those of many trainers' classes."""

    def save_pretrained(self, folder, **options):
        self.config.special = 'own'
        super().save_pretrained(folder, **options)
        Path(folder, 'more').mkdir()
        Path(folder, 'more', 'settings.json').write_text('"own"')
