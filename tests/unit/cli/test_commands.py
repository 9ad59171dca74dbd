"""``xhf`` and the names before it: which command runs, what help begins with, what a missing package comes to."""

from __future__ import annotations

import pytest

from xhf_hooks.cli import convert, verify
from xhf_hooks.cli.main import main


@pytest.mark.parametrize('arguments', [[], ['convert', '--help'], ['verify', '-h']], ids=' '.join)
def test_help_begins_with_examples(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    command = ' '.join(['xhf', *arguments[:-1]])
    assert lines[0] == 'examples:' and lines[1].startswith(f'  {command} ')
    assert any(line.startswith(f'usage: {command} ') for line in lines)


@pytest.mark.parametrize(('command', 'package'), [('convert', 'peft'), ('verify', 'mmengine.config')])
def test_a_package_that_is_not_there(command, package, capsys, monkeypatch):
    def lack(*_: object) -> None:
        raise ModuleNotFoundError(f'No module named {package!r}', name=package)

    module = {'convert': convert, 'verify': verify}[command]
    monkeypatch.setattr(module, {'convert': '_run', 'verify': '_compare'}[command], lack)
    assert main([command, 'A', 'B']) != 0
    (line,) = capsys.readouterr().err.splitlines()
    name = package.partition('.')[0]
    assert line == f'xhf {command}: {name} is not installed: pip install {name}'


def test_a_url_is_no_folder(capsys):
    with pytest.raises(SystemExit) as ended:
        main(['convert', 'run', 's3://bucket/run'])
    assert ended.value.code == 2
    assert 'expected a path on this machine, found the URL s3://bucket/run' in capsys.readouterr().err
