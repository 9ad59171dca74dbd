"""Whether embeddings are tied, and whether a class does more with the config's tie than tie."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

from torch import nn

from xhf_hooks.model import input_embedding, module_tensors, output_embedding

#: The field of configs that says whether input and output embeddings are one tensor.
TIE = 'tie_word_embeddings'


def are_embeddings_tied(reference: nn.Module, own: Mapping[str, object]) -> tuple[bool, bool] | None:
    """Whether the trained model's input and output embeddings are one tensor, and whether the reference's are.

    Args:
        reference: Built from the config.
        own: The trained model's tensors, by each of their names; tied ones are one object.

    Returns:
        None if the trained model does not have both.
    """
    embeddings = [input_embedding(reference), output_embedding(reference)]
    names = [[name for name, t in module_tensors(reference) if t is one and name in own] for one in embeddings]
    if not all(names):
        return None
    is_tied = len({id(own[name]) for name in (*names[0], *names[1])}) == 1
    return is_tied, embeddings[0] is embeddings[1]


def reads_tie(model: nn.Module) -> bool:
    """Whether a ``forward`` reads that field of the config: T5 and its kin scale the head's input if it is set."""
    return any(TIE in _names_in(type(part).forward) for part in model.modules())


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
