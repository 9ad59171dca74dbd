"""Exports XTuner's RewardModel: a backbone ``llm`` without language-model head, and ``v_head``, ``(1, hidden)``.

As in ``RewardModel.to_hf`` (``xtuner/model/reward.py``), it becomes the sequence classifier of the backbone's family
with one label and the head as ``score``; for InternLM2, its reward model.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters.base import Exporter, ExportRequest, specs_below, unchanged_entries
from xhf_hooks.exporters.find_model import adapters_in, base_path, pretrained_in, quantization_of
from xhf_hooks.exporters.huggingface import HuggingFaceExport, HuggingFaceExporter
from xhf_hooks.exporters.lora import ADAPTER_FILES, AdapterExport, AdapterExporter, LoraExporter
from xhf_hooks.exporters.on_meta import build_on_meta
from xhf_hooks.exporters.traced import TracedTensor, traced
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.planning.types import TensorSpec

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

BACKBONE, HEAD = 'llm', 'v_head'
#: Prefix of peft's names.
_IN_ADAPTER = base_path('')


def reward_class(backbone: PreTrainedModel) -> type[PreTrainedModel]:
    """The class of the reward model for this backbone, chosen as in XTuner.

    Raises:
        ModelError: There is none.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    config, kind = backbone.config, type(backbone)
    own_code = sys.modules[kind.__module__]  # the base model's custom code, if it has any
    named = [str(value).rpartition('.')[2] for value in (getattr(config, 'auto_map', None) or {}).values()]
    for name in (name for name in named if name.endswith('ForRewardModel')):
        if hasattr(own_code, name):
            return getattr(own_code, name)
    if 'InternLM2' in kind.__name__:
        try:
            import xtuner.tools.model_converters.modeling_internlm2_reward.modeling_internlm2 as of_xtuner
        except ImportError as error:
            raise ModelError(
                f"{kind.__name__} needs XTuner's InternLM2ForRewardModel, which cannot be imported ({error}), or a "
                f'base model that has one, such as internlm2-1_8b-reward'
            ) from error
        return of_xtuner.InternLM2ForRewardModel
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    name = f'{kind.__name__.removesuffix("Model")}ForSequenceClassification'
    if hasattr(own_code, name):
        return getattr(own_code, name)
    raise ModelError(
        f'there is no class for a reward model with the backbone {kind.__name__}: transformers has no sequence '
        f'classifier for {type(config).__name__}, and {kind.__module__} has neither {name} nor a ...ForRewardModel in '
        f'auto_map. Set module to {BACKBONE!r} to save only the backbone, or register an exporter'
    )


def head_of(kind: type[PreTrainedModel]) -> str:
    """The name of the head in a :func:`reward_class`."""
    return 'v_head' if kind.__name__.endswith('ForRewardModel') else 'score'


class RewardExporter(LoraExporter):
    """Exports a reward model, an adapter of its backbone by default merged as in XTuner unless the base is quantized.

    Args:
        lora: One of LORA_MODES, if there is an adapter. Defaults to None: 'merge', or 'adapter' on a quantized base.
    """

    options: tuple[str, ...] = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str | None = None) -> None:
        self._reward_token_id = vars(model).get('reward_token_id')
        adapted = adapters_in(model).get(BACKBONE)
        if adapted is not None:
            quantized = quantization_of(adapted.get_base_model()) is not None
            super().__init__(model, BACKBONE, lora or ('adapter' if quantized else 'merge'))
        elif lora is not None:
            raise OptionError('lora', f'None, because {BACKBONE} has no adapter', lora)
        else:
            self.parts = {'': _HeadedExporter(model, BACKBONE, {}, self._reward_token_id)}
            self._model = self.parts['']._model

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        return (
            module is None
            and has_head(model)
            and (BACKBONE in pretrained_in(model) or super().accepts(model, BACKBONE))
        )

    def _merged(self, model: nn.Module, path: str, peft_model: PeftModel) -> Exporter[Any]:
        return _HeadedExporter(model, path, {'': peft_model}, self._reward_token_id)

    def _adapter(self, path: str, peft_model: PeftModel, adapter: str) -> AdapterExporter:
        return _HeadedAdapterExporter(path, peft_model, adapter)


