"""The registries, and what is found without MMEngine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from xhf_hooks.registry import Registry, build_from_config

#: A process in which MMEngine and DeepSpeed are not installed.
BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('mmengine', 'deepspeed'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Missing())
"""


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


def bare(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, '-c', BARE + code], capture_output=True, text=True, timeout=300)


def test_without_mmengine_the_hook_says_what_to_install():
    done = bare(
        'import xhf_hooks; xhf_hooks.save_hf\ntry: xhf_hooks.HFCheckpointHook\nexcept ImportError as e: print(e)'
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'xhf_hooks[mmengine]'" in done.stdout and done.stdout.count('\n') == 1


def test_without_mmengine_a_tokenizer_config_is_refused():
    done = bare(
        'from xhf_hooks.errors import OptionError\nfrom xhf_hooks.registry import build_from_config\n'
        "try: build_from_config({'type': 'x'})\nexcept OptionError as e: print(e)"
    )
    assert 'option tokenizer: expected a tokenizer or a folder' in done.stdout, done.stderr


def test_an_mmengine_that_does_not_import_is_not_taken_for_missing(tmp_path):
    (tmp_path / 'mmengine').mkdir()
    (tmp_path / 'mmengine' / '__init__.py').write_text('import lacking_dependency')
    done = subprocess.run(
        [sys.executable, '-c', f'import sys; sys.path.insert(0, {str(tmp_path)!r}); import xhf_hooks'],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "No module named 'lacking_dependency'" in done.stderr
