"""In which order saves are looked at, which are left out, and what becomes of errors. Functions, no processes."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from xhf_hooks.commit.checkpoint_folder import CheckpointFolder
from xhf_hooks.errors import TargetError
from xhf_hooks.on_saved import after_saves
from xhf_hooks.on_saved.after_saves import AfterSaves
from xhf_hooks.planning.types import CommittedCheckpoint, SaveCost, Step
from xhf_hooks.telemetry.log import RunLog

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

SECS = 60.0


class FakeKept:
    """Counts what is kept."""

    kept: ClassVar[list[str]] = []

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def keep(cls, folder: Path) -> FakeKept:
        if 'gone' in folder.name:
            raise TargetError(f'{folder} is gone')
        FakeKept.kept.append(folder.name)
        return cls(folder)

    def release(self) -> None:
        FakeKept.kept.remove(self.path.name)


class Function:
    """Waits until it may end; remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.called, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, path: Path, iteration: int) -> dict[str, object]:
        self.calls.append((path.name, iteration))
        self.called.release()
        assert self.may_end.acquire(timeout=SECS)
        if iteration == 13:
            raise RuntimeError('a function of a user')
        return {'twice': 2 * iteration, 'name': 'text'}


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setattr(after_saves, 'KeptFolder', FakeKept)
    monkeypatch.setattr(FakeKept, 'kept', [])
    made: list[AfterSaves] = []

    def make(function, keeps_all=False) -> tuple[AfterSaves, callable]:
        log = RunLog(logging.getLogger('xhf_hooks.test'), 'test')
        looking = AfterSaves(function, log, timeout_secs=SECS, keeps_all=keeps_all)
        looking.start()
        made.append(looking)

        def commit(iteration: int, name: str = 'hf_model') -> None:
            step = Step('iter', iteration, iteration)
            committed = CommittedCheckpoint(tmp_path / name, step, SaveCost(1, 1.0, 1.0, 1, 0))
            looking.committed(committed, CheckpointFolder(tmp_path / name, 1))

        return looking, commit

    yield make
    for looking in made:
        looking.close()


def iterations(looking: AfterSaves) -> list[int]:
    return [result.step.iteration for result in looking.results()]


def test_the_newest_that_waits_is_next(run):
    function = Function()
    looking, commit = run(function)
    commit(1)
    assert function.called.acquire(timeout=SECS)
    for iteration in (2, 3, 4):
        commit(iteration)
    commit(3, 'hf_model_best')  # of another name: both have their turn
    assert not looking.wait(0.01) and FakeKept.kept.count('hf_model') == 2
    function.may_end.release(9)
    assert looking.wait(SECS)
    assert function.calls == [('hf_model', 1), ('hf_model', 4), ('hf_model_best', 3)]
    assert FakeKept.kept == []
    results = looking.results()
    assert [result.scalars() for result in results] == [
        {'on_saved/hf_model/twice': 2.0},
        {'on_saved/hf_model/twice': 8.0},
        {'on_saved/hf_model_best/twice': 6.0},
    ]
    assert looking.results() == []


def test_all_have_their_turn(run):
    function = Function()
    looking, commit = run(function, keeps_all=True)
    for iteration in (1, 2, 3, 4):
        commit(iteration)
    assert len(FakeKept.kept) == 4
    function.may_end.release(9)
    assert looking.wait(SECS) and iterations(looking) == [1, 2, 3, 4] and FakeKept.kept == []


def test_errors_are_lines_in_the_log(run, caplog):
    function = Function()
    function.may_end.release(9)
    looking, commit = run(function, keeps_all=True)
    for iteration, name in ((13, 'hf_model'), (14, 'gone'), (15, 'hf_model')):
        commit(iteration, name)
    assert looking.wait(SECS) and iterations(looking) == [15] and FakeKept.kept == []
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert any('hf_model, iter_13 failed' in line and 'a function of a user' in line for line in errors), errors
    assert any('gone, iter_14 was skipped' in line for line in errors), errors


def test_close_drops_what_waits(run, caplog):
    function = Function()
    looking, commit = run(function, keeps_all=True)
    commit(1)
    assert function.called.acquire(timeout=SECS)
    commit(2)
    looking.close()
    assert FakeKept.kept == ['hf_model'], 'what a function still reads stays'
    lines = [record.getMessage() for record in caplog.records]
    assert any('hf_model, iter_2 was skipped: training has ended' in line for line in lines), lines
    assert any('hf_model, iter_1 is still running; training ends without it' in line for line in lines), lines
    function.may_end.release()
    looking._thread.join(SECS)
    assert FakeKept.kept == [] and len(function.calls) == 1


def test_a_forked_child_leaves_it_alone(run, monkeypatch):
    function = Function()
    looking, commit = run(function)
    commit(1)
    with monkeypatch.context() as child:
        child.setattr(after_saves.os, 'getpid', lambda: -1)
        looking.close()
    assert FakeKept.kept == ['hf_model']
    function.may_end.release()
    assert looking.wait(SECS) and iterations(looking) == [1]
