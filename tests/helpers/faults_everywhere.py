"""Makes any function of the package fail once, on one rank, in the threads of a save."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

#: Uploads and commands of on_saved, in threads of their own, are not part of a save.
THREADS = ('MainThread', 'xhf-save', 'xhf-writer')


class InjectedError(OSError):
    """What an armed function raises."""


class Faults:
    """Wraps every function and method of the package in this process; each tells when it is called.

    Attributes:
        called: The functions that were called, in the order of their first calls, and the calls of functions that led to
            it, itself included.
    """

    def __init__(self) -> None:
        self.called: dict[str, tuple[str, ...]] = {}
        self._within = threading.local()
        self._armed: str | None = None
        self.fired = False
        package = importlib.import_module('xhf_hooks')
        self._folder = str(Path(package.__file__).parent)
        for _, name, _ in pkgutil.walk_packages(package.__path__, 'xhf_hooks.'):
            if not name.startswith(('xhf_hooks.cli', 'xhf_hooks.integrations.axolotl')):
                importlib.import_module(name)
        modules = [module for name, module in sys.modules.items() if name.startswith('xhf_hooks.')]
        wrapped = {function: self._wrap(function) for module in modules for function in self._functions_of(module)}
        for module in modules:
            for name, value in [*vars(module).items()]:
                if isinstance(value, FunctionType) and value in wrapped:
                    setattr(module, name, wrapped[value])
            for found in self._classes_of(module):
                self._wrap_methods(found)

    def arm(self, name: str) -> None:
        """Make the next call of a function fail."""
        self._armed, self.fired = name, False

    def disarm(self) -> bool:
        """Returns whether it was called."""
        self._armed = None
        return self.fired

    def _happens(self, name: str) -> None:
        if threading.current_thread().name not in THREADS:
            return
        self.called.setdefault(name, self._within.names)
        if name == self._armed:
            self._armed, self.fired = None, True
            raise InjectedError(f'injected into {name}')

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = f'{function.__module__.removeprefix("xhf_hooks.")}.{function.__qualname__}'

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            before = getattr(self._within, 'names', ())
            self._within.names = (*before, name)
            try:
                self._happens(name)
                return function(*args, **options)
            finally:
                self._within.names = before

        return call

    def _is_ours(self, function: object) -> bool:
        return isinstance(function, FunctionType) and function.__code__.co_filename.startswith(self._folder)

    def _functions_of(self, module: ModuleType) -> Iterator[Callable[..., Any]]:
        for value in vars(module).values():
            # What contextmanager has made is a function of contextlib's around one of ours
            if (
                isinstance(value, FunctionType)
                and value.__module__ == module.__name__
                and self._is_ours(inspect.unwrap(value))
            ):
                yield value

    def _classes_of(self, module: ModuleType) -> Iterator[type]:
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__ and not issubclass(value, BaseException):
                yield value

    def _wrap_methods(self, found: type) -> None:
        for name, value in [*vars(found).items()]:
            if isinstance(value, property) and self._is_ours(inspect.unwrap(value.fget)):
                setattr(found, name, property(self._wrap(value.fget), value.fset, value.fdel, value.__doc__))
            elif isinstance(value, (classmethod, staticmethod)) and self._is_ours(inspect.unwrap(value.__func__)):
                setattr(found, name, type(value)(self._wrap(value.__func__)))
            elif isinstance(value, FunctionType) and self._is_ours(inspect.unwrap(value)):
                setattr(found, name, self._wrap(value))
