"""Adapters that a run put on parts of its model, such as InternVL_V1_5 with ``llm_lora``, and models around it.

The checkpoint's names show which parts peft had adapted; how, such as ``lora_alpha``, stands in the run's config only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from xhf_hooks.errors import ConfigError
from xhf_hooks.format.text import counted
from xhf_hooks.offline.model import transformers_model
from xhf_hooks.offline.model.run_config import RunConfig, Unread, require_read
from xhf_hooks.sources.stored_tensors import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: In the name of a tensor: the path of the adapted part, and the path of a module in it with an adapter's matrix.
_IN_PART = re.compile(r'(?P<part>.*?)\.?base_model\.model\.(?P<path>.+)\.lora_(?:embedding_)?A\..*')


def adapt_parts(
    model: PreTrainedModel, config: RunConfig, stored: Mapping[str, StoredTensor], prefix: str
) -> nn.Module:
    """The model with the adapters that the checkpoint's names show, if the run's config says how they were made.

    Args:
        prefix: The prefix of the model's tensors in the checkpoint.

    Raises:
        ConfigError: The config has several that may be meant.
    """
    ranks: dict[str, dict[str, int]] = {}  # by the path of the part, and that of the adapted module in it
    for name, tensor in stored.items():
        match = _IN_PART.fullmatch(name[len(prefix) :]) if name.startswith(prefix) else None
        if match is not None:
            ranks.setdefault(match['part'], {})[match['path']] = tensor.shape[-1 if 'embedding_A' in name else 0]
    given = [*_lora_configs(config.model)] if ranks else []
    for part, by_path in ranks.items():
        options = _options_for(part, by_path, given, config.where)
        if options is None:
            continue
        lora = transformers_model.lora_config_of(options, config.where)
        if not part:
            return transformers_model.adapt(model, lora)
        parent, _, name = part.rpartition('.')
        setattr(model.get_submodule(parent), name, transformers_model.adapt(model.get_submodule(part), lora))
    return model


def _lora_configs(config: Any, path: str = 'model') -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each LoraConfig in a run's config, and its path there."""
    if isinstance(config, Mapping) and str(config.get('type', '')).rpartition('.')[2] == 'LoraConfig':
        yield path, config
    elif isinstance(config, Mapping):
        for name, value in config.items():
            yield from _lora_configs(value, f'{path}.{name}')


def _options_for(
    part: str, ranks: Mapping[str, int], given: list[tuple[str, Mapping[str, Any]]], where: str
) -> Mapping[str, Any] | None:
    """The LoraConfig of a part: the one that has its ranks and modules.

    Args:
        ranks: Of the adapter's matrices, by the path of the module in the part.
    """
    fitting = [(path, options) for path, options in given if _fits(options, ranks)]
    different = [options for n, (_, options) in enumerate(fitting) if options not in [one for _, one in fitting[:n]]]
    if len(different) > 1:
        paths = ' and '.join(path for path, _ in fitting)
        raise ConfigError(
            f'{where}: the adapter on {part or "the model"} may be made from {counted(len(different), "LoraConfig")}: '
            f'{paths}; give --config a copy without the others'
        )
    for path, options in fitting[:1]:
        require_read(options, path, where)
    return different[0] if different else None


def _fits(options: Mapping[str, Any], ranks: Mapping[str, int]) -> bool:
    """Whether a LoraConfig may have made matrices of these ranks on these modules. What is unread may be anything."""
    rank, targets = options.get('r', 8), options.get('target_modules')
    if not isinstance(rank, Unread) and not options.get('rank_pattern') and set(ranks.values()) != {rank}:
        return False
    if not isinstance(targets, (list, tuple)) or any(isinstance(name, Unread) for name in targets):
        return True
    return all(any(f'.{path}'.endswith(f'.{name}') for name in targets) for path in ranks)
