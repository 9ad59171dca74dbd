"""Finds the model to export in the trained model: a PreTrainedModel, or a PeftModel around one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

from xhf_hooks.errors import ModelError
from xhf_hooks.model import without_wrappers

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def find_pretrained(model: nn.Module, module: str | None) -> tuple[str, PreTrainedModel]:
    """The path and the PreTrainedModel to export: ``module``, else ``llm``, else the only one.

    A PeftModel stands for the model in it.

    Raises:
        ModelError: There is none, or the choice is ambiguous.
    """
    from transformers import PreTrainedModel

    candidates = pretrained_in(model)
    if module is not None:
        modules = {without_wrappers(path): child for path, child in model.named_modules()}
        path = base_path(module) if module in adapters_in(model) else module
        found = modules.get(path)
        if not isinstance(found, PreTrainedModel):
            raise ModelError(
                f'option module: expected the path of a PreTrainedModel in {type(model).__name__}, found '
                f'{module!r} ({type(found).__name__}). There are: {sorted(candidates)}'
            )
        return path, found
    for path in ('llm', base_path('llm')):
        if path in candidates:
            return path, candidates[path]
    if len(candidates) != 1:
        raise ModelError(
            f'{type(model).__name__} holds {len(candidates)} Hugging Face models: {sorted(candidates)}. '
            f'Choose one with the option module'
        )
    return next(iter(candidates.items()))


def pretrained_in(model: nn.Module) -> dict[str, PreTrainedModel]:
    """The outermost PreTrainedModels by path; '' is the model itself."""
    from transformers import PreTrainedModel

    found: dict[str, PreTrainedModel] = {}
    for wrapped_path, module in model.named_modules():
        path = without_wrappers(wrapped_path)
        inside = any(path.startswith(f'{outer}.') or outer == '' for outer in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found[path] = module
    return found


def quantization_of(model: PreTrainedModel) -> str | None:
    """The quantization method of a model that transformers loaded quantized; None if it is not.

    transformers marks only the outermost model; a backbone taken from it shares the config.
    """
    options = getattr(model.config, 'quantization_config', None) or {}
    found = options.get('quant_method') if isinstance(options, dict) else getattr(options, 'quant_method', None)
    found = getattr(model, 'quantization_method', None) or found
    return None if found is None else str(getattr(found, 'value', found))


def find_adapter(model: nn.Module, module: str | None) -> tuple[str, PeftModel]:
    """The path and the PeftModel around the model that find_pretrained chooses.

    Raises:
        ModelError: There is none.
    """
    chosen, _ = find_pretrained(model, module)
    for path, adapted in adapters_in(model).items():
        if base_path(path) == chosen:
            return path, adapted
    raise ModelError(f'{type(model).__name__} has no PeftModel around {chosen!r}')


def adapters_in(model: nn.Module) -> dict[str, PeftModel]:
    """Every PeftModel in the trained model, by path."""
    peft_model = getattr(sys.modules.get('peft'), 'PeftModel', None)  # if there is a PeftModel, peft was imported
    if peft_model is None:
        return {}
    return {without_wrappers(path): child for path, child in model.named_modules() if isinstance(child, peft_model)}


def trained_adapter(peft_model: PeftModel) -> str:
    """The name of the one adapter that is trained. TRL's DPO adds a frozen one to it, for reference.

    Raises:
        ModelError: There is not exactly one, it is not of LoRA, or nothing is trainable.
    """
    kinds = {name: str(config.peft_type.value) for name, config in peft_model.peft_config.items()}
    if len(kinds) > 1:
        paths = [name.split('.') for name, parameter in peft_model.named_parameters() if parameter.requires_grad]
        kinds = {name: kind for name, kind in kinds.items() if any(name in path for path in paths)} or kinds
    if list(kinds.values()) != ['LORA']:
        raise ModelError(f'expected a PeftModel with one trained adapter, of type LORA, found {kinds}')
    (name,) = kinds
    if not any(parameter.requires_grad for parameter in peft_model.parameters()):
        raise ModelError(
            f'the adapter {name!r} of {type(peft_model.get_base_model()).__name__} has no trainable tensors; load it '
            f'with is_trainable=True, or create it with get_peft_model'
        )
    return name


def frozen_adapters(peft_model: PeftModel) -> list[str]:
    """A line for the log, if the model has other adapters than the :func:`trained_adapter`."""
    trained = trained_adapter(peft_model)
    names = sorted(name for name in peft_model.peft_config if name != trained)
    return [f'only the trained adapter {trained!r} is saved, without the frozen {names}'] if names else []


def base_path(path: str) -> str:
    """The path of the base model in the PeftModel at ``path``."""
    return f'{path}.base_model.model'.removeprefix('.')
