"""What a save in the background needs when the interpreter shuts down, on every Python that is here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import late_work
from tests.helpers.ranks import HANG_SECS

STATUS = {'raise': 1, 'exit': 3, 'end': 0}


def interpreters() -> dict[str, str]:
    """Python 3.10 and later by version: on the PATH, and of pyenv."""
    candidates = [shutil.which(f'python3.{minor}') for minor in range(10, 16)]
    candidates += map(str, sorted(Path.home().glob('.pyenv/versions/3.1?.*/bin/python')))
    script = 'import sys; print("%d.%d" % sys.version_info[:2])'
    found = {'.'.join(map(str, sys.version_info[:2])): sys.executable}
    for path in filter(None, candidates):
        said = subprocess.run([path, '-c', script], capture_output=True, text=True)
        if said.returncode == 0 and re.fullmatch(r'3\.1\d\n', said.stdout):
            found.setdefault(said.stdout.strip(), path)
    return found


PYTHONS = interpreters()


@pytest.mark.parametrize('how', STATUS)
@pytest.mark.parametrize('version', PYTHONS)
def test_work_ends_though_the_interpreter_shuts_down(version, how, tmp_path):
    command = [PYTHONS[version], late_work.__file__, str(tmp_path / 'result'), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECS)
    assert ended.returncode == STATUS[how], ended.stderr
    assert (tmp_path / 'result').exists(), ended.stderr
    assert (tmp_path / 'result').read_text() == str(sum(range(100)))


def test_a_python_that_starts_no_threads_when_it_ends_is_among_them():
    if not any(int(version.split('.')[1]) >= 12 for version in PYTHONS):
        pytest.skip(f'NOT TESTED: no Python 3.12 or later here, only {", ".join(PYTHONS)}')
