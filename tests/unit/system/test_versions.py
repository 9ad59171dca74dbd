"""Versions that cannot work are refused by name."""

from importlib.metadata import PackageNotFoundError

import pytest

import xhf_hooks
from xhf_hooks.errors import InstalledError
from xhf_hooks.offline.commands import convert, verify
from xhf_hooks.system import versions
from xhf_hooks.system.versions import require_packages

NEW = {'torch': '2.13.0+cpu', 'transformers': '5.23.0', 'deepspeed': '0.19.6', 'mmengine': '0.10.7'}


@pytest.fixture
def has(monkeypatch):
    """Makes an environment in which these versions are installed."""

    def install(**found: str) -> None:
        def version(name: str) -> str:
            if name not in found:
                raise PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(versions, 'version', version)

    return install


@pytest.mark.parametrize(
    ('name', 'old'), [('torch', '2.0.1+cu121'), ('transformers', '4.35.2'), ('mmengine', '0.10.2')]
)
def test_the_hook_tells_what_is_too_old(has, name, old):
    """The newest version is not advised, since others may need an older one: XTuner 0.1 works with few newer ones."""
    has(**{**NEW, name: old})
    with pytest.raises(InstalledError) as told:
        xhf_hooks.HFCheckpointHook()
    said = f'expected {name} {versions.LEAST[name]} or newer, found {name} {old}; upgrade it, or install a tested set'
    assert said in str(told.value) and 'pip install' not in str(told.value)


@pytest.mark.parametrize('command', [convert, verify])
def test_the_commands_tell_it(has, capsys, command, tmp_path):
    has(torch='2.0.1', transformers='5.23.0')
    assert command.main([str(tmp_path), str(tmp_path / 'out')]) == 2
    assert 'expected torch 2.1 or newer, found torch 2.0.1' in capsys.readouterr().err


@pytest.mark.parametrize('what', ['save_hf', 'HFCheckpointCallback'])
def test_what_is_missing_is_told_with_its_remedy(has, monkeypatch, what, tmp_path):
    has(torch='2.13.0')
    monkeypatch.setattr(versions.util, 'find_spec', lambda name: None)
    with pytest.raises(InstalledError) as told:
        getattr(xhf_hooks, what)(None, tmp_path / 'out')
    assert 'found none' in str(told.value) and "pip install 'transformers>=4.36'" in str(told.value)


def test_a_package_without_metadata_is_not_missing(has):
    has(torch='2.13.0')
    require_packages('torch', 'pytest')
