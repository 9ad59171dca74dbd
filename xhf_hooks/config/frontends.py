"""Gives a frontend its options: documents them in its docstring and refuses misspelt names."""

from __future__ import annotations

import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import Field, fields, is_dataclass
from typing import Any, TypeVar

from xhf_hooks.errors import UnknownOptionError


def require_known(frontend: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a misspelt option.

    Raises:
        UnknownOptionError: There is no such option; the error suggests the closest name.
    """
    known = [name for name in known if name != 'self']
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f'did you mean {near[0]}?' if near else f'its options are {", ".join(known)}'
            raise UnknownOptionError(name, frontend, hint)


def in_reading_order(options: type) -> list[Field[Any]]:
    """The options: out_dir, then its own, then inherited ones."""
    found = {option.name: option for base in options.__mro__ for option in _own_fields(base)}
    return sorted(found.values(), key=lambda option: option.name != 'out_dir')


def _own_fields(cls: type) -> list[Field[Any]]:
    names = inspect.get_annotations(cls)
    return [option for option in fields(cls) if option.name in names] if is_dataclass(cls) else []


def with_options(doc: str | None, options: type) -> str:
    """The docstring with all options in its ``Args`` section, which precedes ``Returns`` and ``Examples``."""
    lines = []
    for option in in_reading_order(options):
        meaning = f'{option.name} ({option.type}): {option.metadata["meaning"]} Defaults to {option.default!r}.'
        lines += textwrap.wrap(meaning, 112, initial_indent=' ' * 8, subsequent_indent=' ' * 12)
    doc = inspect.cleandoc(doc or '')
    section = inspect.cleandoc('\n'.join(lines))
    before, mark, after = next(
        (parts for mark in ('Returns:', 'Examples:') if (parts := doc.partition(f'\n{mark}'))[1]), (doc, '', '')
    )
    head = '' if '\nArgs:\n' in before else '\nArgs:\n'
    return f'{before.rstrip()}\n{head}{textwrap.indent(section, "    ")}\n{mark}{after}'


_Function = TypeVar('_Function', bound=Callable[..., Any])
_Class = TypeVar('_Class', bound=type)


def frontend_function(options: type) -> Callable[[_Function], _Function]:
    """Decorator of a function that takes ``options`` as keywords: documents them and refuses misspelt names."""

    def decorate(function: _Function) -> _Function:
        checked = _refusing_misspelt(function, function.__name__)
        checked.__doc__ = with_options(function.__doc__, options)
        return checked

    return decorate


def frontend_class(cls: _Class) -> _Class:
    """Decorator of a class that inherits its options: documents them and refuses misspelt names."""
    cls.__init__ = _refusing_misspelt(cls.__init__, cls.__name__)  # type: ignore[misc]
    cls.__doc__ = with_options(cls.__doc__, cls)
    return cls


def _refusing_misspelt(function: _Function, name: str) -> _Function:
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        require_known(name, given, known)
        return function(*args, **given)

    return checked  # type: ignore[return-value]
