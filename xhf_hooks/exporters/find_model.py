"""Finds the model to export in the trained model: a PreTrainedModel, or a PeftModel around one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

from xhf_hooks.compat.peft import active_adapters
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
        below = _base_paths(module) if module in adapters_in(model) else [module]
        path = next((path for path in below if isinstance(modules.get(path), PreTrainedModel)), module)
        found = modules.get(path)
        if not isinstance(found, PreTrainedModel):
            raise ModelError(
                f'option module: expected the path of a PreTrainedModel in {type(model).__name__}, found '
                f'{module!r} ({type(found).__name__}). There are: {sorted(candidates)}'
            )
        return path, found
    for path in ('llm', *_base_paths('llm')):
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
    models = ((without_wrappers(path), one) for path, one in model.named_modules() if isinstance(one, PreTrainedModel))
    for path, module in models:
        if not any(path.startswith(f'{outer}.') or outer == '' for outer in found):
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


def require_not_quantized(model: PreTrainedModel) -> None:
    """Refuse a model that is quantized, or has a quantized part.

    Raises:
        ModelError: It names the part.
    """
    from transformers import PreTrainedModel

    for path, part in model.named_modules():
        quantized = quantization_of(part) if isinstance(part, PreTrainedModel) else None
        if quantized is not None:
            where = f'{path} of ' if path else ''
            raise ModelError(
                f'{where}{type(model).__name__} is quantized ({quantized}), and such weights can neither be exported '
                f"nor merged with an adapter without loss. Save the adapter alone: set lora to 'adapter' and, for "
                f'LLaVA, set llava_format to None. A merged model can be made after training, from the unquantized '
                f'base: with `xhf-convert WORK_DIR OUT --lora merge`, or from the saved adapter with merge_and_unload '
                f'of peft. For InternVL, set quantization_llm and quantization_vit to False'
            )


def find_adapter(model: nn.Module, module: str | None) -> tuple[str, PeftModel]:
    """The path and the PeftModel around the model that find_pretrained chooses.

    Raises:
        ModelError: There is none.
    """
    chosen, _ = find_pretrained(model, module)
    for path, adapted in adapters_in(model).items():
        if chosen in _base_paths(path):
            return path, adapted
    raise ModelError(f'{type(model).__name__} has no PeftModel around {chosen!r}')


def adapters_in(model: nn.Module) -> dict[str, PeftModel]:
    """Every PeftModel in the trained model, by path."""
    peft_model = getattr(sys.modules.get('peft'), 'PeftModel', None)  # if there is a PeftModel, peft was imported
    if peft_model is None:
        return {}
    return {without_wrappers(path): child for path, child in model.named_modules() if isinstance(child, peft_model)}


def adapters_in_use(peft_model: PeftModel) -> list[str]:
    """The names of the active adapters, which make the model's outputs. TRL's DPO adds an inactive one, for reference.

    Raises:
        ModelError: There is none, nothing is trainable, or an adapter is trained that is not active.
    """
    active = active_adapters(peft_model)
    trained = [name for name, parameter in peft_model.named_parameters() if parameter.requires_grad]
    kind = type(peft_model.get_base_model()).__name__
    if not active or not trained:
        raise ModelError(
            f'the adapters {active} of {kind} have no trainable tensors; load them with is_trainable=True, or create '
            f'one with get_peft_model'
        )
    inactive = [name for name in peft_model.peft_config if name not in active]
    idle = [name for name in inactive if any(name in path.split('.') for path in trained)]
    if idle:
        raise ModelError(
            f'{kind} has trainable adapters that are not active, and its outputs do not depend on them: {idle}; the '
            f'active ones are {active}. Activate them with set_adapter, or freeze them with requires_grad_(False)'
        )
    return active


def only_adapter(peft_model: PeftModel) -> str:
    """The name of the adapter in use, where a folder has a place for one.

    Raises:
        ModelError: There are several, or none as in :func:`adapters_in_use`.
    """
    names = adapters_in_use(peft_model)
    if len(names) > 1:
        kind = type(peft_model.get_base_model()).__name__
        raise ModelError(
            f'the outputs of {kind} are made by several adapters, {names}, and a folder of this layout holds one; set '
            f"lora to 'merge'"
        )
    return names[0]


def inactive_adapters(peft_model: PeftModel) -> list[str]:
    """A line for the log, if the model has other adapters than the :func:`adapters_in_use`."""
    active = adapters_in_use(peft_model)
    names = sorted(name for name in peft_model.peft_config if name not in active)
    return [f'only what is active is saved, {active}, without the inactive adapters {names}'] if names else []


def _base_paths(path: str) -> list[str]:
    """Paths at which the base model of the PeftModel at ``path`` may be: below it (prompt tuning), or in a tuner."""
    return [f'{path}.base_model'.removeprefix('.'), base_path(path)]


def base_path(path: str) -> str:
    """The path of the base model in the PeftModel at ``path``."""
    return f'{path}.base_model.model'.removeprefix('.')
