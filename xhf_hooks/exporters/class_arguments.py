"""Arguments of a model's class that its config does not hold, such as ``add_pooling_layer=False`` of BertModel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from xhf_hooks.format.text import some

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from xhf_hooks.exporters.loading_check import Problems


def find_arguments(
    kind: type[PreTrainedModel], without: Problems, differences_with: Callable[[Mapping[str, Any]], Problems]
) -> dict[str, Any] | None:
    """The keyword arguments with which a class builds the trained model; None if there are none.

    Only arguments that are true or false by default are tried, one after the other: each that makes it differ less
    stays.

    Args:
        without: How the trained model differs from what the class builds without arguments.
        differences_with: Builds the class with some keyword arguments, and compares it with the trained model.
    """
    arguments: dict[str, Any] = {}
    n_left = _count(without)
    for one in inspect.signature(kind.__init__).parameters.values():
        if n_left and type(one.default) is bool:
            n_with = _count(differences_with({**arguments, one.name: not one.default}))
            if n_with < n_left:
                arguments[one.name], n_left = not one.default, n_with
    return None if n_left else arguments


def _count(problems: Problems) -> int:
    return sum(map(len, problems.values()))


def warn_of_arguments(kind: type[PreTrainedModel], arguments: Mapping[str, Any], without: Problems) -> list[str]:
    """A warning that whoever loads the folder has to give these arguments, too.

    Args:
        without: How the trained model differs from what the class builds without them.
    """
    if not arguments:
        return []
    given = ', '.join(f'{name}={value}' for name, value in arguments.items())
    lost = {'initialised at random': without['missing'], 'not loaded': without['unexpected']}
    losses = '; '.join(f'{what}: {some(names)}' for what, names in lost.items() if names)
    return [
        f'{kind.__name__} was built with {given}, which config.json does not hold: load the folder with '
        f'from_pretrained(..., {given}). Otherwise some tensors are {losses}'
    ]
