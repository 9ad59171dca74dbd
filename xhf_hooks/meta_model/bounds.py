"""Limits on the model that an untrusted ``config.json`` may describe, by the number of tensors in the files."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module as nn_module

from xhf_hooks.errors import DamagedError

#: transformers' models register up to 4 modules and parameters per tensor.
_REGISTERED, _REGISTERED_PER_TENSOR = 10_000, 20
#: Labels, layer types, module names. The ImageNet-21k labels, in both directions, are 44,000 items.
_ITEMS, _ITEMS_PER_TENSOR = 200_000, 10


@contextmanager
def limited_modules(n_tensors: int) -> Iterator[None]:
    """Limit how many modules this thread may build inside the block.

    Args:
        n_tensors: Number of tensors in the files.

    Raises:
        DamagedError: There are far more modules and parameters than tensors in the files.
    """
    most, thread, count = _REGISTERED + _REGISTERED_PER_TENSOR * n_tensors, threading.get_ident(), 0

    def count_one(*_: object) -> None:
        nonlocal count
        if threading.get_ident() == thread:
            count += 1
            if count > most:
                raise DamagedError(
                    f'config.json describes over {most} modules, far too many for a model of {n_tensors} tensors'
                )

    hooks = [
        nn_module.register_module_module_registration_hook(count_one),
        nn_module.register_module_parameter_registration_hook(count_one),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def require_modest(config: object, n_tensors: int, where: str) -> None:
    """Refuse a config whose nested lists and dicts have too many items for a model of ``n_tensors``.

    Args:
        config: Parsed JSON or a config of transformers.
        where: Its file, for messages.

    Raises:
        DamagedError: There are too many.
    """
    most, seen, count = _ITEMS + _ITEMS_PER_TENSOR * n_tensors, set(), 0
    todo: list[Any] = [config]
    while todo:
        value = todo.pop()
        inside = _inside(value)
        if inside is None or id(value) in seen:
            continue
        seen.add(id(value))
        count += len(inside)
        if count > most:
            raise DamagedError(
                f'{where}: lists and dicts of over {most} items, far too many for a model of {n_tensors} tensors'
            )
        todo.extend(inside)


def _inside(value: Any) -> list[Any] | None:
    """The items of a container or of a config of transformers; None for other values."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(vars(value).values()) if hasattr(value, 'model_type') and hasattr(value, '__dict__') else None
