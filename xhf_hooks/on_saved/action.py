"""Resolves the option ``on_saved`` to a command or a function before training."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from xhf_hooks.errors import OptionError
from xhf_hooks.registry import type_in_config

#: Called with the folder and the iteration of a save; may return numbers by name.
Function = Callable[[Path, int], Mapping[str, Any] | None]
Action = tuple[str, ...] | Function


def resolve_action(option: Any) -> Action:
    """The command or function that the option ``on_saved`` names. Runs on: rank 0.

    A config (``dict(type='my_package.evaluate', limit=100)``) names a function, which also receives the other
    arguments, or a class, of which an instance is built and called.

    Raises:
        OptionError: There is no such program or function, or it is not callable.
    """
    if isinstance(option, tuple):
        if shutil.which(option[0]) is None:
            raise OptionError('on_saved', 'a program on the PATH of rank 0, or its full path', option[0])
        return option
    if not isinstance(option, Mapping):
        return option
    found = type_in_config(option, 'on_saved', 'a command or a function')
    arguments = {name: value for name, value in option.items() if name != 'type'}
    function = found(**arguments) if isinstance(found, type) else found and partial(found, **arguments)
    if not callable(function):
        raise OptionError('on_saved', 'a type that can be called with a path and an iteration', option)
    return function
