"""Tied weights: which of their names are written, and whether a class does more with the config's tie than tie."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import nn

from xhf_hooks.compat.transformers import ignored_keys, tied_weight_keys
from xhf_hooks.model import input_embedding, module_tensors, output_embedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from xhf_hooks.planning.types import TensorSpec

#: The field of configs that says whether input and output embeddings are one tensor.
TIE = 'tie_word_embeddings'


def are_embeddings_tied(reference: nn.Module, own: Mapping[str, TensorSpec]) -> tuple[bool, bool] | None:
    """Whether the trained model's input and output embeddings are one tensor, and whether the reference's are.

    Args:
        reference: Built from the config.
        own: The trained model's tensors, by each of their names.

    Returns:
        None if the trained model does not have both.
    """
    embeddings = [input_embedding(reference), output_embedding(reference)]
    names = [[name for name, t in module_tensors(reference) if t is one and name in own] for one in embeddings]
    if not all(names):
        return None
    is_tied = len({own[name].name for name in (*names[0], *names[1])}) == 1
    return is_tied, embeddings[0] is embeddings[1]


def reads_tie(model: nn.Module) -> bool:
    """Whether a ``forward`` reads that field of the config: T5 and its kin scale the head's input if it is set."""
    return any(TIE in _names_in(type(part).forward) for part in model.modules())


def ignored_names(reference: PreTrainedModel | None) -> set[str]:
    """Names that the class never writes: it says so, or its own ``state_dict`` leaves them out."""
    from transformers import PreTrainedModel

    ignored = set(ignored_keys(reference, 'save'))
    if reference is not None and type(reference).state_dict is not PreTrainedModel.state_dict:
        listed = reference.state_dict()
        ignored.update(name for name, _ in module_tensors(reference) if name not in listed)
    return ignored


def redundant_names(reference: PreTrainedModel, own: Mapping[str, TensorSpec]) -> list[str]:
    """Names that are not written: those that the class ignores, and all but one of tied weights.

    Same rule as ``remove_tied_weights_from_state_dict`` (transformers ``modeling_utils.py``), but ties are found by
    identity. A tie that loading does not restore is written under each name.

    Args:
        own: The trained model's tensors, by each of their names.
    """
    ignored = ignored_names(reference)
    tensors = {name: id(tensor) for name, tensor in module_tensors(reference)}
    declared = tied_weight_keys(reference)
    redundant = [name for name in own if name in ignored]
    names_of: dict[tuple[str, int | None], list[str]] = {}
    for name, spec in own.items():
        if name not in ignored:
            names_of.setdefault((spec.name, tensors.get(name)), []).append(name)
    for names in names_of.values():
        tied = [name for name in sorted(names) if matches(declared, name)]
        redundant += tied if len(tied) < len(names) else tied[:-1]
    return redundant


def matches(patterns: Sequence[str], name: str) -> bool:
    """Whether one of the patterns is found in the name."""
    return any(re.search(pattern, name) for pattern in patterns)


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
