"""Makes any function of the package fail once, in the threads of a save."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

#: Uploads and commands of on_saved, in threads of their own, are not part of a save.
THREADS = ('MainThread', 'xhf-SavesInBackground', 'xhf-writer')
#: Need what may not be installed, and are no part of a save.
LEFT_OUT = ('xhf_hooks.cli', 'xhf_hooks.integrations.axolotl')


class InjectedError(OSError):
    """What an armed function raises."""


@functools.cache
def faults_of_this_process() -> Faults:
    return Faults()


class Faults:
    """Wraps every function and method of the package in this process, before it is used."""

    def __init__(self) -> None:
        self._called: dict[str, tuple[str, ...]] = {}
        self._chains_that_failed: set[tuple[str, ...]] = set()
        self._armed: str | None = None
        self._within = threading.local()
        package = importlib.import_module('xhf_hooks')
        self._folder = str(Path(package.__file__).parent)
        for _, name, _ in pkgutil.walk_packages(package.__path__, 'xhf_hooks.'):
            if not name.startswith(LEFT_OUT):
                importlib.import_module(name)
        modules = [module for name, module in sys.modules.items() if name.startswith('xhf_hooks.')]
        wrapped = {function: self._wrap(function) for module in modules for function in self._functions_of(module)}
        for module in modules:
            for name, value in [*vars(module).items()]:
                if isinstance(value, FunctionType) and value in wrapped:
                    setattr(module, name, wrapped[value])
            for found in self._classes_of(module):
                self._wrap_methods(found)

    def called_by(self, function: Callable[[], object]) -> dict[str, tuple[str, ...]]:
        """Which functions are called meanwhile, and the chain of calls that first led to each, with itself."""
        self._called = {}
        function()
        return dict(self._called)

    def new(self, names: Iterable[str]) -> list[str]:
        """Those of the names that were called by a chain that this has not been asked for before."""
        chains = {name: self._called[name] for name in names}
        found = [name for name, chain in chains.items() if chain not in self._chains_that_failed]
        self._chains_that_failed.update(chains.values())
        return found

    @contextmanager
    def armed(self, name: str | None) -> Iterator[None]:
        """Inside, the first call of the function fails."""
        self._armed = name
        try:
            yield
        finally:
            self._armed = None

    def _happens(self, name: str) -> None:
        if threading.current_thread().name not in THREADS:
            return
        self._called.setdefault(name, self._within.names)
        if name == self._armed:
            self._armed = None
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
        code = getattr(inspect.unwrap(function), '__code__', None)  # what contextmanager makes wraps one of ours
        return isinstance(function, FunctionType) and code.co_filename.startswith(self._folder)

    def _functions_of(self, module: ModuleType) -> Iterator[Callable[..., Any]]:
        yield from (v for v in vars(module).values() if self._is_ours(v) and v.__module__ == module.__name__)

    def _classes_of(self, module: ModuleType) -> Iterator[type]:
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__ and not issubclass(value, BaseException):
                yield value

    def _wrap_methods(self, found: type) -> None:
        for name, value in [*vars(found).items()]:
            if isinstance(value, property) and self._is_ours(value.fget):
                setattr(found, name, property(self._wrap(value.fget), value.fset, value.fdel, value.__doc__))
            elif isinstance(value, (classmethod, staticmethod)) and self._is_ours(value.__func__):
                setattr(found, name, type(value)(self._wrap(value.__func__)))
            elif self._is_ours(value):
                setattr(found, name, self._wrap(value))
