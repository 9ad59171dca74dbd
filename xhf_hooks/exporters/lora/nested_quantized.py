"""Exports the trained tensors of a quantized model with LoRA adapters on some parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from xhf_hooks.errors import ModelError, OptionError
from xhf_hooks.exporters import hf_assets
from xhf_hooks.exporters.base import Exporter, specs_below, unchanged_entries
from xhf_hooks.exporters.composite import CompositeExporter
from xhf_hooks.exporters.huggingface import find_pretrained
from xhf_hooks.exporters.lora.adapter import AdapterExporter, adapters_in, trained_adapter
from xhf_hooks.exporters.lora.nested import NestedLoraExporter, quantized_parts
from xhf_hooks.exporters.tokenizer import write_tokenizer
from xhf_hooks.model import module_tensors
from xhf_hooks.planning.types import ExportEntry, FileSet, TensorSpec
from xhf_hooks.registry import EXPORTERS

#: ``trained.safetensors``, with the state-dict names of the model.
_TRAINED_FILES = FileSet(stem='trained', may_split=False)


@EXPORTERS.register_module()
class QuantizedNestedLoraExporter(CompositeExporter):
    """Writes ``<part>_adapter/`` for each adapter, and ``trained.safetensors`` with the other trained tensors.

    XTuner's QLoRA configs of InternVL train such models. To use the folder, load the unquantized base model, apply each
    adapter to its part with ``PeftModel.from_pretrained``, and load the rest with ``load_state_dict(strict=False)``.

    Args:
        lora: Only 'adapter' is accepted.

    Raises:
        OptionError: Another value was given.
        ModelError: An adapter is not LoRA, or not trainable.
    """

    options = ('lora',)

    def __init__(self, model: nn.Module, module: str | None, lora: str = 'adapter') -> None:
        path, pretrained = find_pretrained(model, module)
        adapters = adapters_in(pretrained)
        if lora != 'adapter':
            raise OptionError(
                'lora',
                f"None or 'adapter': {quantized_parts(pretrained)} is quantized, and an adapter cannot be merged into "
                f'such weights without loss. Train with quantization_llm=False and quantization_vit=False to merge',
                lora,
            )
        self.parts = {'': _TrainedRest(path, pretrained, sorted(adapters))}
        for below, peft_model in adapters.items():
            live = '.'.join(filter(None, (path, below)))
            name = trained_adapter(live, peft_model)
            self.parts[f'{below.replace(".", "_")}_adapter'] = AdapterExporter(live, peft_model, name, alone=False)
        self._pretrained = pretrained
        self.base_dir = hf_assets.base_dir_of(pretrained)
        self.notes = (
            f'{type(pretrained).__name__} is quantized, so only trained tensors are written: adapters for parts of '
            f'{self.base_dir or "the base model"} in {sorted(set(self.parts) - {""})}, the rest in trained.safetensors',
        )

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        return NestedLoraExporter.accepts(model, module) and bool(quantized_parts(find_pretrained(model, module)[1]))

    def base_tokenizer(self) -> Any | None:
        return hf_assets.base_tokenizer_of(self._pretrained)


class _TrainedRest(Exporter):
    """Trained tensors that are not in an adapter."""

    n_parameters = None

    def __init__(self, path: str, model: nn.Module, adapted: list[str]) -> None:
        self._path, self._base_dir = path, hf_assets.base_dir_of(model)
        self._names = {
            name
            for name, tensor in module_tensors(model)
            if tensor.requires_grad and not any(name.startswith(f'{part}.') for part in adapted)
        }

    @classmethod
    def accepts(cls, model: nn.Module, module: str | None) -> bool:
        return False

    def entries(self, specs: Sequence[TensorSpec], dtype: str | None) -> list[ExportEntry]:
        found = {name: spec for name, spec in specs_below(self._path, specs).items() if name in self._names}
        missing = self._names - set(found)
        if missing:
            raise ModelError(f'trained, but not among the tensors of the model: {sorted(missing)[:5]}')
        read = {spec.name for spec in found.values()}
        self.left_out = tuple(spec.name for spec in specs if spec.name not in read)
        return unchanged_entries(found, dtype, _TRAINED_FILES)

    def base_tokenizer(self) -> Any | None:
        return None

    def write_hf_assets(self, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]) -> list[str]:
        return [] if tokenizer is None else write_tokenizer(folder, tokenizer, self._base_dir)
