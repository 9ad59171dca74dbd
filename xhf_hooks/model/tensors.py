"""The tensors of a module by name, as ``nn.Module.state_dict`` orders them."""

from __future__ import annotations

import re

import torch
from torch import nn

#: What FSDP1, activation checkpointing and torch.compile put into the path of a module that they wrap.
_WRAPPERS = re.compile(r'(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?=\.|$)')


def module_tensors(model: nn.Module, *, as_wrapped: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, tied ones under each of their names.

    Args:
        as_wrapped: Leave the wrappers' parts in the names.

    An overridden ``state_dict()`` is not asked: what a checkpoint format leaves out is another question
    than what there is.
    """
    found: list[tuple[str, torch.Tensor]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = path if as_wrapped else without_wrappers(path)
        own = list(module._parameters.items())
        own += [(n, b) for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set]
        found += [(f'{prefix}.{n}' if prefix else n, t) for n, t in own if t is not None]
    return found


def names_by_identity(model: nn.Module) -> list[tuple[torch.Tensor, list[str]]]:
    """Each tensor once, with all of its names, the first of them first.

    Identity decides, not the storage address: DeepSpeed's flat buffers put unrelated tensors into one storage.
    """
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in module_tensors(model):
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def without_wrappers(path: str) -> str:
    """The path of a module as it was before modules on it were wrapped."""
    return _WRAPPERS.sub('', path).removeprefix('.')


def input_embedding(model: nn.Module) -> torch.Tensor | None:
    """The weight of a transformers model's input embedding; None where it has no token embeddings."""
    try:
        return getattr(model.get_input_embeddings(), 'weight', None)
    except (NotImplementedError, AttributeError):
        return None


def model_class(model: nn.Module) -> type[nn.Module]:
    """The class that the model was built of; ``fully_shard`` gives a model a class of its own.

    Source: ``torch/distributed/fsdp/_fully_shard/_fully_shard.py``, ``_get_cls`` and ``FSDPModule.__new__``.
    """
    bases = type(model).__mro__
    if len(bases) > 2 and bases[1].__name__ == 'FSDPModule':
        return bases[getattr(type(model), '_orig_cls_mro_index', 2)]
    return type(model)
