"""Exports XTuner's Mixtral and DeepSeek-V2 with ``moe_implementation='shard'``: un-fuses the experts.

XTuner holds the experts of a layer in shards, ``experts.{shard}.w1w3`` of shape ``(E, 2 * ffn, hidden)`` and
``experts.{shard}.w2`` of shape ``(E, hidden, ffn)``, with E experts each (``ExpertShard`` in
``xtuner/model/transformers_models``). Names and order of the experts are those of ``get_origin_state_dict`` in
``xtuner/utils/handle_moe_load_and_save.py``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.base import ExportRequest
from xhf_hooks.exporters.find_model import base_path, find_pretrained, pretrained_in
from xhf_hooks.exporters.huggingface import HuggingFaceExporter
from xhf_hooks.exporters.on_meta import build_on_meta
from xhf_hooks.exporters.traced import TracedTensor
from xhf_hooks.model import model_class
from xhf_hooks.planning.types import TensorSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Official names of an expert's gate, up and down projection, by model class (XTuner's PARAM_NAME_MAPPING).
_EXPERT_PARTS = {
    'DeepseekV2ForCausalLM': ('gate_proj', 'up_proj', 'down_proj'),
    'MixtralForCausalLM': ('w1', 'w3', 'w2'),
}
#: Options that XTuner added to the official configs.
_XTUNER_OPTIONS = ('moe_implementation', 'expert_in_one_shard')
_FUSED = re.compile(r'(?P<experts>.+\.experts)\.(?P<shard>\d+)\.(?P<part>w1w3|w2)')


class ShardedMoeExporter(HuggingFaceExporter):
    """Writes the official model, with its names and a config without XTuner's options.

    XTuner's class with ``moe_implementation='origin'`` has the official names.
    """

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        if not any(map(is_sharded_moe, pretrained_in(model).values())):
            return False
        path, found = find_pretrained(model, module)
        return is_sharded_moe(found) and not path.endswith(base_path(''))  # below a PeftModel: left to LoraExporter

    def __init__(self, model: nn.Module, module: str | None) -> None:
        super().__init__(model, module)
        name = model_class(self._model).__name__
        if name not in _EXPERT_PARTS:
            raise ModelError(f'{name} has sharded experts; supported are {sorted(_EXPERT_PARTS)}')
        self._parts = _EXPERT_PARTS[name]

    def written_config(self, own: Mapping[str, TracedTensor], request: ExportRequest) -> PretrainedConfig:
        config = super().written_config(own, request)
        for name in _XTUNER_OPTIONS:
            config.__dict__.pop(name, None)
        return config

    def build_reference(
        self, config: PretrainedConfig, own: Mapping[str, TracedTensor], arguments: Mapping[str, Any] | None = None
    ) -> PreTrainedModel:
        config = copy.deepcopy(config)
        config.moe_implementation = 'origin'
        return build_on_meta(model_class(self._model), config)

    def model_to_ask(self, reference: PreTrainedModel) -> PreTrainedModel:
        return reference

    def own_tensors(self, specs: Sequence[TensorSpec]) -> dict[str, TracedTensor]:
        """The official names: each part of an expert is a range of the fused tensor."""
        own: dict[str, TracedTensor] = {}
        gate, up, down = self._parts
        for name, tensor in super().own_tensors(specs).items():
            fused = _FUSED.fullmatch(name)
            if fused is None:
                own[name] = tensor
                continue
            parts = (gate, up) if fused['part'] == 'w1w3' else (down,)
            n_experts, rows, columns = tensor.shape_and_dtype[0]
            views = tensor.view(n_experts, len(parts), rows // len(parts), columns)
            for i in range(n_experts):
                expert = f'{fused["experts"]}.{int(fused["shard"]) * n_experts + i}'
                own.update((f'{expert}.{part}.weight', views[i, which]) for which, part in enumerate(parts))
        return own


def is_sharded_moe(model: nn.Module) -> bool:
    """Whether the model has experts fused by XTuner, judging by the names of its tensors."""
    return any(_FUSED.fullmatch(name) for name, _ in model.named_parameters())
