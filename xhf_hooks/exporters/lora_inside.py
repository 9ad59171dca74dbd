"""A ``PreTrainedModel`` with LoRA adapters on some of its parts, such as ``InternVL_V1_5`` of XTuner has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters.huggingface import HuggingFaceExporter, find_pretrained
from xhf_hooks.exporters.lora_adapter import adapters_in, trained_adapter
from xhf_hooks.exporters.lora_merge import MergedExporter
from xhf_hooks.registry import EXPORTERS

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@EXPORTERS.register_module()
class LoraInsideExporter(MergedExporter):
    """The complete model, each adapter merged into its part.

    The parts have no folder that they could be loaded from one by one, and what is trained beside the adapters
    (InternVL's ``mlp1``) must go out with them. XTuner's ``configs/internvl/v1_5/convert_to_official.py`` does the
    same.

    Args:
        lora: 'merge' is all that there is.

    Raises:
        OptionError: Another value was given.
        ModelError: A part is quantized, or has an adapter that cannot be merged.
    """

    options = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str = 'merge') -> None:
        path, pretrained = find_pretrained(model, module)
        adapters = adapters_in(pretrained)
        if lora != 'merge':
            raise OptionError(
                'lora',
                f"None or 'merge', because {type(pretrained).__name__} has adapters on {sorted(adapters)} and only "
                f'loads as a whole',
                lora,
            )
        _require_not_quantized(pretrained, adapters)
        HuggingFaceExporter.__init__(self, model, path)
        self._adapters = {below: trained_adapter(below, peft_model) for below, peft_model in adapters.items()}

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        try:
            _, pretrained = find_pretrained(model, module)
        except ModelError:
            return False
        return bool(adapters_in(pretrained))


def _require_not_quantized(pretrained: PreTrainedModel, adapters: dict[str, PeftModel]) -> None:
    whole = {type(pretrained).__name__: pretrained}
    for name, part in {**whole, **{path: m.get_base_model() for path, m in adapters.items()}}.items():
        quantized = getattr(part, 'quantization_method', None)
        if quantized is not None:
            raise ModelError(
                f'{name} is quantized ({quantized}), and an adapter cannot be merged into such weights without loss. '
                f'Train with quantization_llm=False and quantization_vit=False, or set module to one adapted part '
                f'({sorted(adapters)}) to save its adapter alone'
            )
