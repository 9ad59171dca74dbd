"""Registries for adding a source or an exporter.

Of those that accept a model, the last one registered wins, so yours takes precedence over ours. These are not
MMEngine's registries, so that the package works without MMEngine. MMEngine's are used only to register a hook and to
build objects from a run's config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xhf_hooks.errors import OptionError


class Registry:
    """Classes by name; has the methods of MMEngine's Registry that are used here.

    Args:
        kind: What the registry holds, for messages.

    Attributes:
        module_dict: Name to class, in the order of registration.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.module_dict: dict[str, Any] = {}

    def get(self, name: str) -> Any | None:
        """The class with this name; None if there is none."""
        return self.module_dict.get(name)

    def register_module(self, name: str | None = None, force: bool = False, module: Any = None) -> Any:
        """Add a class, as a decorator (``@SOURCES.register_module(name='mine')``) or with the class as ``module``.

        Args:
            name: Default: the name of the class.
            force: Replace the class that has this name.

        Raises:
            KeyError: The name is taken.
        """
        if not (name is None or isinstance(name, str)):
            raise TypeError(f'registry of {self._kind}s: expected a name, found {name!r}; write register_module()')
        if module is None:
            return lambda cls: self.register_module(name, force, module=cls)
        key = name or module.__name__
        if key in self.module_dict and not force:
            raise KeyError(f'{key} is already registered as {self._kind}: {self.module_dict[key]}; give force=True')
        self.module_dict[key] = module
        return module


SOURCES = Registry('source')
EXPORTERS = Registry('exporter')


def mmengine_hooks() -> Any | None:
    """MMEngine's registry of hooks; None where MMEngine is not installed.

    Raises:
        ImportError: It is installed but cannot be imported.
    """
    try:
        from mmengine.registry import HOOKS
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition('.')[0] != 'mmengine':
            raise
        return None
    return HOOKS


def register_hook(name: str, build: Callable[..., Any]) -> None:
    """Let MMEngine's configs find a hook by name, if MMEngine is installed.

    Args:
        build: The class, or a function that builds it. An existing entry with this name is kept.
    """
    hooks = mmengine_hooks()
    if hooks is not None and name not in hooks.module_dict:
        hooks.register_module(name=name, module=build)


def build_from_config(config: Mapping[str, Any]) -> Any:
    """Build what an MMEngine config describes (``dict(type='transformers.AutoTokenizer.from_pretrained', ...)``).

    Types are looked up as MMEngine does for a run's config.

    Raises:
        OptionError: MMEngine is not installed.
    """
    try:
        from mmengine.registry import Registry as MMEngineRegistry
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition('.')[0] != 'mmengine':
            raise
        expected = 'a tokenizer or a folder (configs need MMEngine, which is not installed)'
        raise OptionError('tokenizer', expected, config) from None
    return MMEngineRegistry('builder', scope='mmengine').build(dict(config))
