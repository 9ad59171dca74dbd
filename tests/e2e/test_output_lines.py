"""What the commands print of anybody's files: one line of plain text for each thing, and how far they are."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.zoo import build
from xhf_hooks.cli import convert, verify
from xhf_hooks.cli.output import (
    MOST_CHARACTERS,
    Progress,
    complain,
    lacks_memory,
    one_line,
    say,
)
from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.text import size_text

ROOT = Path(__file__).parents[2]
#: Clears the terminal, sets its title, writes backwards, breaks lines; half of a pair is no text at all.
HOSTILE = 'a\x1b[2J\x1b]0;title\x07\n\r\u2028\u202egnp\x9b31m\ud800\x00b'
PLAIN = r'a\x1b[2J\x1b]0;title\x07\n\r\u2028\u202egnp\x9b31m\ud800\x00b'


def is_plain(text: str) -> bool:
    return all(line.isprintable() for line in text.split('\n'))


def test_one_line():
    assert one_line(HOSTILE) == PLAIN
    assert one_line('naïve 模型 \\n stays') == 'naïve 模型 \\n stays'
    long = one_line('begin' + 'x\n' * 10**6 + 'end')
    assert len(long) < 2 * MOST_CHARACTERS and long.startswith('begin') and long.endswith(r'\nend') and '[...]' in long
    assert one_line(CheckpointError('one\ntwo')) == r'one\ntwo'


def test_every_terminal_can_take_it():
    code = 'import sys\nfrom xhf_hooks.cli.output import complain, say\nsay(sys.argv[1]); complain(sys.argv[1])'
    command = [sys.executable, '-c', code, 'é\udcff']
    done = subprocess.run(command, env={**os.environ, 'PYTHONIOENCODING': 'ascii'}, capture_output=True, cwd=ROOT)
    assert done.stdout == done.stderr == b'\\xe9\\udcff\n', done.stderr


def test_say_and_complain(capsys):
    say(HOSTILE)
    complain(HOSTILE)
    assert capsys.readouterr() == (f'{PLAIN}\n', f'{PLAIN}\n')


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
LONG = 'z\n' * 250_000


@pytest.mark.parametrize('base', [{'model_type': CLEAR}, {'model_type': LONG}, {'architectures': [CLEAR]}])
def test_convert_of_a_hostile_config(root, tmp_path, capsys, base):
    config = json.loads((root / 'base' / 'config.json').read_text())
    (tmp_path / 'base').mkdir()
    (tmp_path / 'base' / 'config.json').write_text(json.dumps({**config, **base}))
    arguments = [str(checkpoint(tmp_path / 'iter_7.pth')), str(tmp_path / 'out'), '--base', str(tmp_path / 'base')]
    assert convert.main(arguments) in (convert.FAILED, convert.BAD_INPUT)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert said.out == '' and len(lines) == 1 and is_plain(said.err) and len(said.err) < 2 * MOST_CHARACTERS


def test_verify_of_hostile_names(tmp_path, capfd):
    folder = tmp_path / f'm{CLEAR}'
    folder.mkdir()
    save_file({f'{CLEAR}{i}': torch.full((1,), float('nan')) for i in range(300)}, folder / 'model.safetensors')
    (folder / f'extra{CLEAR}.json').write_text('{')
    (folder / 'config.json').write_text(json.dumps({'model_type': CLEAR, CLEAR: LONG, 'architectures': [CLEAR]}))
    assert verify.main([str(folder)]) == verify.DIFFERENT
    said = ''.join(capfd.readouterr())
    assert is_plain(said) and r'\x1b[2J\ny\u202e' in said and len(said) < 40 * MOST_CHARACTERS
    other = tmp_path / 'other'
    other.mkdir()
    save_file({f'{CLEAR}{i}': torch.zeros(1) for i in range(200)}, other / 'model.safetensors')
    assert verify.main([str(folder), str(other)]) == verify.DIFFERENT
    said = ''.join(capfd.readouterr())
    assert is_plain(said) and said.count('only in A') == 21 and len(said) < 60 * MOST_CHARACTERS
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


def test_lack_of_memory_has_many_names():
    def because(cause: BaseException) -> Exception:
        try:
            raise RuntimeError('of a library') from cause
        except RuntimeError as error:
            return error

    for error in (
        MemoryError(),
        OSError(12, 'Cannot allocate memory'),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        because(MemoryError()),
    ):
        assert lacks_memory(error), error
    assert not lacks_memory(ValueError('x')) and not lacks_memory(CheckpointError('x: cannot allocate memory'))


@pytest.mark.parametrize(
    ('nbytes', 'text'),
    [
        (0, '0 bytes'),
        (999, '999 bytes'),
        (1000, '1.00 kB'),
        (65536, '65.5 kB'),
        (999_499, '999 kB'),
        (999_600, '1.00 MB'),
        (5 * 10**9, '5.00 GB'),
        (10**18, '1.00 EB'),
        (2**63, '9.22 EB'),
    ],
)
def test_sizes(nbytes, text):
    assert size_text(nbytes) == text


def test_progress_in_a_log(capsys):
    with Progress('reading', line_every_secs=0.0) as progress:
        progress(25 * 10**9, 100 * 10**9)
        progress(25 * 10**9, 100 * 10**9)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith('reading: 25 % of 100 GB, ') and 'B/s, ' in first and first.endswith(' left')
    assert second == 'reading: 25 % of 100 GB, 0 bytes/s, waiting for the disk'


@pytest.mark.modern_only  # it does not depend on the stack
def test_progress_on_a_terminal():
    said = on_a_terminal('with Progress("reading") as p:\n    p(1, 100); time.sleep(1); p(25, 100); p(100, 100)')
    assert 'reading:' in said and '25%' in said and '\r' in said


def on_a_terminal(lines: str) -> str:
    code = f'import time\nfrom xhf_hooks.cli.output import Progress\n{lines}'
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 100, 0, 0))  # tqdm draws nothing on no columns
    os.set_blocking(ours, False)  # what was never written is an error then
    subprocess.run([sys.executable, '-c', code], stderr=theirs, check=True, cwd=ROOT)
    said = os.read(ours, 10_000).decode()
    os.close(theirs)
    os.close(ours)
    return said


@pytest.mark.modern_only
def test_the_page_shows_the_progress_of_a_conversion(capsys):
    """All but figures and how much of the bar is full."""
    shown = [line for line in (ROOT / 'docs' / 'converting.md').read_text().splitlines() if '42' in line]
    said = on_a_terminal('with Progress("converting") as p:\n    p(1, 10**10); time.sleep(1); p(42 * 10**8, 10**10)')
    (bar,) = [line for line in said.split('\r') if '42%' in line]
    with Progress('converting', line_every_secs=0.0) as progress:
        progress(42 * 10**8, 10**10)
    assert [shape(line) for line in shown] == [shape(bar), shape(capsys.readouterr().err.strip())]


def shape(line: str) -> str:
    return re.sub(r'\|.*\|', '|', re.sub(r'[kMGTP]?B/s', 'B/s', re.sub(r'[\d.]+', '0', line)))
