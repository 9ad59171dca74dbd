"""What a checkpoint has of the run's own code: modules around a model, such as Sa2VA's, and in it, such as LISA's.

That code is not run. A module of this kind gets an empty one with its tensors, which is all that exporters ask of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xhf_hooks.format.dtypes import TORCH_DTYPES, is_float
from xhf_hooks.format.text import counted, some
from xhf_hooks.model import module_tensors
from xhf_hooks.offline.model.find_class import count_prefixes
from xhf_hooks.offline.model.stored_names import is_of_adapter
from xhf_hooks.offline.model.transformers_model import class_named, first_architecture
from xhf_hooks.sources.stored_tensors import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        is_trained = is_float(tensor.dtype) if trained is None else name in trained
        _add_parameter(module, name, tensor, requires_grad=is_trained)
    if trained is not None or not outside:
        return []
    return [
        f'the checkpoint does not say what was trained, so all that it has of other modules is written: '
        f'{counted(len(outside), "tensor")} ({some([*outside])})'
    ]


def add_modules_inside(
    model: PreTrainedModel,
    prefix: str,
    unexpected: Collection[str],
    stored: Mapping[str, StoredTensor],
    trained: Collection[str] | None,
) -> list[str]:
    """Add to a model the modules that the class of the run has in it, such as LISA's decoder; notes for the user.

    They are new children of the model or of its backbone: a name anywhere else shows that the base is another model.

    Args:
        model: On the meta device. Its class becomes a subclass that has these modules, too.
        prefix: The prefix of its tensors in the checkpoint.
        unexpected: Names in the checkpoint that nothing in the meta model has.
        stored, trained: As of :func:`add_other_modules`.
    """
    found = {name.removeprefix(prefix): stored[name] for name in unexpected if name.startswith(prefix)}
    found = {name: one for name, one in found.items() if not is_of_adapter(name) and _is_in_new_child(model, name)}
    if not found:
        return []
    kind = type(model)

    def add_to(self: PreTrainedModel) -> None:
        for name, tensor in found.items():
            is_trained = is_float(tensor.dtype) if trained is None else prefix + name in trained
            _add_parameter(self, name, tensor, requires_grad=is_trained)

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, *args, **options)
        add_to(self)

    named = first_architecture(getattr(model.config, 'architectures', None))
    name = named if named is not None and class_named(named) is None else f'Own{kind.__name__}'
    # Exporters build the class anew. transformers reads its code in the file of its module
    model.__class__ = type(name, (kind,), {'__init__': __init__, '__module__': kind.__module__})
    add_to(model)
    return [
        f'{counted(len(found), "tensor")} of modules that the run has in its model, and {kind.__name__} has not '
        f'({some([*found])}): only the class of the run loads them, for which config.json names {name}'
    ]


def _is_in_new_child(model: PreTrainedModel, name: str) -> bool:
    """Whether a tensor is in a child that the model, or its backbone, does not have."""
    child, _, rest = name.partition('.')
    own = getattr(model, child, None)
    if child == model.base_model_prefix and isinstance(own, nn.Module):
        child, _, rest = rest.partition('.')
        return bool(rest) and not hasattr(own, child)
    return bool(rest) and own is None


def models_in(module: nn.Module, path: str = '') -> Iterator[tuple[str, nn.Module]]:
    """The models in a meta model, by path. What lies around them has no other purpose than to give them their names."""
    if type(module) is not nn.Module:
        yield path, module
        return
    for name, child in module.named_children():
        yield from models_in(child, f'{path}.{name}'.removeprefix('.'))


def _copies_of(model: nn.Module, names: Collection[str]) -> list[str]:
    """Prefixes of names that are those of the same model once more, such as a reference model or averaged weights."""
    own = [name for name, _ in module_tensors(model)]
    return [prefix for prefix, count in count_prefixes(own, names).items() if prefix and 2 * count >= len(own)]


def _add_parameter(module: nn.Module, name: str, tensor: StoredTensor, *, requires_grad: bool) -> None:
    *path, own_name = name.split('.')
    empty = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device='meta')
    _module_at(module, path).register_parameter(own_name, nn.Parameter(empty, requires_grad=requires_grad))


def _module_at(module: nn.Module, path: Sequence[str]) -> nn.Module:
    """The module at a path, made on the way if there is none."""
    for name in path:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module
