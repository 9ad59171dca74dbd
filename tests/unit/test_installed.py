"""Versions that cannot work are refused by name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from xhf_hooks import installed
from xhf_hooks.cli import convert, inspect, verify
from xhf_hooks.errors import InstalledError

NEW = {'torch': '2.13.0+cpu', 'transformers': '5.23.0', 'deepspeed': '0.19.6', 'mmengine': '0.10.7'}


@pytest.fixture
def has(monkeypatch):
    """Makes an environment in which these versions are installed."""

    def install(**versions: str) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(installed, 'version', version)

    return install


@pytest.mark.parametrize(
    ('name', 'old'), [('torch', '2.3.1+cu121'), ('transformers', '4.45.2'), ('mmengine', '0.10.3')]
)
def test_the_hook_tells_what_is_too_old(has, name, old):
    from xhf_hooks import HFCheckpointHook

    has(**{**NEW, name: old})
    with pytest.raises(InstalledError, match=f'found {name} {old}'.replace('+', '.')) as told:
        HFCheckpointHook()
    assert f'expected {name} {installed.LEAST[name]} or newer' in str(told.value)


def test_the_callback_and_a_call_tell_it(has, tmp_path):
    from torch import nn

    from xhf_hooks import save_hf
    from xhf_hooks.integrations.transformers import HFCheckpointCallback

    has(**{**NEW, 'transformers': '4.45.2', 'mmengine': '0.10.0'})
    for build in (HFCheckpointCallback, lambda: save_hf(nn.Linear(1, 1), tmp_path / 'out')):
        with pytest.raises(InstalledError, match=r'found transformers 4\.45\.2'):
            build()


@pytest.mark.parametrize('command', [convert, verify, inspect])
def test_the_commands_tell_it(has, capsys, command, tmp_path):
    has(torch='2.3.0', transformers='5.23.0')
    assert command.main([str(tmp_path), str(tmp_path / 'out')][: 1 if command is inspect else 2]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'expected torch 2.4 or newer, found torch 2.3.0' in line


def test_what_a_frontend_does_not_need_may_be_old_or_missing(has):
    has(torch='2.4.0a0+07cecf4168.nv24.05', transformers='4.46.0.dev0', mmengine='0.9.0')
    installed.require_usable('torch', 'transformers')
    with pytest.raises(InstalledError, match='mmengine'):
        installed.require_usable('torch', 'mmengine')
    installed.require_usable('deepspeed')
