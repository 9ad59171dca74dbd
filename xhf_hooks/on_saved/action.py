"""Resolves the option ``on_saved`` to a command or a function before training."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from xhf_hooks.errors import OptionError
from xhf_hooks.registry import type_in_config

#: Called with the folder (or URL) and the iteration of a save, and for an uploaded save with the keyword ``url``; may
#: return numbers by name.
Function = Callable[..., Mapping[str, Any] | None]
Action = tuple[str, ...] | Function


def resolve_action(option: Any, *, takes_url: bool = False) -> Action:
    """The command or function that the option ``on_saved`` names. Runs on: rank 0.

    A config (``dict(type='my_package.evaluate', limit=100)``) names a function, which also receives the other
    arguments, or a class, of which an instance is built and called.

    Args:
        takes_url: Whether a function will get the keyword ``url``.

    Raises:
        OptionError: There is no such program or function, or the function cannot be called in this way.
    """
    if isinstance(option, tuple):
        if shutil.which(option[0]) is None:
            raise OptionError('on_saved', 'a program on the PATH of rank 0, or its full path', option[0])
        return option
    if not isinstance(option, Mapping):
        _require_arguments(option, takes_url)
        return option
    found = type_in_config(option, 'on_saved', 'a command or a function')
    arguments = {name: value for name, value in option.items() if name != 'type'}
    function = found(**arguments) if isinstance(found, type) else found and partial(found, **arguments)
    if not callable(function):
        raise OptionError('on_saved', 'a type that can be called with a path and an iteration', option)
    _require_arguments(function, takes_url)
    return function


def _require_arguments(function: Function, takes_url: bool) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(Path(), 0, **({'url': ''} if takes_url else {}))
    except TypeError as error:
        call = f'function(path, iteration{", url=url" * takes_url})'
        raise OptionError('on_saved', f'a function for the call {call} ({error})', function) from None
