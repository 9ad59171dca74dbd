"""Finds a transformers model in the names of a checkpoint: its path there, and the class that was trained."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import nn

from xhf_hooks.compat.transformers import text_config
from xhf_hooks.errors import BaseModelError, OptionError, XhfError
from xhf_hooks.format.text import some
from xhf_hooks.model import module_tensors
from xhf_hooks.offline.model import transformers_model
from xhf_hooks.offline.model.older_names import load_checkpoint
from xhf_hooks.offline.model.stored_names import is_of_adapter, name_in_base, without_adapters
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
    counts = count_prefixes(own, stored) or count_prefixes(own, [name_in_base(name) for name in stored])
    of_files = count_prefixes(names_in_files, stored)
    # More of the names of an older version are there, unless that is a part, such as a vision tower without its head
    if of_files and (not counts or _n_found(of_files, stored) > _n_found(counts, stored)):
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


def _n_found(counts: Counter[str], stored: Iterable[str]) -> tuple[int, int]:
    """How many tensors the most frequent prefix has, and how many of these have a name of the model."""
    ((prefix, count),) = counts.most_common(1)
    return sum(name.startswith(prefix) for name in stored), count


def count_prefixes(own: Collection[str], stored: Iterable[str]) -> Counter[str]:
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


def find_class(
    config: PretrainedConfig,
    stored: Mapping[str, StoredTensor],
    module: str | None,
    where: str,
    of_base: PreTrainedModel | None,
    names_in_files: Sequence[str] = (),
) -> type[PreTrainedModel] | None:
    """The class that was trained, if it is another one than the base's; None if the base's has all that others have.

    Training may have put another head on the base, such as one that classifies. Then the tensors of the head lie beside
    those of the backbone. Of the classes that transformers has for the config, the trained one reads them all.

    Args:
        of_base: The model of the class that config.json names; None if it names none.
        names_in_files: As of :func:`find_prefix`.

    Raises:
        BaseModelError: Several classes read as much.
        OptionError: The option ``module`` has to choose among several models.
    """
    stored = without_adapters(stored)
    root, n_of_base, names_of_base = None, 0, set[str]()
    if of_base is not None:
        with suppress(BaseModelError):  # no tensor has a name of this class
            root = find_prefix(of_base, names_in_files, stored, module, where)
    if of_base is not None and root is not None:
        inside = below(root, stored)
        names = [name for name, _ in module_tensors(of_base)]
        n_of_base = len(inside) if inside.keys() <= {*names} or _reads(of_base, inside, may_lack=True) else 0
        names_of_base = {root + name for name in (*names, *names_in_files)}
    if n_of_base == len(stored):
        return None
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    n_read: dict[type[PreTrainedModel], int] = {}
    for kind in dict.fromkeys(_classes_for(config)):
        own = copy.deepcopy(transformers_model.config_of_class(kind, config))
        try:
            model = transformers_model.build_fitting(own, kind.__name__, shapes, trust_remote_code=False)
            prefix = find_prefix(model, [], stored, module, where)
        except XhfError:
            continue
        inside = below(prefix, stored)
        leaves_of_base = any(name in names_of_base for name in stored if not name.startswith(prefix))
        if len(inside) > n_of_base and not leaves_of_base and _reads(model, inside):
            n_read[kind] = len(inside)
    most = [kind for kind, count in n_read.items() if count == max(n_read.values())]
    if len(most) > 1:
        names = sorted(kind.__name__ for kind in most)
        raise BaseModelError(
            f'{where}: the checkpoint may be of {" or ".join(names)}; give the one that was trained with --architecture'
        )
    return most[0] if most else None


def beside_backbone(model: PreTrainedModel, prefix: str, stored: Mapping[str, StoredTensor]) -> list[str]:
    """The names beside those of a backbone, where a class of transformers that contains it has its head.

    Args:
        prefix: The prefix of the backbone's tensors in the checkpoint; see :func:`find_prefix`.
    """
    outer = prefix.removesuffix(f'{model.base_model_prefix}.')
    return [name for name in stored if outer != prefix and name.startswith(outer) and not name.startswith(prefix)]


def _reads(model: PreTrainedModel, stored: Mapping[str, StoredTensor], *, may_lack: bool = False) -> bool:
    """Whether the class of a model reads all stored tensors.

    Args:
        stored: By names in the model, of any version.
        may_lack: Whether the model may have tensors that are not stored.
    """
    loaded = load_checkpoint(model, stored)
    if loaded is None:
        return False
    return not any(found for problem, found in loaded.problems.items() if problem != 'missing' or not may_lack)


def _classes_for(config: PretrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """The classes that transformers' auto classes have for a config, or for that of its text model."""
    import transformers

    for each in (config, text_config(config)):
        for name in sorted(transformers.__all__):  # its dir() takes a quarter of a second
            if name.startswith('AutoModel'):
                yield from transformers_model.classes_of(getattr(transformers, name), each)
