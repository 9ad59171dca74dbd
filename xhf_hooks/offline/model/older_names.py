"""Gives a checkpoint's tensors the names and the form that the installed transformers has in memory.

A run with an older transformers called them otherwise, and kept experts apart or transposed that are one tensor now.
``from_pretrained`` reads such names, so it is asked: it loads the checkpoint's tensors without their values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from xhf_hooks.exporters.ask_load import Loaded
from xhf_hooks.model import module_tensors
from xhf_hooks.offline.model.base_weights import load_stored, tensors_made
from xhf_hooks.offline.model.stored_names import is_of_adapter, name_in_base
from xhf_hooks.sources.stored_tensors import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The path of the module that peft adapts, in the name of a matrix of the adapter.
_ADAPTED = re.compile(r'(.+)\.lora_(embedding_)?[AB]\..*')


def load_checkpoint(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> Loaded | None:
    """Load tensors into the class of a model; None where that cannot be tried, as with custom code.

    Args:
        model: On the meta device.
        stored: By names in the model, of any version.
    """
    try:
        return load_stored(type(model), model.config, stored)
    except Exception:  # of any type, from custom code
        return None


def rename_older(
    module: nn.Module, model: PreTrainedModel, names: Mapping[int, list[str]], stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], set[str]]:
    """Find the tensors of a model in a checkpoint that has them in another form.

    Those with right names and shapes are left alone.

    Args:
        module: The trained model. The other one is a part of it, and may be adapted by peft.
        names: Names in the model before it was adapted, by ``id`` of the tensor.
        stored: The checkpoint's tensors, by each of their names.

    Returns:
        What transformers makes of tensors whose names or shapes the model does not have, by name in the trained model;
        and the names in the checkpoint of those tensors, or of others that transformers itself ignores.
    """
    own = {id(tensor): name for name, tensor in reversed(module_tensors(module))}
    place, part = place_of(model, module)
    inside = {name: tensor for name, tensor in stored.items() if name.startswith(place)}
    plain = {name: part + name_in_base(name[len(place) :]) for name in inside}
    shapes = {name: tuple(tensor.shape) for name, tensor in module_tensors(module)}
    unknown = inside.keys() - shapes.keys()
    of_other_shape = {name for name, tensor in inside.items() if shapes.get(name, tensor.shape) != tensor.shape}
    if not unknown and not of_other_shape:
        return {}, set()
    given = {plain[name]: tensor for name, tensor in inside.items() if not is_of_adapter(name)}
    adapted = _adapted_weights({plain[name]: inside[name] for name in unknown})
    loaded = load_checkpoint(model, {**adapted, **given})
    if loaded is None:
        return {}, set()
    made = tensors_made(loaded, {**adapted, **given})
    renamed: dict[str, StoredTensor] = {}
    used: set[str] = set()
    full = {name: own[key] for key, each in names.items() if key in own for name in each}
    moved: dict[str, str] = {}  # path of a module: by what the checkpoint calls it
    for name, sources in ((name, tensor.sources) for name, tensor in loaded.made.items()):
        if len(sources) == 1 and sources[0] in adapted:
            moved[sources[0].removesuffix('.weight')] = place + name[len(part) :].removesuffix('.weight')
        is_other = name in full and (full[name] not in stored or full[name] in of_other_shape)
        if is_other and not adapted.keys() & set(sources) - given.keys():
            renamed[full[name]] = made[name]
    read = {source for tensor in loaded.made.values() for source in tensor.sources}
    unexpected = set(loaded.problems['unexpected'])
    ignores_others = unexpected <= given.keys()  # else transformers gives other names than the checkpoint has
    for name in unknown:
        match = _ADAPTED.fullmatch(plain[name])
        if match is None and not is_of_adapter(name):
            if plain[name] in read or (ignores_others and plain[name] not in unexpected):
                used.add(name)
        elif match is not None and match[1] in moved:
            new_name = moved[match[1]] + plain[name][len(match[1]) :]
            if new_name in own.values():  # else the model has no adapter there
                renamed[new_name] = inside[name]
                used.add(name)
    return renamed, used


def place_of(model: nn.Module, module: nn.Module) -> tuple[str, str]:
    """The path of a model in the trained one, and that of the part which is there: all of it, or its backbone.

    Both end with a dot, if they are not empty.
    """
    paths = {id(child): path for path, child in module.named_modules()}
    part, place = next((part, paths[id(child)]) for part, child in model.named_modules() if id(child) in paths)
    return f'{place}.'.removeprefix('.'), f'{part}.'.removeprefix('.')


def _adapted_weights(unknown: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Stand-ins for the weights that adapters of unknown names adapt: where transformers puts them shows the new names.

    They are never read.
    """
    found = {}
    for name, tensor in unknown.items():
        match = _ADAPTED.fullmatch(name)
        of_b = name.replace('lora_A', 'lora_B').replace('lora_embedding_A', 'lora_embedding_B')
        if match is None or of_b == name or of_b not in unknown:
            continue
        n_inputs, n_outputs = tensor.shape[-1], unknown[of_b].shape[0]
        shape = (n_inputs, n_outputs) if match[2] else (n_outputs, n_inputs)
        found[f'{match[1]}.weight'] = StoredTensor(f'{match[1]}.weight', shape, tensor.dtype, ())
    return found
