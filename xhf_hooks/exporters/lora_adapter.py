"""Exports a LoRA adapter like peft's ``save_pretrained``, without a state dict of the full model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.errors import ModelError
from xhf_hooks.exporters import hf_assets
from xhf_hooks.exporters.base import Exporter, specs_below, unchanged_entries
from xhf_hooks.exporters.tokenizer import write_tokenizer
from xhf_hooks.format.text import counted
from xhf_hooks.model import input_embedding, model_class, module_tensors, without_wrappers
from xhf_hooks.planning.types import ExportEntry, FileSet, TensorSpec

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn

#: peft's SAFETENSORS_WEIGHTS_NAME; peft reads no other file.
ADAPTER_FILES = FileSet(stem='adapter_model', may_split=False)


class AdapterExporter(Exporter):
    """``adapter_config.json``, ``adapter_model.safetensors`` and the model card of the adapter.

    peft's ``get_peft_model_state_dict`` selects and renames the tensors (``modules_to_save``, trained biases, resized
    embeddings). It uses names only, so it works on specs.

    Args:
        path: Path of the PeftModel in the trained model.
        alone: No merged model is written beside it; :meth:`entries` then raises a ModelError if a trained tensor
            would be lost.
    """

    def __init__(self, path: str, peft_model: PeftModel, *, alone: bool) -> None:
        self._path, self._peft_model, self._alone = path, peft_model, alone
        self._adapter = trained_adapter(peft_model)
        self._model = peft_model.get_base_model()
        self._config = peft_model.peft_config[self._adapter]
        self._embedding_rows: int | None = None  # known after entries()
        self.base_dir = hf_assets.base_dir_of(self._model)

    def entries(self, specs: Sequence[TensorSpec], dtype: str | None) -> list[ExportEntry]:
        from peft import get_peft_model_state_dict

        # peft uses module paths, and FSDP1 adds components to them
        live = {without_wrappers(name): name for name, _ in module_tensors(self._peft_model, as_wrapped=True)}
        own = specs_below(self._path, specs)
        by_path = {live[name]: spec for name, spec in own.items()}
        found = get_peft_model_state_dict(self._peft_model, state_dict=by_path, adapter_name=self._adapter)
        found = {without_wrappers(name): spec for name, spec in found.items()}
        read = {spec.name for spec in found.values()}
        tensors, embedding = module_tensors(self._peft_model), input_embedding(self._model)
        self._embedding_rows = next((own[name].shape[0] for name, tensor in tensors if tensor is embedding), None)
        trained = {name for name, tensor in tensors if tensor.requires_grad}
        lost = {spec.name for name, spec in own.items() if name in trained} - read
        if self._alone and lost:
            raise ModelError(
                f'{counted(len(lost), "trained tensor")} outside of the adapter would be lost: {sorted(lost)[:5]}. '
                f"Name their modules in the LoraConfig's modules_to_save, freeze them, or set lora to 'merge'"
            )
        self.left_out = tuple(spec.name for spec in specs if spec.name not in read)
        return unchanged_entries(found, dtype, ADAPTER_FILES)

    def base_tokenizer(self) -> Any | None:
        return hf_assets.base_tokenizer_of(self._model)

    def write_hf_assets(self, folder: Path, tokenizer: Any | None, eos_token_ids: Sequence[int]) -> list[str]:
        self._peft_model.create_or_update_model_card(str(folder))
        config = copy.copy(self._config)  # a deep copy could change the order of sets
        if config.base_model_name_or_path is None:  # as in peft's save_pretrained
            config.base_model_name_or_path = self._model.__dict__.get('name_or_path') or None
        config.inference_mode = True
        auto_mapping = None
        if config.task_type is None:  # then AutoPeftModel reads the class from here
            kind = model_class(self._model)
            auto_mapping = {'base_model_class': kind.__name__, 'parent_library': kind.__module__}
        config.save_pretrained(folder, auto_mapping_dict=auto_mapping)
        hf_assets.require_vocabulary(tokenizer, self._embedding_rows)
        warnings = [] if tokenizer is None else write_tokenizer(folder, tokenizer, self.base_dir)
        if not config.base_model_name_or_path:
            warnings.append(
                'adapter_config.json has no base_model_name_or_path: the model was not loaded from a folder or hub name'
            )
        return warnings


def adapters_in(model: nn.Module) -> dict[str, PeftModel]:
    """Every PeftModel in the trained model, by path."""
    peft_model = getattr(sys.modules.get('peft'), 'PeftModel', None)  # if there is a PeftModel, peft was imported
    if peft_model is None:
        return {}
    return {without_wrappers(path): child for path, child in model.named_modules() if isinstance(child, peft_model)}


def trained_adapter(peft_model: PeftModel) -> str:
    """The name of its one adapter.

    Raises:
        ModelError: There is not exactly one LoRA adapter, or nothing is trainable.
    """
    kinds = {name: str(config.peft_type.value) for name, config in peft_model.peft_config.items()}
    if list(kinds.values()) != ['LORA']:
        raise ModelError(f'expected a PeftModel with one adapter of type LORA, found {kinds}')
    (name,) = kinds
    if not any(parameter.requires_grad for parameter in peft_model.parameters()):
        raise ModelError(
            f'the adapter {name!r} of {type(peft_model.get_base_model()).__name__} has no trainable tensors; load it '
            f'with is_trainable=True, or create it with get_peft_model'
        )
    return name
