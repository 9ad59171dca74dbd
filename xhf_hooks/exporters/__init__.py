"""Maps a model's tensors to Hugging Face names."""

from __future__ import annotations

from typing import Any

from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters.base import Export, Exporter, ExportRequest
from xhf_hooks.exporters.huggingface import HuggingFaceExporter
from xhf_hooks.exporters.lora import LoraExporter, NestedLoraExporter
from xhf_hooks.registry import EXPORTERS

__all__ = [
    'Export',
    'ExportRequest',
    'Exporter',
    'HuggingFaceExporter',
    'LoraExporter',
    'NestedLoraExporter',
    'exporter_for',
]

#: This package's own, in the order in which they are asked whether they accept a model, after registered ones.
BUILT_IN: tuple[type[Exporter[Any]], ...] = (NestedLoraExporter, LoraExporter, HuggingFaceExporter)


def exporter_for(
    model: nn.Module,
    module: str | None,
    carry_base: str | None = None,
    **options: Any,
) -> Exporter:
    """The exporter of a trained model: the first that accepts it (:mod:`xhf_hooks.registry`).

    Args:
        module: The option ``module``; None: the exporter finds the model to export.
        carry_base: The option ``carry_base``. Only complete models of transformers have what it copies.
        **options: Options for some kinds of models, such as ``lora``; None if not given.

    Raises:
        ModelError: No exporter accepts the model.
        OptionError: An option does not apply to this model.
    """
    asked = (*EXPORTERS.last_first(), *BUILT_IN)
    chosen = next((exporter for exporter in asked if exporter.accepts(model, module)), None)
    if chosen is None:
        raise ModelError(
            f'{type(model).__name__} is no PreTrainedModel of transformers and holds none; looked at it and below '
            f'{[name for name, _ in model.named_children()]}. For another kind of model, register an exporter: '
            f'docs/extending.md'
        )
    given = {name: value for name, value in options.items() if value is not None}
    for name in (name for name in given if name not in chosen.options):
        if name == 'lora':
            reason = f'None: that needs a LoRA adapter of peft; {type(model).__name__} has none'
            raise OptionError(name, reason, given[name])
        reason = f'because {chosen.__name__}, which exports this {type(model).__name__}, has no {name}'
        raise OptionError(name, f'None, {reason}', given[name])
    exporter = chosen(model, module, **given)
    if carry_base is not None and not exporter.writes_whole_model:
        reason = f'None, because {chosen.__name__} writes no complete model here, such as an adapter alone'
        raise OptionError('carry_base', reason, carry_base)
    return exporter
