"""Finds a transformers model in the names of a checkpoint: its path there, and the class that was trained."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from xhf_hooks.errors import BaseModelError, OptionError, XhfError
from xhf_hooks.format.text import some
from xhf_hooks.meta_model import transformers_model
from xhf_hooks.meta_model.older_names import load_checkpoint
from xhf_hooks.meta_model.stored_names import is_of_adapter, name_in_base
from xhf_hooks.model import module_tensors
from xhf_hooks.sources.stored_tensors import StoredTensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def find_prefix(
    model: nn.Module, names_in_files: Sequence[str], stored: Mapping[str, StoredTensor], module: str | None, where: str
) -> str:
    """The prefix of the model's tensors in the checkpoint, such as ``'llm.'``; '' for the model itself.

    Args:
        names_in_files: Names in the base's files, which may be those of the transformers version that trained.
        stored: The checkpoint's tensors, by each of their names.
        module: The option ``module``, which chooses among several.
        where: The config or folder that the model was built from, for messages.

    Raises:
        BaseModelError: The checkpoint has no such model.
        OptionError: It has several of them, and the option does not choose one.
    """
    own = [name for name, tensor in module_tensors(model) if isinstance(tensor, nn.Parameter)]
    counts = _count_prefixes(own, stored) or _count_prefixes(own, [name_in_base(name) for name in stored])
    of_files = _count_prefixes(names_in_files, stored)
    if max(of_files.values(), default=0) > max(counts.values(), default=0):  # the names of an older version
        counts = of_files
    if not counts:
        remedy = f'--base has to name the model that was trained{transformers_model.other_version_remedy([model])}'
        if any(map(is_of_adapter, stored)) and not hasattr(model, 'peft_config'):
            remedy = 'they are of an adapter: --base has to name a folder with its adapter_config.json'
        raise BaseModelError(
            f'{where}: {type(model).__name__} has tensors such as {own[0] if own else "none"}, but the checkpoint has '
            f'{some(sorted(stored), 1)}; {remedy}'
        )
    most = max(counts.values())
    # Small modules have a few of the names, too
    prefixes = sorted((prefix for prefix, count in counts.items() if 2 * count >= most), key=len)
    if module is not None:
        chosen = [prefix for prefix in prefixes if f'{module}.'.startswith(prefix)]
    else:
        # The same tensors may have several names, as of a model and of its compiled self
        first = below(prefixes[0], stored)
        chosen = prefixes[:1] if all(below(one, stored) == first for one in prefixes[1:]) else prefixes
    if len(chosen) != 1:
        paths = [prefix.removesuffix('.') for prefix in prefixes]
        raise OptionError('module', f'one of {paths}, where the checkpoint has a {type(model).__name__}', module)
    return chosen[0]


def _count_prefixes(own: Collection[str], stored: Iterable[str]) -> Counter[str]:
    """For each prefix in the checkpoint, how many of a model's names follow it there."""
    names, counts = set(own), Counter[str]()
    for there in stored:
        starts = (0, *(match.end() for match in re.finditer(r'\.', there)))
        counts.update(there[:start] for start in starts if there[start:] in names)
    return counts


def below(prefix: str, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors whose names have the prefix, by their names without it."""
    return {name[len(prefix) :]: tensor for name, tensor in stored.items() if name.startswith(prefix)}


def place(model: nn.Module, prefix: str) -> nn.Module:
    """An empty module with the model at the path that a prefix names."""
    for name in reversed(prefix.split('.')[:-1]):
        outer = nn.Module()
        outer.add_module(name, model)
        model = outer
    return model


def has_other_tensors(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether there are tensors, such as those of another head, that the model's class does not read.

    Args:
        stored: By names in the model, of any version.
    """
    if stored.keys() <= {name for name, _ in module_tensors(model)}:
        return False
    loaded = load_checkpoint(model, stored)
    return loaded is None or bool(loaded.problems['unexpected'])


def find_class(
    config: PretrainedConfig,
    stored: Mapping[str, StoredTensor],
    module: str | None,
    where: str,
    of_base: PreTrainedModel | None = None,
) -> str | None:
    """The class of transformers for this kind of config that has the checkpoint's tensors: all of them, and no others.

    Training may have put another head on the base, such as one that classifies; None if no class fits.

    Args:
        of_base: The model of the base's own class. A class that leaves its head in the checkpoint does not fit.

    Raises:
        BaseModelError: Several classes fit.
    """
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    unread: dict[str, int] = {}  # by class: how many tensors it leaves, such as a head
    heads = () if of_base is None else tuple(f'.{name}' for name in _names_outside_of_backbone(of_base))
    for kind in dict.fromkeys(_classes_for(config)):
        try:
            edited = copy.deepcopy(config)
            model = transformers_model.build(edited, kind.__name__, trust_remote_code=False)
            if transformers_model.fit_config(edited, model, shapes):
                model = transformers_model.build(edited, kind.__name__, trust_remote_code=False)
            inside = below(find_prefix(model, [], stored, module, where), stored)
            loaded = load_checkpoint(model, inside)
        except XhfError:
            continue
        if loaded is not None and not any(loaded.problems.values()):
            read = {id(inside[name]) for tensor in loaded.made.values() for name in tensor.sources}
            left = {name: id(tensor) for name, tensor in stored.items() if id(tensor) not in read}
            if not any(f'.{name}'.endswith(heads) for name in left):
                unread[kind.__name__] = len({*left.values()})
    found = [name for name, n_unread in unread.items() if n_unread == min(unread.values())]
    if len(found) > 1:
        raise BaseModelError(
            f'{where}: the checkpoint may be of {" or ".join(found)}; set architectures in config.json to the one that '
            f'was trained'
        )
    return found[0] if found else None


def _names_outside_of_backbone(model: PreTrainedModel) -> list[str]:
    """The names of a head's tensors; none if the model is a backbone itself."""
    names = [name for name, _ in module_tensors(model)]
    outside = [name for name in names if not name.startswith(f'{model.base_model_prefix}.')]
    return outside if len(outside) < len(names) else []


def _classes_for(config: PretrainedConfig) -> Iterator[type[PreTrainedModel]]:
    import transformers

    for name in dir(transformers):
        if name.startswith('AutoModel'):
            yield from transformers_model.classes_of(getattr(transformers, name), config)
