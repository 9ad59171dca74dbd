"""The command of ``on_saved``: its turn, what it may do, what is left of it, and what becomes of its output."""

import json
import logging
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks.launch import HANG_SECS, until
from tests.helpers.ranks.processes import is_alive
from tests.helpers.runs import on_saved_family
from tests.helpers.runs.tiny_checkpoint import commit_one, content, iteration
from xhf_hooks.errors import OptionError
from xhf_hooks.places import pinned_save
from xhf_hooks.places.checkpoint_folder import CheckpointFolder
from xhf_hooks.runs.ends import on_saved
from xhf_hooks.runs.ends.on_saved import OnSaved, fill_in, numbers_in
from xhf_hooks.runs.telemetry import RunLog

FAMILY = [sys.executable, on_saved_family.__file__]
#: Writes down its arguments, waits until it may end, and prints a result; fails for iteration 13.
WAITS = (
    'echo "$1" "$2" >> "$3/calls"; until test -e "$3/may_end"; do sleep 0.02; done; '
    'test "$2" != 13 || { echo a command of a user; exit 3; }; echo "{\\"same\\": $2, \\"name\\": \\"text\\"}"'
)


class Run:
    """Saves in a folder, each of which is looked at."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        self.targets: dict[str, CheckpointFolder] = {}
        log = RunLog(logging.getLogger('xhf_hooks.test'), 'test')
        self.after = OnSaved(command, log).start()

    @property
    def results(self) -> list[tuple[int, Any]]:
        return [(step.iteration, numbers) for step, numbers in self.after.results]

    def save(self, number: int = 1, name: str = 'hf_model') -> None:
        if name not in self.targets:
            self.targets[name] = CheckpointFolder(self.folder / name, 1)
            self.targets[name].lock_and_recover()
        commit_one(self.targets[name], number)
        self.after.handle_commit(self.targets[name], iteration(number))

    @property
    def kept(self) -> list[Path]:
        return list(self.folder.glob('.*kept-*'))

    @property
    def calls(self) -> list[int]:
        """Iterations for which :data:`WAITS` was called."""
        file = self.folder / 'calls'
        return [int(line.split()[1]) for line in file.read_text().splitlines()] if file.exists() else []

    def output(self, number: int = 1) -> Path:
        return self.folder / 'hf_model_on_saved' / f'iter_{number}'


@pytest.fixture
def run_of(tmp_path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(command: list[str]) -> Run:
        made.append(Run(tmp_path, command))
        return made[-1]

    yield make
    for run in made:
        run.after.close()
        for target in run.targets.values():
            target.unlock()


@pytest.fixture
def waiting(run_of, tmp_path) -> Run:
    return run_of(['sh', '-c', WAITS, 'sh', '{path}', '{step}', str(tmp_path)])


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, '-c', script, *arguments]


def members(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob('*.pid')]


def test_the_newest_that_waits_is_next_and_errors_are_lines_in_the_log(waiting, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    waiting.save(13)
    until(lambda: waiting.calls)
    for number in (14, 15, 16):
        waiting.save(number)
    waiting.save(15, 'hf_model_best')  # of another name: both have their turn
    waiting.after.handle_commit(CheckpointFolder(tmp_path / 'gone', 1), iteration(17))
    assert not waiting.after.wait(0.01) and len(waiting.kept) == 3
    (tmp_path / 'may_end').touch()
    assert waiting.after.wait(HANG_SECS) and waiting.kept == []
    assert waiting.calls == [13, 16, 15]
    assert waiting.results == [(16, {'on_saved/hf_model/same': 16.0}), (15, {'on_saved/hf_model_best/same': 15.0})]
    for line in (
        'hf_model, iter_14 was cancelled: there is a newer save',
        'hf_model, iter_15 was cancelled: there is a newer save',
        'gone, iter_17 was cancelled: ',
        f'Its output is in {waiting.output(13) / "output.log"}',
    ):
        assert line in caplog.text
    assert re.search('hf_model, iter_13 failed.*exit status 3; last line: a command of a user', caplog.text)


def test_close_ends_what_runs_and_drops_what_waits(waiting, caplog):
    waiting.save(1)
    until(lambda: waiting.calls)
    waiting.save(2)
    waiting.after.close()
    waiting.save(3)  # of the background save that the end of training waits for
    waiting.after.close()
    assert waiting.kept == [] and waiting.calls == [1]
    for number in (1, 2, 3):
        assert f'iter_{number} was cancelled: training has ended' in caplog.text


def test_the_program_is_looked_for_before_training(run_of):
    with pytest.raises(OptionError, match=r"on_saved: expected a program .*'no_such_program'"):
        run_of(['no_such_program', 'x'])


def test_placeholders():
    values = dict(path='/a b/{step}', step=5, label='iter_5', output='/out')
    command = ['x', 'pretrained={path},step={step}', '{label}{label}', '{"json": 1}', '${HOME}', '{output}/{}']
    assert fill_in(command, values) == [
        *('x', 'pretrained=/a b/{step},step=5', 'iter_5iter_5', '{"json": 1}', '${HOME}', '/out/{}')
    ]


def test_a_command_is_no_rank(run_of, monkeypatch):
    of_a_rank = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_RUN_ID']
    of_a_rank += ['ACCELERATE_USE_DEEPSPEED', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'SLURM_PROCID', 'GROUP_RANK']
    # What makes a launcher in the command a node of the training: Kubeflow's, XTuner's and ms-swift's
    of_a_rank += ['PET_NNODES', 'PET_NODE_RANK', 'PET_NPROC_PER_NODE', 'PET_RDZV_ENDPOINT', 'PET_MASTER_ADDR']
    of_a_rank += ['NNODES', 'NODE_RANK', 'NPROC_PER_NODE', 'ADDR', 'PORT', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS']
    for name in (*of_a_rank, 'CUDA_VISIBLE_DEVICES', 'RANKING'):
        monkeypatch.setenv(name, '7')
    run = run_of(python('import os, json; print(json.dumps({n: 1 for n, v in os.environ.items() if v == "7"}))'))
    run.save()
    assert run.after.wait(HANG_SECS)
    assert run.results == [(1, {'on_saved/hf_model/CUDA_VISIBLE_DEVICES': 1.0, 'on_saved/hf_model/RANKING': 1.0})]


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


@pytest.mark.parametrize('how', ['it ends', 'out of time', 'training has ended'])
def test_nothing_is_left_of_a_command(run_of, tmp_path, how, caplog, monkeypatch):
    monkeypatch.setattr(on_saved, 'MOST_SECS', 5.0 if how == 'out of time' else 600)
    run = run_of([*FAMILY, str(tmp_path), '0' if how == 'it ends' else '10000'])
    run.save()
    if how == 'training has ended':
        until(lambda: len(members(tmp_path)) == on_saved_family.MEMBERS)
        run.after.close()
    assert run.after.wait(HANG_SECS) and run.kept == []
    said = {'it ends': '', 'out of time': 'killed by signal 9', 'training has ended': 'cancelled: training has ended'}
    assert said[how] in caplog.text
    assert members(tmp_path)
    until(lambda: not any(map(is_alive, members(tmp_path))))


def _run_family(folder: Path) -> None:
    run = Run(folder, [*FAMILY, str(folder), '10000'])
    run.save()
    run.after.wait(HANG_SECS)


def test_nothing_is_left_when_the_run_is_killed(tmp_path):
    rank = multiprocessing.get_context('fork').Process(target=_run_family, args=(tmp_path,))
    rank.start()
    until(lambda: len(members(tmp_path)) == on_saved_family.MEMBERS)
    rank.kill()
    rank.join()
    until(lambda: not any(map(is_alive, members(tmp_path))))


def test_the_save_is_safe_from_the_command_and_what_the_command_adds_is_kept(run_of, tmp_path, monkeypatch):
    """Also if it does so twice for one step."""
    monkeypatch.setattr(pinned_save, 'clone', lambda source, to: False)
    script = (
        'import os, sys; from pathlib import Path; path = Path(sys.argv[1]); '
        '(path / "xhf_manifest.json").open("a").write("an edit in place"); '
        '(path / "results").mkdir(); (path / "results" / "arc.json").write_text("{}"); '
        'print("{\\"weights\\": %d}" % sum(1 for file in path.glob("*.safetensors")))'
    )
    run = run_of(python(script, '{path}'))
    for _ in range(2):
        run.save()
        assert run.after.wait(HANG_SECS) and run.kept == []
    assert run.results == [(1, {'on_saved/hf_model/weights': 3.0})] * 2
    saved = tmp_path / 'hf_model'
    json.loads((saved / 'xhf_manifest.json').read_text())
    for apart in ('hf_model_others_iter_1', 'hf_model_others_iter_1_2'):
        assert (tmp_path / apart / 'results' / 'arc.json').read_text() == '{}'
    assert [path.name for path in run.output().iterdir()] == ['output.log']
    assert os.access(saved / 'xhf_manifest.json', os.W_OK)


#: What a command does to a weight file, and whether the save stays as it was though the file is a hard link.
CHANGES = {
    'removed': 'os.unlink(path)',
    'replaced': 'open(path + ".new", "w").close(); os.replace(path + ".new", path)',
    'truncated': 'os.truncate(path, 9)',
}


@pytest.mark.parametrize('change', CHANGES)
def test_a_command_may_do_to_the_folder_what_it_likes_but_write_into_hard_links(
    run_of, tmp_path, caplog, monkeypatch, change
):
    can_clone = change == 'truncated'  # a clone may be written into, too
    monkeypatch.setattr(pinned_save, 'clone', lambda source, to: can_clone and bool(shutil.copy(source, to)))
    start = 'import os, sys; path = os.path.join(sys.argv[1], "model-00002-of-00003.safetensors"); '
    run = run_of(python(start + CHANGES[change], '{path}'))
    run.save()
    assert run.after.wait(HANG_SECS) and run.kept == []
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == []
    assert content(tmp_path / 'hf_model') == 1
