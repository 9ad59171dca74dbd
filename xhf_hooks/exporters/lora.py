"""A peft ``PeftModel`` with a LoRA adapter, alone or inside the trained model (XTuner's ``llm``)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.base import Exporter
from xhf_hooks.exporters.huggingface import pretrained_in
from xhf_hooks.exporters.lora_adapter import AdapterExporter
from xhf_hooks.exporters.lora_merge import MergedExporter, base_path
from xhf_hooks.records import ExportEntry, TensorSpec
from xhf_hooks.registry import EXPORTERS

if TYPE_CHECKING:
    from peft import PeftModel

LORA_MODES = ('adapter', 'merge', 'both')
#: Where the adapter goes beside a merged model. Not into the same folder: from_pretrained takes a folder with
#: an adapter_config.json for an adapter, and would load the base model and apply the adapter to it.
ADAPTER_FOLDER = 'adapter'


@EXPORTERS.register_module()
class LoraExporter(Exporter):
    """The adapter, the merged model, or the merged model with the adapter in a folder of its own.

    Args:
        lora: One of :data:`LORA_MODES`.

    Raises:
        ModelError: The adapter is of another kind than LoRA, nothing of it is trained, there are several, or it
            cannot be merged.
    """

    options = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str = 'adapter') -> None:
        path, peft_model = _find_adapter(model, module)
        name = _only_adapter(peft_model)
        if not any(parameter.requires_grad for parameter in peft_model.parameters()):
            raise ModelError(
                f'the adapter {name!r} at {path or "the root"!r} has no trained tensor; load it with '
                f'is_trainable=True, or make it with get_peft_model'
            )
        self._parts: dict[str, AdapterExporter | MergedExporter] = {}  # by their folders in the checkpoint
        if lora in ('merge', 'both'):
            self._parts[''] = MergedExporter(model, path, peft_model, name)
        if lora in ('adapter', 'both'):
            folder = ADAPTER_FOLDER if self._parts else ''
            self._parts[folder] = AdapterExporter(path, peft_model, name, alone=lora == 'adapter')
        self.base_dir = self._parts[''].base_dir

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        return _find_adapter(model, module) is not None

    def entries(self, specs: Sequence[TensorSpec], dtype: str | None) -> list[ExportEntry]:
        entries = []
        for folder, part in self._parts.items():
            for entry in part.entries(specs, dtype):
                entries.append(replace(entry, file_set=replace(entry.file_set, folder=folder)))
        left_out = [set(part.left_out) for part in self._parts.values()]
        self.left_out = tuple(spec.name for spec in specs if all(spec.name in names for names in left_out))
        return entries

    @property
    def n_parameters(self) -> int | None:
        return self._parts[''].n_parameters

    def base_tokenizer(self) -> Any | None:
        return self._parts[''].base_tokenizer()

    def write_sidecar(self, folder: Path, tokenizer: Any | None, stop_token_ids: Sequence[int]) -> list[str]:
        warnings = []
        for name, part in self._parts.items():
            (folder / name).mkdir(exist_ok=True)
            warnings += part.write_sidecar(folder / name, None if name else tokenizer, stop_token_ids)
        return warnings


def _find_adapter(model: nn.Module, module: str | None) -> tuple[str, PeftModel] | None:
    """The path and the PeftModel to export, by the rules for a PreTrainedModel; None when that is another."""
    peft_model = getattr(sys.modules.get('peft'), 'PeftModel', None)  # whoever built one has imported it
    if peft_model is None:
        return None
    found = {path: child for path, child in model.named_modules() if isinstance(child, peft_model)}
    if module is not None:
        return next(((p, m) for p, m in found.items() if module in (p, base_path(p))), None)
    pretrained = pretrained_in(model)
    if 'llm' in found and 'llm' not in pretrained:
        return 'llm', found['llm']
    if len(found) == len(pretrained) == 1:
        return next(iter(found.items()))
    return None


def _only_adapter(peft_model: PeftModel) -> str:
    """The adapter's name."""
    kinds = {name: str(config.peft_type.value) for name, config in peft_model.peft_config.items()}
    if list(kinds.values()) != ['LORA']:
        raise ModelError(f'expected a PeftModel with one adapter of type LORA, found {kinds}')
    return next(iter(kinds))
