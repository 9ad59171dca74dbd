"""Judges what a command printed and left after reading a spoiled folder. Weights are judged by fuzz_weights.py."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.fuzz_cases import ORIGINAL, Case
from tests.helpers.limited_run import Measured, read_output

_QUOTED = re.compile(r"'[^']*'|[0-9]+")
_MOST_LINES, _MOST_IN_LINE, _MOST_OF_LIBRARIES = 400, 4000, 5
_GOOD, _REFUSED = {'convert': (0,), 'verify': (0,)}, {'convert': (1, 2), 'verify': (1, 2)}


def fault(case: Case, measured: Measured, out: Path, err: Path) -> str:
    """What is wrong, as one line; the same fault gives the same line. '' if nothing is wrong."""
    errors = read_output(err)
    if 'Traceback (most recent call last)' in errors:
        return f'traceback: {_place(errors)}'
    if measured.ended_by:
        return measured.ended_by.strip().splitlines()[-1] if 'Traceback' in measured.ended_by else measured.ended_by
    if measured.status not in _GOOD[case.tool] + _REFUSED[case.tool]:
        return f'exit status {measured.status}'
    return _wrong_text(case, measured.status, read_output(out), errors) or measured.verdict or ''


def outcome(measured: Measured) -> str:
    """The outcome of a run as a word, for counting."""
    return 'good' if measured.status == 0 else 'refused'


def _place(errors: str) -> str:
    """From a traceback: our last frame, the last frame of all, and the type of the error."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', errors)
    ours = [frame for frame in frames if '/xhf_hooks/' in frame[0]]
    shown = [f'{file.rpartition("xhf_hooks/")[2]}:{line} {function}' for file, line, function in ours[-1:]]
    if frames and frames[-1] not in ours:
        shown.append('/'.join(frames[-1][0].split('/')[-2:]) + f' {frames[-1][2]}')
    after = re.sub(r'\nC\+\+ CapturedTraceback.*', '', errors, flags=re.S).rpartition('\n  File "')[2].splitlines()
    kind = next((line for line in after[1:] if line and not line.startswith(' ')), 'unknown').partition(':')[0][:80]
    return f'{kind} at {" -> ".join(shown)}'


def _wrong_text(case: Case, status: int, out: str, errors: str) -> str:
    """Check the output: one line for an error, plus notes; nothing that moves a terminal's cursor."""
    for name, text in (('output', out), ('error', errors)):
        lines = text.splitlines() if text.isascii() else text.split('\n')
        if any(not char.isprintable() for line in text.split('\n') for char in line):
            return f'control characters on standard {name}'
        if len(lines) > _MOST_LINES and '--json' not in case.argv:
            return f'more than {_MOST_LINES} lines on standard {name}'
        if '--json' not in case.argv and (longest := max(map(len, lines), default=0)) > _MOST_IN_LINE:
            return (
                f'a line of more than {_MOST_IN_LINE} characters on standard {name}' + (longest > 10**5) * ', far more'
            )
    ours = f'xhf-{case.tool}: '
    lines = [line for line in errors.splitlines() if not re.match(r'(converting|reading|comparing): ', line)]
    foreign = [line for line in lines if not line.startswith(ours)]
    failed = status == 2 or (case.tool == 'convert' and status != 0)
    if len(foreign) > (0 if failed else _MOST_OF_LIBRARIES):
        return f'a line that is not ours: {_QUOTED.sub("..", foreign[0])[:100]!r}'
    said = [line for line in lines if line.startswith(ours) and not line.startswith(f'{ours}note: ')]
    expected = 1 if failed else 0
    return '' if len(said) == expected else f'{len(said)} lines of errors with exit status {status}'


def left_behind(case: Case, folder: Path, status: int) -> str:
    """Files that a command should not have left."""
    known = {'checkpoint-5', 'work_dir', 'base', 'model', ORIGINAL}
    expected = {'out'} if case.tool == 'convert' and status == 0 and '--dry-run' not in case.argv else set()
    found = {path.name for path in folder.iterdir()} - known
    if found != expected:
        return f'left {sorted(found - expected)} and lacks {sorted(expected - found)}'
    return ''
