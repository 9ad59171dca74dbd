"""What is done after each save, checked before training."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from xhf_hooks.errors import OptionError
from xhf_hooks.registry import type_in_config

#: Called with the folder of a save and its iteration; may return numbers by name.
Function = Callable[[Path, int], Mapping[str, Any] | None]
Action = tuple[str, ...] | Function


def resolve_action(option: Any) -> Action:
    """The command or function that the option ``on_saved`` names. Runs on: rank 0.

    A config (``dict(type='my_package.evaluate', limit=100)``) names a function, which also gets its other arguments;
    or a class, an object of which is called.

    Raises:
        OptionError: There is no such program or function, or it cannot be called.
    """
    if isinstance(option, tuple):
        if shutil.which(option[0]) is None:
            raise OptionError('on_saved', 'a program that is on the PATH of rank 0, or its full path', option[0])
        return option
    if not isinstance(option, Mapping):
        return option
    found = type_in_config(option, 'on_saved', 'a command or a function')
    arguments = {name: value for name, value in option.items() if name != 'type'}
    function = found(**arguments) if isinstance(found, type) else found and partial(found, **arguments)
    if not callable(function):
        raise OptionError('on_saved', 'the type of something that can be called with a path and an iteration', option)
    return function
