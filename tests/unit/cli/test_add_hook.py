"""``xhf add-hook``: what changes in a config, what stays, and that MMEngine reads the outcome as it should."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest
from mmengine.config import Config

from xhf_hooks.cli.add_hook import main
from xhf_hooks.cli.edit_config import with_hook

LAZY = 'from mmengine.hooks import EMAHook\n'
IMPORT = '+from xhf_hooks import HFCheckpointHook'
OURS, TEXT = 'dict(type=HFCheckpointHook)', "dict(type='xhf_hooks.HFCheckpointHook')"

#: Config, and the lines that differ.
CASES = {
    'absent': ('a = 1\n', [f'+custom_hooks = [{TEXT}]']),
    'absent, no line end': ('a = 1', [f'+custom_hooks = [{TEXT}]']),
    'none': ('custom_hooks = None\n', ['-custom_hooks = None', f'+custom_hooks = [{TEXT}]']),
    'empty': ('custom_hooks = []\n', ['-custom_hooks = []', f'+custom_hooks = [{TEXT}]']),
    'one line': (
        "custom_hooks = [dict(type='EMAHook')]  # é\n",
        ["-custom_hooks = [dict(type='EMAHook')]  # é", f"+custom_hooks = [dict(type='EMAHook'), {TEXT}]  # é"],
    ),
    'one line, comma': (
        "é = 1; custom_hooks = [dict(type='EMAHook'),]\n",
        ["-é = 1; custom_hooks = [dict(type='EMAHook'),]", f"+é = 1; custom_hooks = [dict(type='EMAHook'), {TEXT}]"],
    ),
    'lines': ("custom_hooks = [\n    dict(type='EMAHook'),  # a, b\n]\n", [f'+    {TEXT},']),
    'lines, no comma': (
        "custom_hooks = [\n  dict(type='EMAHook')  # a, b\n  # c\n]\n",
        ["-  dict(type='EMAHook')  # a, b", "+  dict(type='EMAHook'),  # a, b", f'+  {TEXT},'],
    ),
    'closed on the last line': (
        "custom_hooks = [dict(type='EMAHook'),\n                dict(type='EMAHook')]\n",
        [
            "-                dict(type='EMAHook')]",
            "+                dict(type='EMAHook'),",
            f'+                {TEXT}]',
        ],
    ),
    'added to later': (
        "custom_hooks = []\ncustom_hooks += [dict(type='EMAHook')]\n",
        ['-custom_hooks = []', f'+custom_hooks = [{TEXT}]'],
    ),
    'computed': (
        "custom_hooks = [dict(type='EMAHook')] * 2\n",
        [f'+custom_hooks = [*custom_hooks, {TEXT}]'],
    ),
    'set twice': (
        "custom_hooks = []\ncustom_hooks = [dict(type='EMAHook')]\n",
        ["-custom_hooks = [dict(type='EMAHook')]", f"+custom_hooks = [dict(type='EMAHook'), {TEXT}]"],
    ),
    'lazy, absent': (LAZY, [IMPORT, f'+custom_hooks = [{OURS}]']),
    'lazy, lines': (f'{LAZY}custom_hooks = [\n    dict(type=EMAHook),\n]\n', [IMPORT, f'+    {OURS},']),
    'imported, not used': (
        f'{LAZY}from xhf_hooks import HFCheckpointHook as Ours\n',
        ['+custom_hooks = [dict(type=Ours)]'],
    ),
    'by name, MMEngine or XTuner registers it': (
        "custom_hooks = [dict(type='HFCheckpointHook')]\n",
        ["-custom_hooks = [dict(type='HFCheckpointHook')]", f'+custom_hooks = [{TEXT}]'],
    ),
    'line ends of Windows': ('custom_hooks = [\r\n]\r\n', ['-]', f'+{TEXT}]']),
}


def changes(before: str, after: str) -> list[str]:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm='', n=0))[2:]
    return [line for line in lines if not line.startswith('@@')]


def hooks_of_ours(file: Path) -> list[str]:
    names = [str(hook['type']) for hook in Config.fromfile(file).custom_hooks]
    return [name for name in names if 'HFCheckpointHook' in name]


@pytest.mark.parametrize('case', CASES)
def test_the_least_changes(case, tmp_path):
    before, expected = CASES[case]
    after = with_hook(before, tmp_path / 'config.py')
    assert changes(before, after) == expected
    assert with_hook(after, tmp_path / 'config.py') == after
    (tmp_path / 'config.py').write_bytes(after.encode())
    n_others = before.count("type='EMAHook'") + before.count('type=EMAHook') + before.count(' * 2')
    assert len(hooks_of_ours(tmp_path / 'config.py')) == 1
    hooks = Config.fromfile(tmp_path / 'config.py').custom_hooks
    assert len(hooks) == n_others + 1
    assert after.count('\r\n') == before.count('\r\n')


@pytest.mark.parametrize(
    ('before', 'after'),
    [
        (
            'from xtuner.engine.hooks import HFCheckpointHook\ncustom_hooks = [dict(type=HFCheckpointHook)]\n',
            'from xhf_hooks import HFCheckpointHook\ncustom_hooks = [dict(type=HFCheckpointHook)]\n',
        ),
        (
            'from xtuner.engine.hooks import (\n    A,\n    HFCheckpointHook,\n    B,\n)\n'
            'h = [dict(type=HFCheckpointHook)]\n',
            'from xhf_hooks import HFCheckpointHook\n'
            'from xtuner.engine.hooks import (\n    A,\n    B,\n)\nh = [dict(type=HFCheckpointHook)]\n',
        ),
        (
            'from xtuner.engine.hooks import A, HFCheckpointHook as H\nh = [dict(type=H)]\n',
            'from xhf_hooks import HFCheckpointHook as H\nfrom xtuner.engine.hooks import A\nh = [dict(type=H)]\n',
        ),
        ("h = [{'type': 'xtuner.engine.hooks.HFCheckpointHook'}]\n", "h = [{'type': 'xhf_hooks.HFCheckpointHook'}]\n"),
    ],
)
def test_xtuners_hook_is_replaced(before, after):
    assert with_hook(before, Path('config.py')) == after
    assert with_hook(after, Path('config.py')) == after


#: Base, config.
INHERITED = {
    'text': ("custom_hooks = [dict(type='EMAHook')]\n", "_base_ = './base.py'\n"),
    'texts': ("custom_hooks = [dict(type='EMAHook')]\n", "_base_ = ['base.py']\n"),
    'read_base': (
        f'{LAZY}custom_hooks = [dict(type=EMAHook)]\n',
        'from mmengine.config import read_base\n\nwith read_base():\n    from .base import *\n',
    ),
}


@pytest.mark.parametrize('case', INHERITED)
def test_the_bases_hooks_stay(case, tmp_path):
    base, config = INHERITED[case]
    (tmp_path / 'base.py').write_text(base)
    (tmp_path / 'config.py').write_text(config)
    assert main([str(tmp_path / 'config.py')]) == 0
    assert len(hooks_of_ours(tmp_path / 'config.py')) == 1
    assert len(Config.fromfile(tmp_path / 'config.py').custom_hooks) == 2


def test_a_base_without_hooks(tmp_path):
    (tmp_path / 'base.py').write_text('a = 1\n')
    (tmp_path / 'config.py').write_text("_base_ = 'base.py'\n")
    assert main([str(tmp_path / 'config.py')]) == 0
    assert len(hooks_of_ours(tmp_path / 'config.py')) == 1


BAD = {
    'training_args = 1\n': 'HFCheckpointCallback',
    'a = (\n': 'not a config: SyntaxError',
    "_base_ = 'mmdet::faster_rcnn.py'\n": "inherits from 'mmdet::faster_rcnn.py', which cannot be read",
    "_base_ = 'config.py'\n": 'cannot be read, so its hooks',
    'from mine import HFCheckpointHook\n': 'another class',
    '(' * 5000: 'not a config',
}


@pytest.mark.parametrize('text', BAD)
def test_refused(text, tmp_path, capsys):
    file = tmp_path / 'config.py'
    file.write_text(text)
    assert main([str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'xhf add-hook: {file}: ') and BAD[text] in line
    assert file.read_text() == text


def test_nothing_is_run(tmp_path):
    text = f'open({str(tmp_path / "ran")!r}, "w")\n'
    with_hook(text, tmp_path / 'config.py')
    assert not (tmp_path / 'ran').exists()


def test_the_difference_is_shown_and_only_then_written(tmp_path, capsys, monkeypatch):
    config = tmp_path / 'config.py'
    config.write_text('a = 1\n')
    assert main([str(config), '--dry-run']) == 0
    shown = capsys.readouterr().out
    assert f'+custom_hooks = [{TEXT}]' in shown and config.read_text() == 'a = 1\n'
    assert main([str(config), '-o', str(tmp_path / 'new.py')]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f'wrote {tmp_path / "new.py"}'
    assert config.read_text() == 'a = 1\n' and 'custom_hooks' in (tmp_path / 'new.py').read_text()
    assert main([str(config)]) == 0 and config.read_text() == (tmp_path / 'new.py').read_text()
    assert main([str(config)]) == 0 and 'already has the hook' in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    config.write_text('a = 1\n')
    assert main(['config.py', '--dry-run']) == 0
    assert capsys.readouterr().out.startswith('--- config.py\n+++ config.py\n'), 'both named as the user named it'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['config.py', 'new.py']


@pytest.mark.parametrize('case', ['exists', 'elsewhere', 'installed', 'json', 'fifo'])
def test_targets_that_are_refused(case, tmp_path, capsys):
    config, other = tmp_path / 'config.py', tmp_path / 'other'
    config.write_text("_base_ = 'base.py'\n" if case == 'elsewhere' else 'a = 1\n')
    (tmp_path / 'base.py').write_text('b = 1\n')
    (other / 'site-packages').mkdir(parents=True)
    arguments = [str(config), '-o', str(tmp_path / 'base.py')]
    if case == 'elsewhere':
        arguments[2] = str(other)
    elif case == 'installed':
        arguments = [str(config.rename(other / 'site-packages' / 'config.py'))]
    elif case == 'json':
        arguments = [str(config.rename(tmp_path / 'config.json'))]
    elif case == 'fifo':
        os.mkfifo(tmp_path / 'fifo.py')
        arguments = [str(tmp_path / 'fifo.py')]
    words = {'exists': 'exists', 'elsewhere': 'same folder', 'installed': 'installed package', 'json': '(.py)'}
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words.get(case, 'not a regular file') in line
