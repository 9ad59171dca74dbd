"""A projector like that of XTuner's ``model/modules/projector``, for environments without xtuner.

Its code is copied to the folder that it is saved to: one file, with only absolute imports.
"""

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN


class ProjectorConfig(PretrainedConfig):
    """Like XTuner's, but with sizes for tests."""

    model_type = 'projector'
    _auto_class = 'AutoConfig'

    def __init__(self, visual_hidden_size=35, llm_hidden_size=35, depth=2, hidden_act='gelu', bias=True, **kwargs):
        self.visual_hidden_size = visual_hidden_size
        self.llm_hidden_size = llm_hidden_size
        self.depth = depth
        self.hidden_act = hidden_act
        self.bias = bias
        super().__init__(**kwargs)


class ProjectorModel(PreTrainedModel):
    """Linear layers with activations between them, as ``model.0``, ``model.2`` and so on."""

    _auto_class = 'AutoModel'
    config_class = ProjectorConfig
    base_model_prefix = 'model'

    def __init__(self, config):
        super().__init__(config)
        modules = [nn.Linear(config.visual_hidden_size, config.llm_hidden_size, bias=config.bias)]
        for _ in range(1, config.depth):
            modules.append(ACT2FN[config.hidden_act])
            modules.append(nn.Linear(config.llm_hidden_size, config.llm_hidden_size, bias=config.bias))
        self.model = nn.Sequential(*modules)
        self.post_init()

    def forward(self, x):
        return self.model(x)