class _HeadedExporter(HuggingFaceExporter):
    """Exports a backbone and its head as one model of :func:`reward_class`.

    Args:
        reward_token_id: The token whose score is the reward, for classes that use one, if the model has it as an
            attribute; else it is that of the run's config.
    """

    def __init__(
        self, model: nn.Module, path: str, adapters: Mapping[str, PeftModel], reward_token_id: int | None
    ) -> None:
        super().__init__(model, path, adapters)
        self._class = reward_class(self._model)
        self._head = head_of(self._class)
        self._reward_token_id = reward_token_id

    @property
    def written_class(self) -> type[PreTrainedModel]:
        return self._class

    def write_hf_assets(
        self, export: HuggingFaceExport, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]
    ) -> list[str]:
        warnings = super().write_hf_assets(export, folder, tokenizer, ())
        if self._head == 'score' and export.config.pad_token_id is None:
            warnings.append(
                'config.json has no pad_token_id: until it is set, transformers can only score single texts'
            )
        return warnings

    def own_tensors(self, specs: Sequence[TensorSpec]) -> dict[str, TracedTensor]:
        prefix = self._class.base_model_prefix
        own = {f'{prefix}.{name}': one for name, one in super().own_tensors(specs).items()}
        own.update(
            (f'{self._head}.{name}', traced(spec.name, spec.shape, TORCH_DTYPES[spec.dtype]))
            for name, spec in specs_below(HEAD, specs).items()
        )
        return own

    def written_config(self, own: Mapping[str, TracedTensor], request: ExportRequest) -> PretrainedConfig:
        config = super().written_config(own, request)
        config.architectures = [self._class.__name__]
        auto_map = getattr(config, 'auto_map', None)
        if self._head == 'score':
            config.num_labels = 1
            if auto_map and self._class.__module__ == type(self._model).__module__:
                module = self._class.__module__.rpartition('.')[2]
                auto_map['AutoModelForSequenceClassification'] = f'{module}.{self._class.__name__}'
            return config
        if auto_map:
            auto_map.pop('AutoModelForCausalLM', None)
        of_config = request.run_config.get('reward_token_id')
        if self._reward_token_id is not None:
            config.reward_token_id = self._reward_token_id
        elif isinstance(of_config, int):
            config.reward_token_id = of_config
        elif getattr(config, 'reward_token_id', None) is None:
            raise ModelError(
                f'{self._class.__name__} needs a reward_token_id; set it in the config of the run or of its RewardModel'
            )
        return config


class _HeadedAdapterExporter(AdapterExporter):
    """Exports the adapter of the sequence classifier, with the head in ``modules_to_save``.

    It loads with ``PeftModel.from_pretrained`` onto ``AutoModelForSequenceClassification.from_pretrained(base,
    num_labels=1)``; for InternLM2, onto its reward model.
    """

    def __init__(self, path: str, peft_model: PeftModel, adapter: str) -> None:
        super().__init__(path, peft_model, adapter)
        kind = reward_class(self._model)
        self._head, prefix = head_of(kind), kind.base_model_prefix
        self._base_prefix = prefix
        self._prefix = f'{_IN_ADAPTER}.{prefix}.'

    @property
    def _config(self) -> PeftConfig:
        config = super()._config
        config.task_type = 'SEQ_CLS' if self._head == 'score' else 'FEATURE_EXTRACTION'
        config.modules_to_save = [*(config.modules_to_save or ()), self._head]
        for option in ('target_modules', 'exclude_modules'):
            pattern = getattr(config, option, None)
            if isinstance(pattern, str):  # a pattern for full names, which now have one more component
                setattr(config, option, rf'{self._base_prefix}\.(?:{pattern})')
        return config

    def _build_base(self) -> PreTrainedModel:
        config = copy.deepcopy(self._model.config)
        config.num_labels = 1
        return build_on_meta(reward_class(self._model), config)

    def export(self, request: ExportRequest) -> AdapterExport:
        export = super().export(request)
        head = specs_below(HEAD, request.specs)
        entries = [
            replace(entry, hf_name=self._prefix + entry.hf_name.removeprefix(f'{_IN_ADAPTER}.'))
            for entry in export.entries
        ]
        named = {f'{_IN_ADAPTER}.{self._head}.{name}': spec for name, spec in head.items()}
        entries += unchanged_entries(named, request.dtype, ADAPTER_FILES)
        return replace(export, entries=tuple(entries))


def has_head(model: nn.Module) -> bool:
    """Whether there is a ``v_head`` beside ``llm``."""
    children = dict(model.named_children())  # getattr would also search llm
    return BACKBONE in children and isinstance(children.get(HEAD), nn.Linear)
