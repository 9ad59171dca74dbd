"""Exports a ``PreTrainedModel`` with LoRA adapters on some parts, such as XTuner's ``InternVL_V1_5``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters.huggingface import HuggingFaceExporter, find_pretrained, quantization_of
from xhf_hooks.exporters.lora.adapter import adapters_in, trained_adapter
from xhf_hooks.exporters.lora.merge import MergedExporter
from xhf_hooks.registry import EXPORTERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@EXPORTERS.register_module()
class NestedLoraExporter(MergedExporter):
    """Writes the full model with each adapter merged into its part.

    The parts cannot be loaded separately, and other trained weights (InternVL's ``mlp1``) must be saved with them.
    XTuner's ``configs/internvl/v1_5/convert_to_official.py`` does the same.

    Args:
        lora: Only 'merge' is accepted.

    Raises:
        OptionError: Another value was given.
        ModelError: A part has an adapter that cannot be merged.
    """

    options = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str = 'merge') -> None:
        path, pretrained = find_pretrained(model, module)
        adapters = adapters_in(pretrained)
        if lora != 'merge':
            raise OptionError(
                'lora',
                f"None or 'merge', because {type(pretrained).__name__} has adapters on {sorted(adapters)}, which "
                f'cannot be loaded separately',
                lora,
            )
        HuggingFaceExporter.__init__(self, model, path)
        self._adapters = {below: trained_adapter(below, peft_model) for below, peft_model in adapters.items()}

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        try:
            _, pretrained = find_pretrained(model, module)
        except ModelError:
            return False
        return bool(adapters_in(pretrained))


def quantized_parts(pretrained: PreTrainedModel) -> dict[str, str]:
    """The quantization methods of the model and of its parts with adapters; unquantized ones are omitted."""
    parts = {type(pretrained).__name__: pretrained}
    parts.update((path, peft_model.get_base_model()) for path, peft_model in adapters_in(pretrained).items())
    methods = {name: quantization_of(part) for name, part in parts.items()}
    return {name: method for name, method in methods.items() if method is not None}
