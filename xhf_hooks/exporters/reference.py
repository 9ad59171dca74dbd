"""Finds the model that ``from_pretrained`` will build, on the meta device, and the config of which it does.

Training may have resized the embeddings, or untied them from the head; then the live config contradicts the weights,
and a copy of it is corrected. Or the class was given arguments that its config does not hold; then these are found.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

from xhf_hooks.compat.transformers import ignored_keys, text_config
from xhf_hooks.exporters.class_arguments import find_arguments
from xhf_hooks.exporters.loading_check import Problems, differences, require_none
from xhf_hooks.exporters.traced import TracedTensor
from xhf_hooks.model import input_embedding, module_tensors, output_embedding

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: The field of configs that says whether input and output embeddings are one tensor.
TIE = 'tie_word_embeddings'
#: Builds the model of a config, with keyword arguments of its class besides the config, on the meta device.
BuildModel = Callable[['PretrainedConfig', Mapping[str, Any]], 'PreTrainedModel']


@dataclass(frozen=True)
class Reference:
    """The model that ``from_pretrained`` will build: its names and shapes are those of the trained model.

    Attributes:
        model: On the meta device.
        config: The config to write: the live model's, where it does not contradict the weights.
        arguments: Keyword arguments of the class besides the config. Whoever loads the folder has to give them, too.
        differences_without_arguments: How the trained model differs from what the class builds without them.
    """

    model: PreTrainedModel
    config: PretrainedConfig
    arguments: Mapping[str, Any]
    differences_without_arguments: Problems


def find_reference(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    own: Mapping[str, TracedTensor],
    build: BuildModel,
    *,
    may_untie: bool,
    where: str,
) -> Reference:
    """Build the model; if the config contradicts the weights or arguments are missing, build it again with both.

    Runs on: all ranks.

    Args:
        kind: The class of the trained model, whose arguments are looked for.
        config: The live model's, as it would be written. It is not edited.
        own: The trained model's tensors, by each of their names; tied ones are one object.
        build: Builds the class that the folder will name.
        may_untie: Whether a config says that embeddings are not tied wherever the weights are not, even if the class
            ignores the field. peft does that when it merges an adapter.
        where: The model's path in the trained one, for the error.

    Raises:
        ModelError: The trained model differs from what its class builds.
    """
    model = build(config, {})
    rows = _resized_rows(model, own)
    is_tied = _misdescribed_tie(model, own, may_untie)
    if is_tied is not None and not _can_describe_tie(_corrected(config, rows, is_tied), is_tied, model):
        is_tied = None
    if rows is not None or is_tied is not None:
        config = _corrected(config, rows, is_tied)
        model = build(config, {})
    without = _differences(model, own)
    if not any(without.values()):
        return Reference(model, config, {}, {})

    def differences_with(arguments: Mapping[str, Any]) -> Problems:
        try:
            return _differences(build(config, arguments), own)
        except Exception:  # of any type, from custom code
            return without

    arguments = find_arguments(kind, without, differences_with) or {}
    if not arguments:
        _require_no_difference(without, f'{type(model).__name__}, from the model at {where or "the root"!r},')
    return Reference(build(config, arguments), config, arguments, without)


def _require_no_difference(problems: Problems, what: str) -> None:
    """Refuse a model that differs from what its class builds.

    Raises:
        ModelError: It says how.
    """
    if any('lora_' in name for name in problems['unexpected']):
        remedy = (
            'train the PeftModel that get_peft_model makes, of which the adapter or the merged model is saved. '
            'add_adapter and inject_adapter_in_model put LoRA into the model itself; with add_adapter, '
            'save_pretrained of transformers writes the adapter alone'
        )
        require_none(problems, what, remedy)
    require_none(problems, what)


def _misdescribed_tie(model: PreTrainedModel, own: Mapping[str, TracedTensor], may_untie: bool) -> bool | None:
    """Whether input and output embeddings are one tensor, if the config has to say so; None if it may stay."""
    embeddings = [input_embedding(model), output_embedding(model)]
    names = [[name for name, tensor in module_tensors(model) if tensor is one and name in own] for one in embeddings]
    if not all(names):  # the trained model does not have both
        return None
    is_tied = len({id(own[name]) for name in (*names[0], *names[1])}) == 1
    is_tied_in_reference = embeddings[0] is embeddings[1]
    # If a class ignores the field, the trained model and the built one are both untied, whatever the config claims, and
    # the config stays as it is
    return is_tied if is_tied != is_tied_in_reference or (may_untie and not is_tied) else None


def _resized_rows(model: PreTrainedModel, own: Mapping[str, TracedTensor]) -> int | None:
    """The number of rows of the input embedding, if training resized it.

    It is not compared with ``vocab_size``: mllama's embedding has more rows than that.
    """
    embedding = input_embedding(model)
    names = [name for name, tensor in module_tensors(model) if tensor is embedding and name in own]
    rows = own[names[0]].shape_and_dtype[0][0] if names else None
    return None if embedding is None or rows == embedding.shape[0] else rows


def _corrected(config: PretrainedConfig, rows: int | None, is_tied: bool | None) -> PretrainedConfig:
    """A copy of the config with these rows of embeddings, and this tie of them; None leaves either as it is."""
    config = copy.deepcopy(config)
    if rows is not None:
        text_config(config).vocab_size = rows
    if is_tied is not None:
        for part in (config, text_config(config)):
            if getattr(part, TIE, is_tied) != is_tied:
                setattr(part, TIE, is_tied)
    return config


def _can_describe_tie(config: PretrainedConfig, is_tied: bool, model: PreTrainedModel) -> bool:
    """Whether ``tie_word_embeddings`` of the config may be set to ``is_tied`` without another effect.

    It may not if a ``forward`` reads that field, as those of T5 and its kin, which scale the head's input if it is set;
    or if its config always says that there is a tie. Then the config stays wrong, and both names are stored. If it
    denies a tie, the folder has the tensor twice. If it claims one, transformers 5 sees that the values differ, and
    does not tie them.

    Args:
        config: In which it is set.
    """
    if any(TIE in _names_in(type(part).forward) for part in model.modules()):
        return False
    try:
        read = type(config).from_dict(config.to_dict())
    except Exception:  # of any type, from custom code; check_loading() reports it
        return True
    return all(getattr(part, TIE, is_tied) == is_tied for part in (read, text_config(read)))


def _names_in(function: Any) -> set[str]:
    """The names of attributes and globals that a function reads, under its decorators and in functions within it."""
    found: set[str] = set()
    waiting = [getattr(inspect.unwrap(function), '__code__', None)]
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType):
            found.update(code.co_names, (constant for constant in code.co_consts if isinstance(constant, str)))
            waiting += code.co_consts
    return found


def _differences(model: PreTrainedModel, own: Mapping[str, TracedTensor]) -> Problems:
    """How the trained model differs from the built one, apart from names that the class declares to be optional."""
    problems = differences(
        {name: one.shape_and_dtype[0] for name, one in own.items()},
        {name: tuple(tensor.shape) for name, tensor in module_tensors(model)},
    )
    for problem in ('missing', 'unexpected'):
        optional = ignored_keys(model, f'load_{problem}')
        problems[problem] = [
            name for name in problems[problem] if not any(re.search(pattern, name) for pattern in optional)
        ]
    return problems
