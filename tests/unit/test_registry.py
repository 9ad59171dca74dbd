"""The registries. What they do where MMEngine is missing: tests/e2e/test_imports.py."""

from __future__ import annotations

from xhf_hooks.registry import Registry, build_from_config


def test_the_last_one_of_a_name_counts():
    found = Registry()
    first, other, last = type('One', (), {}), type('Two', (), {}), type('One', (), {})
    assert [found.register_module()(cls) for cls in (first, other, last)] == [first, other, last]
    assert list(found.module_dict.items()) == [('Two', other), ('One', last)]


def test_a_config_is_built_as_mmengine_builds_it():
    assert build_from_config(dict(type='datetime.timedelta', hours=1)).seconds == 3600
