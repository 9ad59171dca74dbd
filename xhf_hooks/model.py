"""The tensors of a model by name, in the order of nn.Module.state_dict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

#: Path components that FSDP1, activation checkpointing and torch.compile add.
_WRAPPERS = ('_fsdp_wrapped_module', '_checkpoint_wrapped_module', '_orig_mod')
_IN_A_PATH = re.compile(rf'(^|\.)({"|".join(_WRAPPERS)})(?=\.|$)')

#: Under this name ``nn.Module.state_dict`` has what ``get_extra_state`` returns (``torch/nn/modules/module.py``).
_EXTRA_STATE = '_extra_state'


def module_tensors(model: nn.Module, *, as_wrapped: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Parameters, persistent buffers and extra states that are tensors; tied ones under each of their names.

    Args:
        as_wrapped: Keep the wrappers' path components in the names.

    Does not call ``state_dict()``, which a model may override to leave tensors out.
    """
    found: list[tuple[str, torch.Tensor]] = []
    left = [('', model)]  # a stack, since named_modules() passes each module through as many generators as it is deep
    while left:
        prefix, module = left.pop()
        for name, child in reversed(module._modules.items()):
            if child is not None:
                is_left_out = name in _WRAPPERS and not as_wrapped
                left.append((prefix if is_left_out else f'{prefix}.{name}' if prefix else name, child))
        own = list(module._parameters.items())
        own += [(n, b) for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set]
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state = module.get_extra_state()
            own += [(_EXTRA_STATE, state)] if isinstance(state, torch.Tensor) else []
        found += [(f'{prefix}.{n}' if prefix else n, t) for n, t in own if t is not None]
    return found


def modules_in(model: nn.Module) -> list[nn.Module]:
    """Each module once, the model first. Takes a small part of the time of ``nn.Module.modules``."""
    found, seen = [model], {id(model)}
    for module in found:  # to which its children are added
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def parameters_of(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters of modules, without those of the modules in them; tied ones under each of their names."""
    return (each for module in modules for each in module._parameters.values() if each is not None)


def names_by_identity(model: nn.Module) -> list[tuple[torch.Tensor, list[str]]]:
    """Each tensor once, with all of its names.

    By identity, not by storage: DeepSpeed's flat buffers put unrelated tensors into one storage.
    """
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in module_tensors(model):
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def without_wrappers(path: str) -> str:
    """A module's path without the components of wrappers."""
    return _IN_A_PATH.sub('', path).removeprefix('.')


def input_embedding(model: nn.Module) -> torch.Tensor | None:
    """The weight of a transformers model's input embedding; None if it has none, or if that is of no tokens."""
    try:
        layer = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):  # of images or sound
        return None
    # peft's wrapper of trained tokens would compute a weight, of slices with ZeRO-3 or FSDP
    return _weight_of(getattr(layer, 'token_adapter', layer))


def token_embeddings(model: nn.Module) -> list[torch.Tensor]:
    """The token embeddings of a transformers model and of models in it: encoder and decoder may have different ones."""
    found = (input_embedding(part) for part in modules_in(model) if hasattr(type(part), 'get_input_embeddings'))
    return list({id(weight): weight for weight in found if weight is not None}.values())


def output_embedding(model: nn.Module) -> torch.Tensor | None:
    """The weight of a transformers model's language-modelling head; None if it has none."""
    try:
        return _weight_of(model.get_output_embeddings())
    except (NotImplementedError, AttributeError):
        return None


def _weight_of(layer: Any) -> torch.Tensor | None:
    """The weight of a layer, at ZeRO-3 as it is now."""
    # While training is in a forward, DeepSpeed gathers what its dict of parameters is asked for by [] (ZeROOrderedDict
    # in runtime/zero/parameter_offload.py): a thread that saves meanwhile would communicate alone. get() does not
    parameters = getattr(layer, '_parameters', {})
    return parameters.get('weight') if 'weight' in parameters else getattr(layer, 'weight', None)


def model_class(model: nn.Module) -> type[nn.Module]:
    """The original class of the model; ``fully_shard`` replaces it with a subclass.

    Source: ``torch/distributed/fsdp/_fully_shard/_fully_shard.py``, ``_get_cls`` and ``FSDPModule.__new__``.
    """
    bases = type(model).__mro__
    if len(bases) > 2 and bases[1].__name__ == 'FSDPModule':
        return bases[getattr(type(model), '_orig_cls_mro_index', 2)]
    return type(model)


def is_class_of(kind: type, package: str, name: str) -> bool:
    """Whether the type is, or derives from, a package's class of this name, in whatever module that version has it."""
    return any(base.__name__ == name and base.__module__.startswith(f'{package}.') for base in kind.__mro__)
