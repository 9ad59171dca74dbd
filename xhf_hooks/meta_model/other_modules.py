"""What a checkpoint has outside of the models that were rebuilt: modules of the run's own code, such as Sa2VA's.

That code is not run. A module of this kind gets an empty one with its tensors, which is all that exporters ask of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from xhf_hooks.format.dtypes import TORCH_DTYPES, is_float
from xhf_hooks.format.text import counted, some
from xhf_hooks.model import module_tensors
from xhf_hooks.sources.stored_tensors import StoredTensor


def add_other_modules(
    module: nn.Module, stored: Mapping[str, StoredTensor], trained: Collection[str] | None
) -> list[str]:
    """Add a parameter for each stored tensor outside of the models, and return notes for the user.

    Args:
        module: The meta model's. Around the models, it consists of modules without a class of their own.
        stored: The checkpoint's tensors, by each of their names.
        trained: Names of the parameters that were trained; None if the checkpoint does not record them. Then each
            tensor with floats counts as trained: the class of the run has chosen to put it into the checkpoint.
    """
    models = dict(models_in(module))
    inside = tuple(f'{path}.'.removeprefix('.') for path in models)
    of_models = {id(tensor) for name, tensor in stored.items() if name.startswith(inside)}
    outside = {tensor.name: tensor for tensor in stored.values() if id(tensor) not in of_models}
    copies = tuple(prefix for model in models.values() for prefix in _copies_of(model, outside))
    outside = {name: tensor for name, tensor in outside.items() if not name.startswith(copies)}
    for name, tensor in outside.items():
        *path, own_name = name.split('.')
        is_trained = is_float(tensor.dtype) if trained is None else name in trained
        empty = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device='meta')
        _module_at(module, path).register_parameter(own_name, nn.Parameter(empty, requires_grad=is_trained))
    if trained is not None or not outside:
        return []
    return [
        f'the checkpoint does not say what was trained, so all that it has of other modules is written: '
        f'{counted(len(outside), "tensor")} ({some([*outside])})'
    ]


def models_in(module: nn.Module, path: str = '') -> Iterator[tuple[str, nn.Module]]:
    """The models in a meta model, by path. What lies around them has no other purpose than to give them their names."""
    if type(module) is not nn.Module:
        yield path, module
        return
    for name, child in module.named_children():
        yield from models_in(child, f'{path}.{name}'.removeprefix('.'))


def _copies_of(model: nn.Module, names: Collection[str]) -> list[str]:
    """Prefixes of names that are those of the same model once more, such as a reference model or averaged weights."""
    own = {name for name, _ in module_tensors(model)}
    counts = Counter[str]()
    for name in names:
        parts = name.split('.')
        counts.update('.'.join([*parts[:n], '']) for n in range(1, len(parts)) if '.'.join(parts[n:]) in own)
    return [prefix for prefix, count in counts.items() if 2 * count >= len(own)]


def _module_at(module: nn.Module, path: Sequence[str]) -> nn.Module:
    """The module at a path, made on the way if there is none."""
    for name in path:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module
