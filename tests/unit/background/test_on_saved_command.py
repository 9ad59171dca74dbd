"""The command of ``on_saved`` as a process: what it may do, what is left of it, and what becomes of its output."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import on_saved_family
from tests.helpers.ranks import HANG_SECS, start_process
from tests.helpers.tiny_checkpoint import commit_one
from xhf_hooks.background.on_saved import AfterSaves
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import CommittedCheckpoint, SaveCost, Step
from xhf_hooks.telemetry import RunLog

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

FAMILY = [sys.executable, on_saved_family.__file__]


def begin(command: list[str], folder: Path, timeout_secs: float = HANG_SECS) -> AfterSaves:
    """Make a save and start a command for it."""
    target = CheckpointFolder(folder / 'hf_model', 1)
    target.claim()
    commit_one(target, 1)
    after = AfterSaves(command, RunLog(logging.getLogger('xhf_hooks.test'), 'test'), timeout_secs=timeout_secs)
    after.committed(CommittedCheckpoint(target.final, Step('iter', 1, 1), SaveCost(1, 1.0, 1.0, 1)), target)
    target.release()
    return after


def numbers(command: list[str], folder: Path, timeout_secs: float = HANG_SECS) -> dict[str, float]:
    """Make a save, run a command for it to the end, and return its result; the folder for readers is gone then."""
    after = begin(command, folder, timeout_secs)
    assert after.wait(HANG_SECS)
    after.close()
    assert not list(folder.glob('.hf_model.kept-*'))
    return {name: value for result in after.results() for name, value in result.numbers.items()}


def output(folder: Path) -> Path:
    return folder / 'hf_model_on_saved' / 'iter_1'


def log_text(folder: Path) -> str:
    return (output(folder) / 'output.log').read_text()


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, '-c', script, *arguments]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANG_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def members(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob('*.pid')]


def alive(pids: list[int]) -> list[int]:
    """Those that have not ended; one that nobody has waited for has."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f'/proc/{pid}/stat').read_bytes().rpartition(b')')[2].split()[0] != b'Z':
                found.append(pid)
    return found


def test_the_last_object_is_the_result(tmp_path):
    script = 'import sys; print("{}"); print("e", file=sys.stderr); print("[]\\n", chr(123), "\\"a\\": 1}\\n\\n")'
    for _ in range(2):
        assert numbers(python(script), tmp_path) == {'a': 1.0}
    assert log_text(tmp_path).count('"a": 1}\n') == log_text(tmp_path).count('e\n') == 2, 'appended'
    assert numbers(python('print("done")'), tmp_path) == {}, 'what an earlier command has printed is not its result'


def test_much_output_is_no_result(tmp_path):
    assert numbers(python('print("{" + " " * 3_000_000 + "}"); print("x" * 5_000_000, end="")'), tmp_path) == {}
    assert len(log_text(tmp_path)) == 8_000_003


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        (['sh', '-c', 'echo the reason; exit 3'], 'exit status 3; last line: the reason'),
        (['sh', '-c', 'kill -9 $$'], 'killed by signal 9'),
        (['/dev/null'], 'exit status 126; last line: .*Permission denied'),
    ],
)
def test_a_command_that_fails(tmp_path, command, message, caplog):
    assert numbers(command, tmp_path) == {}
    assert caplog.text.count('ERROR') == 1 and re.search(message, caplog.text), caplog.text


def test_nothing_is_left_of_a_command_that_has_ended(tmp_path):
    numbers([*FAMILY, str(tmp_path), '0'], tmp_path)
    assert len(members(tmp_path)) == on_saved_family.MEMBERS
    until(lambda: alive(members(tmp_path)) == [])


def test_nothing_is_left_when_the_time_is_over(tmp_path, caplog):
    numbers([*FAMILY, str(tmp_path), '10000'], tmp_path, timeout_secs=5.0)
    assert 'ended: out of time' in caplog.text
    assert members(tmp_path)
    until(lambda: alive(members(tmp_path)) == [])


def test_nothing_is_left_when_training_ends(tmp_path, caplog):
    after = begin([*FAMILY, str(tmp_path), '10000'], tmp_path)
    until(lambda: len(members(tmp_path)) == on_saved_family.MEMBERS)
    after.close()
    assert 'ended: training has ended' in caplog.text
    until(lambda: alive(members(tmp_path)) == [])


def _run_family(folder: Path) -> None:
    begin([*FAMILY, str(folder), '10000'], folder).wait(HANG_SECS)


def test_nothing_is_left_when_the_run_is_killed(tmp_path):
    rank = start_process(_run_family, tmp_path)
    until(lambda: len(members(tmp_path)) == on_saved_family.MEMBERS)
    rank.kill()
    rank.join()
    until(lambda: alive(members(tmp_path)) == [])


def test_the_save_is_safe_from_the_command_and_what_the_command_adds_is_kept(tmp_path):
    script = (
        'import os, sys; from pathlib import Path; path = Path(sys.argv[1]); '
        '(path / "xhf_manifest.json").open("a").write("an edit in place"); '
        '(path / "results").mkdir(); (path / "results" / "arc.json").write_text("{}"); '
        'print("{\\"modes\\": %d}" % sum(file.stat().st_mode & 0o222 for file in path.glob("*.safetensors")))'
    )
    assert numbers(python(script, '{path}'), tmp_path) == {'modes': 0}
    saved = tmp_path / 'hf_model'
    json.loads((saved / 'xhf_manifest.json').read_text())
    assert (output(tmp_path) / 'added' / 'results' / 'arc.json').read_text() == '{}'
    assert sorted(path.name for path in output(tmp_path).iterdir()) == ['added', 'output.log']
    assert {stat.S_IMODE(path.stat().st_mode) & 0o222 for path in saved.glob('*.safetensors')} == {0}
    assert os.access(saved / 'xhf_manifest.json', os.W_OK)
