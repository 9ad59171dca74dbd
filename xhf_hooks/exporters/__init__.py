"""Which tensors are written under which Hugging Face names. Importing this package registers the built-in exporters."""

from __future__ import annotations

from typing import Any

from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters.base import Exporter
from xhf_hooks.exporters.huggingface import HuggingFaceExporter
from xhf_hooks.exporters.lora.exporter import LoraExporter
from xhf_hooks.exporters.lora.nested import NestedLoraExporter
from xhf_hooks.exporters.lora.nested_quantized import QuantizedNestedLoraExporter
from xhf_hooks.exporters.xtuner.llava import LlavaExporter
from xhf_hooks.exporters.xtuner.reward import RewardExporter, RewardLoraExporter
from xhf_hooks.exporters.xtuner.sharded_moe import ShardedMoeExporter
from xhf_hooks.registry import EXPORTERS

__all__ = [
    'Exporter',
    'HuggingFaceExporter',
    'LlavaExporter',
    'LoraExporter',
    'NestedLoraExporter',
    'QuantizedNestedLoraExporter',
    'RewardExporter',
    'RewardLoraExporter',
    'ShardedMoeExporter',
    'exporter_for',
]


def exporter_for(model: nn.Module, module: str | None, **options: Any) -> Exporter:
    """The exporter of a trained model: the one registered last among those that accept it.

    Args:
        module: The option of that name; None lets the exporter find what to export.
        **options: Options for one kind of model, such as ``lora``; None where not given.

    Raises:
        ModelError: No exporter accepts the model.
        OptionError: An option was given that is not for this model.
    """
    accepting = [cls for cls in EXPORTERS.module_dict.values() if cls.accepts(model, module)]
    if not accepting:
        raise ModelError(
            f'no exporter accepts {type(model).__name__}. Looked for: {sorted(EXPORTERS.module_dict)}. '
            f'Its modules are {[name for name, _ in model.named_children()]}. Name the PreTrainedModel in it '
            f'with the option module, or register an exporter of your own (README, "A new model family")'
        )
    chosen = accepting[-1]
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in chosen.options:
            raise OptionError(
                name, f'None for this {type(model).__name__}, because {chosen.__name__} exports it', value
            )
    return chosen(model, module, **given)
