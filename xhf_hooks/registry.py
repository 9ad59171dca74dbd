"""Registries for adding a source or an exporter.

Of those that accept a model, one is used, by the same rule for both: registered ones are asked before this package's
own, the last one registered first, since it may derive from an earlier one. This package's own are not registered: they
are listed in one order, the most specific first (``own`` of its extensions, then ``BUILT_IN`` in ``sources/`` and
``exporters/``).

These are not MMEngine's registries, so that the package works without MMEngine. MMEngine's are used only to register a
hook and to build objects from a run's config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from xhf_hooks.errors import OptionError

#: Extensions in this package. Nothing else imports them; each adds what it has to the registries when it is imported.
OWN_EXTENSIONS = ('xhf_hooks.xtuner',)


class Registry:
    """Classes or functions that extensions have added.

    Attributes:
        module_dict: Those of users, by name, in the order of registration.
        own: Those of this package's own extensions, in the order in which they are asked, after those of users.
    """

    def __init__(self) -> None:
        self.module_dict: dict[str, Any] = {}
        self.own: list[Any] = []

    def register_module(self) -> Callable[[type], type]:
        """A decorator that adds a class; it replaces a class of the same name."""

        def register(cls: type) -> type:
            self.module_dict.pop(cls.__name__, None)
            self.module_dict[cls.__name__] = cls
            return cls

        return register

    def last_first(self) -> list[Any]:
        """All, in the order in which they are asked whether they accept a model."""
        for extension in OWN_EXTENSIONS:
            import_module(extension)
        return [*reversed(self.module_dict.values()), *self.own]


SOURCES, EXPORTERS = Registry(), Registry()
#: Functions that build the trained model of a finished run: ``build(meta_model, config, base, folder)`` with the
#: RunConfig, the base that the user has given, and the folder of the checkpoint's config.json. They return whether the
#: checkpoint is of a model of theirs.
MODEL_BUILDERS = Registry()
#: Functions that give a tokenizer the chat template of training: ``convert(tokenizer, config, may_import=...)``. They
#: return what ``tokenizer_for_run`` in exporters/assets/find_tokenizer.py does; None if the config names no template.
CHAT_TEMPLATES = Registry()


def _mmengine_registries() -> Any | None:
    """MMEngine's module of registries; None where MMEngine is not installed, not where its import fails."""
    if find_spec('mmengine') is None:
        return None
    from mmengine import registry

    return registry


def register_hook(name: str, build: Callable[..., Any]) -> None:
    """Let MMEngine's configs find a hook by name, if MMEngine is installed. Replaces what this package registered.

    Where something else has that name, in HOOKS or in a child of it such as a project's, a config that means this hook
    would get the other one, without a word. The name alone is an error there from then on.
    """
    registries = _mmengine_registries()
    if registries is None:
        return
    for registry in [registries.HOOKS, *_below(registries.HOOKS)]:
        found = registry.module_dict.get(name)
        if getattr(found, 'func', None) is _refuse:
            continue
        if found is not None and found.__module__.partition('.')[0] != __package__:
            registry.register_module(name=name, module=partial(_refuse, name, registry, found), force=True)
        elif registry is registries.HOOKS:
            registry.register_module(name=name, module=build, force=True)


def _below(registry: Any) -> list[Any]:
    """All children of an MMEngine registry, and theirs."""
    return [found for child in registry.children.values() for found in (child, *_below(child))]


def _refuse(name: str, registry: Any, other: Any, *args: Any, **options: Any) -> None:
    theirs = f'{other.__module__}.{getattr(other, "__qualname__", name)}'
    expected = f"'{__package__}.{name}', or {theirs!r}, which has the same name in MMEngine's registry"
    raise OptionError('type', f'{expected} ({registry.scope}::{registry.name})', name)


def build_from_config(config: Mapping[str, Any]) -> Any:
    """Build what an MMEngine config describes (``dict(type='transformers.AutoTokenizer.from_pretrained', ...)``).

    Types are looked up as MMEngine does for a run's config.

    Raises:
        OptionError: MMEngine is not installed.
    """
    registries = _mmengine_registries()
    if registries is None:
        expected = 'a tokenizer or a folder (configs need MMEngine, which is not installed)'
        raise OptionError('tokenizer', expected, config)
    return registries.Registry('builder', scope='mmengine').build(dict(config))
