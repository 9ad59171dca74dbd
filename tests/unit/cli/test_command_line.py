"""What both commands say of their own use, before anything is imported or read."""

from __future__ import annotations

import pytest

from xhf_hooks import __version__
from xhf_hooks.cli import convert, verify

COMMANDS = {'xhf-convert': convert, 'xhf-verify': verify}


@pytest.mark.parametrize('name', COMMANDS)
def test_help_begins_with_the_usage_and_ends_with_examples(name, capsys):
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name].main(['--help'])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith(f'usage: {name}')
    assert said.index('options:') < said.index('examples:') and said.count(f'  {name} ') >= 4


@pytest.mark.parametrize('name', COMMANDS)
def test_version(name, capsys):
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name].main(['--version'])
    assert ended.value.code == 0 and capsys.readouterr().out == f'{name} {__version__}\n'


@pytest.mark.parametrize(
    ('name', 'words', 'expected'),
    [
        (
            'xhf-convert',
            'run OUT --max-shard-size 5gigs',
            "expected a size such as '128MB' or a number of bytes",
        ),
        ('xhf-verify', 'FILE', 'model.safetensors is a file; give its folder: '),
        ('xhf-verify', 'a b c', 'expected one path or two, found 3: a b c'),
    ],
)
def test_wrong_use_says_what_is_right(name, words, expected, tmp_path, capsys):
    file = tmp_path / 'model.safetensors'
    file.touch()
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name].main(words.replace('FILE', str(file)).split())
    assert ended.value.code == 2 and expected in capsys.readouterr().err
