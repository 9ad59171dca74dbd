"""What the commands print of anybody's files: one line of plain text for each thing, and how far they are."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.zoo import build
from xhf_hooks.cli import convert, verify
from xhf_hooks.cli.output import complain, progress, say
from xhf_hooks.format.text import size_text

ROOT = Path(__file__).parents[2]
#: Clears the terminal, sets its title, writes backwards, breaks lines; half of a pair is no text at all.
HOSTILE = 'a\x1b[2J\x1b]0;title\x07\n\r\u2028\u202egnp\x9b31m\ud800\x00b'
PLAIN = r'a\x1b[2J\x1b]0;title\x07\n\r\u2028\u202egnp\x9b31m\ud800\x00b'


def is_plain(text: str) -> bool:
    return all(line.isprintable() for line in text.split('\n'))


def test_one_line_that_every_terminal_can_take(capsys):
    say(HOSTILE)
    complain(HOSTILE)
    assert capsys.readouterr() == (f'{PLAIN}\n', f'{PLAIN}\n')
    say('naïve 模型 \\n stays')
    assert capsys.readouterr().out == 'naïve 模型 \\n stays\n'
    ascii_only = io.TextIOWrapper(io.BytesIO(), 'ascii')
    say('é\udcff', ascii_only)
    ascii_only.flush()
    assert ascii_only.buffer.getvalue() == b'\\xe9\\udcff\n'


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp('root')
    build('qwen2', seed=1).save_pretrained(folder / 'base')
    return folder


def checkpoint(path: Path, **more: torch.Tensor) -> Path:
    state = {**build('qwen2').state_dict(), **more}
    torch.save({'state_dict': state, 'meta': {'iter': 7}}, path)
    return path


CLEAR = 'x\x1b[2J\ny\u202e'


def test_convert_of_a_hostile_config(root, tmp_path, capsys):
    config = json.loads((root / 'base' / 'config.json').read_text())
    (tmp_path / 'base').mkdir()
    (tmp_path / 'base' / 'config.json').write_text(json.dumps({**config, 'architectures': [CLEAR]}))
    arguments = [str(checkpoint(tmp_path / 'iter_7.pth')), str(tmp_path / 'out'), '--base', str(tmp_path / 'base')]
    assert convert.main(arguments) == convert.BAD_INPUT
    said = capsys.readouterr()
    assert said.out == '' and len(said.err.splitlines()) == 1 and is_plain(said.err)


def test_verify_of_hostile_names(tmp_path, capfd):
    folder = tmp_path / f'm{CLEAR}'
    folder.mkdir()
    save_file({f'{CLEAR}{i}': torch.full((1,), float('nan')) for i in range(300)}, folder / 'model.safetensors')
    (folder / f'extra{CLEAR}.json').write_text('{')
    (folder / 'config.json').write_text(json.dumps({'model_type': CLEAR, 'architectures': [CLEAR]}))
    assert verify.main([str(folder)]) == verify.DIFFERENT
    said = ''.join(capfd.readouterr())
    assert is_plain(said) and r'\x1b[2J\ny\u202e' in said
    other = tmp_path / 'other'
    other.mkdir()
    save_file({f'{CLEAR}{i}': torch.zeros(1) for i in range(200)}, other / 'model.safetensors')
    assert verify.main([str(folder), str(other)]) == verify.DIFFERENT
    said = ''.join(capfd.readouterr())
    assert is_plain(said) and 'only in A: ' in said and ' and 280 more' in said
    assert verify.main([str(folder), '--json']) == verify.DIFFERENT
    out = capfd.readouterr().out
    assert is_plain(out) and json.loads(out)['path'] == str(folder)


def test_faults_of_this_program_are_lines_too(root, tmp_path, capsys, monkeypatch):
    def fail(self: object) -> None:
        raise RuntimeError(HOSTILE)

    from xhf_hooks.convert import Conversion

    monkeypatch.setattr(Conversion, 'description', fail)
    arguments = [str(checkpoint(tmp_path / 'iter_7.pth')), str(tmp_path / 'out'), '--base', str(root / 'base')]
    assert convert.main(arguments) == convert.FAILED
    said = capsys.readouterr().err
    assert 'Traceback' in said and is_plain(said) and PLAIN[:20] in said


@pytest.mark.parametrize(
    ('nbytes', 'text'),
    [(0, '0 bytes'), (999, '999 bytes'), (65536, '65.5 kB'), (999_600, '1.00 MB'), (2**63, '9.22 EB')],
)
def test_sizes(nbytes, text):
    assert size_text(nbytes) == text


@pytest.mark.parametrize(('is_terminal', 'secs'), [(True, 1), (False, 11)])
def test_progress(capsys, monkeypatch, is_terminal, secs):
    """As the page shows it, but for figures; the work of a moment shows nothing."""
    now = [1000.0]
    monkeypatch.setattr('tqdm.std.time', lambda: now[0])
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: is_terminal, raising=False)
    with progress('converting') as show:
        show(10**9, 10**10)
        assert capsys.readouterr().err == ''
        now[0] += secs
        show(42 * 10**8, 10**10)
        (said,) = capsys.readouterr().err.strip().split('\r')
    (shown,) = [line for line in (ROOT / 'docs' / 'converting.md').read_text().splitlines() if ' 42%' in line]
    assert shape(said) == shape(shown)


def shape(line: str) -> str:
    return re.sub(r'\|.*\|', '|', re.sub(r'[kMGTP]?B/s', 'B/s', re.sub(r'[\d.]+', '0', line)))
