"""The registries. What they do where MMEngine is missing: tests/e2e/test_imports.py."""

from __future__ import annotations

import pytest

from xhf_hooks.registry import Registry, build_from_config


def test_by_name_or_as_decorator():
    found = Registry('thing')

    @found.register_module()
    class One:
        pass

    @found.register_module(name='two')
    class Two:
        pass

    assert found.get('One') is One and found.get('two') is Two and found.get('Two') is None
    assert list(found.module_dict) == ['One', 'two']


def test_a_name_is_given_once_unless_forced():
    found = Registry('thing')
    found.register_module(module=int, name='number')
    with pytest.raises(KeyError, match='number is already registered as thing'):
        found.register_module(module=float, name='number')
    found.register_module(module=float, name='number', force=True)
    assert found.get('number') is float


def test_register_module_is_called():
    with pytest.raises(TypeError, match=r'register_module\(\)'):

        @Registry('thing').register_module
        class Forgotten:
            pass


def test_a_config_is_built_as_mmengine_builds_it():
    assert build_from_config(dict(type='datetime.timedelta', hours=1)).seconds == 3600
