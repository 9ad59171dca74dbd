"""Exports a peft ``PeftModel`` with a LoRA adapter: the trained model, or a part of it such as XTuner's ``llm``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from xhf_hooks.exporters.composite import CompositeExporter
from xhf_hooks.exporters.huggingface import pretrained_in
from xhf_hooks.exporters.lora.adapter import AdapterExporter, adapters_in, trained_adapter
from xhf_hooks.exporters.lora.merge import MergedExporter, base_path
from xhf_hooks.registry import EXPORTERS

if TYPE_CHECKING:
    from peft import PeftModel

#: Folder of the adapter beside a merged model. In the same folder, it would make from_pretrained load the base model.
ADAPTER_FOLDER = 'adapter'


@EXPORTERS.register_module()
class LoraExporter(CompositeExporter):
    """Writes the adapter, the merged model, or the merged model with the adapter in a subfolder.

    Args:
        lora: One of LORA_MODES.

    Raises:
        ModelError: There is not exactly one trainable LoRA adapter, or it cannot be merged.
    """

    options: tuple[str, ...] = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str = 'adapter') -> None:
        path, peft_model = _find_adapter(model, module)
        name = trained_adapter(path, peft_model)
        self.parts = {}
        if lora in ('merge', 'both'):
            self.parts[''] = self._merged(model, path, peft_model, name)
        if lora in ('adapter', 'both'):
            folder = ADAPTER_FOLDER if self.parts else ''
            self.parts[folder] = self._adapter(path, peft_model, name, alone=lora == 'adapter')
        self.base_dir = self.parts[''].base_dir

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        return _find_adapter(model, module) is not None

    def _merged(self, model: nn.Module, path: str, peft_model: PeftModel, adapter: str) -> MergedExporter:
        return MergedExporter(model, path, peft_model, adapter)

    def _adapter(self, path: str, peft_model: PeftModel, adapter: str, *, alone: bool) -> AdapterExporter:
        return AdapterExporter(path, peft_model, adapter, alone=alone)


def _find_adapter(model: nn.Module, module: str | None) -> tuple[str, PeftModel] | None:
    """The path and the PeftModel to export, by the rules of find_pretrained; None if another model is exported."""
    found = adapters_in(model)
    if module is not None:
        return next(((p, m) for p, m in found.items() if module in (p, base_path(p))), None)
    pretrained = pretrained_in(model)
    # An adapter inside a PreTrainedModel is exported with that model
    found = {p: m for p, m in found.items() if not any(p.startswith(f'{q}.'.removeprefix('.')) for q in pretrained)}
    if 'llm' in found and 'llm' not in pretrained:
        return 'llm', found['llm']
    if len(found) == len(pretrained) == 1:
        return next(iter(found.items()))
    return None
