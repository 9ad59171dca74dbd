"""Versions that cannot work are refused by name; those that were never tested together are one line of the log."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from tests.unit.test_versions import STACKS, pins
from xhf_hooks.cli import convert, inspect, verify
from xhf_hooks.errors import InstalledError
from xhf_hooks.system import installed

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


@pytest.mark.parametrize('command', [convert, verify, inspect])
def test_the_commands_tell_it(has, capsys, command, tmp_path):
    has(torch='2.3.0', transformers='5.23.0')
    assert command.main([str(tmp_path), *([] if command is inspect else [str(tmp_path / 'out')])]) == 2
    assert 'expected torch 2.4 or newer, found torch 2.3.0' in capsys.readouterr().err


def test_a_tested_set_is_not_told(has):
    for versions in installed.TESTED:
        has(**versions)
        assert installed.untested_set() is None
    has(torch='2.6.0+cu124', transformers='4.57.6')  # a part of one
    assert installed.untested_set() is None


def test_another_set_is_told_with_the_nearest(has):
    has(torch='2.7.1+cu126', transformers='4.55.4', deepspeed='0.17.2')
    assert installed.untested_set().endswith('nearest tested set is transformers 4.57.6, deepspeed 0.18.9, torch 2.6.0')
    has(**{**NEW, 'torch': '2.13.1'})
    assert installed.untested_set().endswith('deepspeed 0.19.6, torch 2.13.0, mmengine 0.10.7')


def test_one_line_of_the_log_of_a_save(has, tmp_path, caplog):
    from tests.helpers.models.zoo import build
    from xhf_hooks import save_hf

    has(**{**NEW, 'torch': '2.99.0'})
    with caplog.at_level('INFO', logger='xhf_hooks'):
        save_hf(build('llama'), tmp_path / 'out')
    (line,) = [text for text in caplog.messages if 'never tested together' in text]
    assert 'torch 2.99.0' in line and 'the nearest tested set is' in line


@pytest.mark.parametrize('stack', STACKS)
def test_the_stacks_of_the_tests_are_tested_sets(stack):
    """With the newest transformers that is pinned: the tests do not run on Python 3.10, which has an older one."""
    found = {name: max(versions) for file in STACKS[stack] for name, versions in pins(file, applicable=False).items()}
    assert {name: found[name] for name in installed.TESTED[0]} in installed.TESTED
