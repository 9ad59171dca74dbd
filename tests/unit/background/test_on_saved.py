"""In which order saves are looked at, which are left out, and what becomes of errors."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from xhf_hooks.background import on_saved
from xhf_hooks.background.on_saved import AfterSaves, after_saves_of_run, fill_in, numbers_in, without_ranks
from xhf_hooks.config.checks import PLACEHOLDERS
from xhf_hooks.config.options import RunOptions
from xhf_hooks.errors import OptionError, TargetError
from xhf_hooks.places import checkpoint_folder
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.planning.types import CommittedCheckpoint, SaveCost, Step
from xhf_hooks.telemetry import RunLog

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

SECS = 60.0


class FakeKept:
    """Counts what is kept."""

    kept: ClassVar[list[str]] = []

    def __init__(self, path: Path) -> None:
        self.path = path.parent / f'kept_{path.name}'
        self.path.mkdir(exist_ok=True)

    @classmethod
    def keep(cls, folder: Path) -> FakeKept:
        if 'gone' in folder.name:
            raise TargetError(f'{folder} is gone')
        FakeKept.kept.append(folder.name)
        return cls(folder)

    def release(self) -> None:
        FakeKept.kept.remove(self.path.name.removeprefix('kept_'))


class Command:
    """Waits until it may end; writes down its calls. Fails for iteration 13."""

    _SCRIPT = (
        'echo "$1" "$2" >> "$3/calls"; until test -e "$3/may_end"; do sleep 0.02; done; '
        'test "$2" != 13 || { echo a command of a user; exit 3; }; echo "{\\"same\\": $2, \\"name\\": \\"text\\"}"'
    )

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.words = ('sh', '-c', self._SCRIPT, 'sh', '{path}', '{step}', str(folder))

    @property
    def calls(self) -> list[tuple[str, int]]:
        file = self._folder / 'calls'
        words = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(path.rpartition('/')[2].removeprefix('kept_'), int(step)) for path, step in words]

    def wait_for_calls(self, count: int) -> None:
        deadline = time.monotonic() + SECS
        while len(self.calls) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def may_end(self) -> None:
        (self._folder / 'may_end').touch()


@pytest.fixture
def command(tmp_path) -> Command:
    return Command(tmp_path)


@pytest.fixture
def log() -> RunLog:
    return RunLog(logging.getLogger('xhf_hooks.test'), 'test')


@pytest.fixture
def looking(monkeypatch, tmp_path, command, log):
    monkeypatch.setattr(checkpoint_folder, 'KeptFolder', FakeKept)
    monkeypatch.setattr(FakeKept, 'kept', [])
    made = AfterSaves(command.words, log, timeout_secs=SECS)
    yield made
    made.close()


@pytest.fixture
def commit(looking, tmp_path) -> Callable[..., None]:
    def one(iteration: int, name: str = 'hf_model') -> None:
        step = Step('iter', iteration, iteration)
        committed = CommittedCheckpoint(tmp_path / name, step, SaveCost(1, 1.0, 1.0, 1))
        looking.committed(committed, CheckpointFolder(tmp_path / name, 1))

    return one


def iterations(looking: AfterSaves) -> list[int]:
    return [result.step.iteration for result in looking.results()]


def test_the_newest_that_waits_is_next(looking, commit, command, caplog):
    caplog.set_level(logging.INFO)
    commit(1)
    command.wait_for_calls(1)
    for iteration in (2, 3, 4):
        commit(iteration)
    commit(3, 'hf_model_best')  # of another name: both have their turn
    assert not looking.wait(0.01) and FakeKept.kept.count('hf_model') == 2
    command.may_end()
    assert looking.wait(SECS)
    assert command.calls == [('hf_model', 1), ('hf_model', 4), ('hf_model_best', 3)]
    assert FakeKept.kept == []
    results = looking.results()
    assert [result.scalars() for result in results] == [
        {'on_saved/hf_model/same': 1.0},
        {'on_saved/hf_model/same': 4.0},
        {'on_saved/hf_model_best/same': 3.0},
    ]
    assert looking.results() == []
    for skipped in (2, 3):
        assert f'hf_model, iter_{skipped} was skipped: there is a newer save' in caplog.text


def test_errors_are_lines_in_the_log(looking, commit, command, caplog, tmp_path):
    command.may_end()
    for iteration, name in ((13, 'hf_model'), (14, 'gone'), (15, 'hf_model')):
        commit(iteration, name)
        assert looking.wait(SECS)
    assert iterations(looking) == [15] and FakeKept.kept == []
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    output = tmp_path / 'hf_model_on_saved' / 'iter_13' / 'output.log'
    assert len(errors) == 2
    assert 'hf_model, iter_13 failed' in errors[0] and 'last line: a command of a user' in errors[0]
    assert f'Its output is in {output}' in errors[0] and output.read_text() == 'a command of a user\n'
    assert 'gone, iter_14 was skipped' in errors[1]


def test_close_ends_what_runs_and_drops_what_waits(looking, commit, command, caplog):
    commit(1)
    command.wait_for_calls(1)
    commit(2)
    looking.close()
    assert FakeKept.kept == [] and len(command.calls) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert any('hf_model, iter_2 was skipped: training has ended' in line for line in lines), lines
    assert any('hf_model, iter_1 failed' in line and 'ended: ' in line for line in lines), lines


def test_a_forked_child_leaves_it_alone(looking, commit, command, monkeypatch):
    commit(1)
    command.wait_for_calls(1)
    with monkeypatch.context() as child:
        child.setattr(on_saved.os, 'getpid', lambda: -1)
        looking.close()
    assert FakeKept.kept == ['hf_model']
    command.may_end()
    assert looking.wait(SECS) and iterations(looking) == [1]


def test_the_program_is_looked_for_before_training(log, tmp_path):
    assert after_saves_of_run(RunOptions(), log, tmp_path) is None
    assert after_saves_of_run(RunOptions(on_saved='sh -c x'), log, tmp_path) is not None
    with pytest.raises(OptionError, match=r"on_saved: expected a program .*'no_such_program'"):
        after_saves_of_run(RunOptions(on_saved='no_such_program x'), log, tmp_path)


def test_placeholders():
    values = dict(zip(PLACEHOLDERS, ['/a b/{step}', 5, 'iter_5', '/out'], strict=True))
    command = ['x', 'pretrained={path},step={step}', '{label}{label}', '{"json": 1}', '${HOME}', '{output}/{}']
    assert fill_in(command, values) == [
        *('x', 'pretrained=/a b/{step},step=5', 'iter_5iter_5', '{"json": 1}', '${HOME}', '/out/{}'),
    ]


def test_a_command_is_no_rank():
    kept = {'PATH': '/bin', 'CUDA_VISIBLE_DEVICES': '7', 'HF_HOME': '/hf', 'OMP_NUM_THREADS': '1', 'RANKING': 'x'}
    of_a_rank = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID']
    of_a_rank += ['ACCELERATE_USE_DEEPSPEED', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'SLURM_PROCID', 'GROUP_RANK']
    assert without_ranks(kept | dict.fromkeys(of_a_rank, '1')) == kept


@pytest.mark.parametrize(
    ('lines', 'numbers'),
    [
        (
            [json.dumps({'arc': {'acc,none': 0.5, 'alias': 'arc', 'n': 7}, 'ok': True, 'list': [1], 'none': None})],
            {'arc/acc,none': 0.5, 'arc/n': 7.0, 'ok': 1.0},
        ),
        (['{"a": NaN, "b": Infinity, "c": 1e999, "d": 2, "e": "3"}'], {'d': 2.0}),
        (['{"a": 1}', '{"a": 2}', '{', 'a warning while Python ends'], {'a': 2.0}),
        (['', 'done', '[1]', '0.5', '{"a": 1} and more', '"a"', '{"a":' * 100_000, '{"f": 1' + '0' * 400 + '}'], {}),
    ],
)
def test_the_last_object_is_the_result(lines, numbers):
    assert numbers_in(lines) == numbers
