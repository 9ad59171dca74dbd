"""What the fuzzers stand on: mutants are the same again, every limit ends a run, and a fault is not overlooked."""

from __future__ import annotations

import faulthandler
import os
import pickletools
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.fuzz_cases import Case, make_case, make_templates
from tests.helpers.fuzz_judges import fault
from tests.helpers.fuzz_templates import CHECKPOINTS, MODELS
from tests.helpers.fuzz_weights import judge
from tests.helpers.limited_run import Limits, Measured, Run
from tests.helpers.mutate_pickle import mutated_pickle, parse
from tests.helpers.mutate_zip import mutated_zip, read_archive

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

ROOT = Path(__file__).parents[2]
SMALL = Limits(cpu_secs=1.0, nbytes=200 * 10**6, asleep_secs=2.0, file_nbytes=10**6)


@pytest.fixture(scope='module')
def templates(tmp_path_factory):
    root = tmp_path_factory.mktemp('templates')
    for tool in ('convert', 'verify'):
        make_templates(tool, root)
    return root


# --- mutants ---


def files_in(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob('*') if p.is_file() and small(p)}


def small(path: Path) -> bool:
    return not path.is_symlink() and path.stat().st_size < 10**7


@pytest.mark.parametrize('tool', ['convert', 'verify'])
def test_a_mutant_is_the_same_again(templates, tmp_path, tool):
    originals = {name: files_in(templates / name) for name in (CHECKPOINTS if tool == 'convert' else MODELS)}
    n_spoiled = 0
    for number in range(25):
        cases = [make_case(tool, 0, number, templates, tmp_path / f'{number}_{i}') for i in range(2)]
        found = [files_in(tmp_path / f'{number}_{i}') for i in range(2)]
        assert cases[0] == cases[1] and found[0] == found[1], number
        n_spoiled += found[0] != originals[cases[0].template]
        shutil.rmtree(tmp_path / f'{number}_0')
        shutil.rmtree(tmp_path / f'{number}_1')
    assert n_spoiled > 15


def test_a_pickle_is_cut_where_its_values_are(templates):
    """Each piece that is repeated or exchanged makes one value by itself, and they are all of the pickle."""
    for file in templates.rglob('*.pt'):
        with zipfile.ZipFile(file) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith('data.pkl'))
            data = archive.read(name)
        program = parse(data)
        assert b''.join(program.code) == data and len(program.entries) > 5
        for span in program.values:
            with open(os.devnull, 'w') as nowhere:  # checks the stack at every instruction
                pickletools.dis(b'\x80\x02' + program.bytes_of(span) + b'.', nowhere, memo=Everything())


class Everything(dict):
    """A memo that has what an earlier part of the pickle put there, and lets it be put again."""

    def __contains__(self, key: object) -> bool:
        import inspect

        return inspect.currentframe().f_back.f_locals['opcode'].name.endswith('GET')

    def __getitem__(self, key: object) -> Any:
        return pickletools.anyobject


def test_pickles_grow_nest_and_share(templates):
    (file,) = templates.glob('stage3/checkpoint-5/global_step5/zero_pp_rank_0*_optim_states.pt')
    data = next(entry.data for entry in read_archive(file.read_bytes()).entries if entry.name.endswith(b'/data.pkl'))
    mutants = [mutated_pickle(data, number) for number in range(300)]
    assert len(set(mutants)) > 250
    assert max(map(len, mutants)) > 10**6, 'some are long'
    assert sum(b'\x85' * 10 in mutant or b']]]]]]]]]]' in mutant for mutant in mutants) > 2, 'some are deep'


def test_an_archive_is_written_as_it_was_read(templates):
    """So that what a mutation does not touch is in order."""
    file = next(templates.rglob('*.pt'))
    rebuilt = read_archive(file.read_bytes())
    path = file.with_name('rebuilt.zip')
    path.write_bytes(rebuilt.to_bytes())
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(file) as original:
        assert archive.testzip() is None
        assert {n: archive.read(n) for n in archive.namelist()} == {n: original.read(n) for n in original.namelist()}
    path.unlink()
    assert len({mutated_zip(file.read_bytes(), number) for number in range(60)}) > 50


# --- limits ---


def measured(tmp_path: Path, work: Callable[[], int], verdict: str = '') -> Measured:
    run = Run(lambda: 'about', lambda _: work(), lambda *_: verdict, (tmp_path / 'out', tmp_path / 'err'), SMALL)
    while (found := run.poll()) is None:
        time.sleep(0.01)
    return found


def burn() -> int:
    while True:
        pass


def hold() -> int:
    kept = [b'x' * 10**7 for _ in range(1000)]
    return len(kept)


def burn_in_a_child() -> int:
    child = os.fork()
    if not child:
        burn()
    os.waitpid(child, 0)
    return 0


def crash() -> int:
    faulthandler.disable()  # pytest's, which says much
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


@pytest.mark.parametrize(
    ('work', 'ended_by'),
    [
        (burn, 'CPU time'),
        (burn_in_a_child, 'CPU time'),
        (hold, 'memory'),
        (crash, 'signal SIGSEGV'),
    ],
)
def test_a_limit_ends_a_run(tmp_path, work, ended_by):
    found = measured(tmp_path, work)
    assert found.status is None and found.ended_by == ended_by


def test_a_run_that_waits_for_ever(tmp_path):
    fifo = tmp_path / 'fifo'
    os.mkfifo(fifo)
    assert measured(tmp_path, lambda: fifo.open() and 0).ended_by == 'hang'


def test_a_file_that_grows_for_ever(tmp_path):
    found = measured(tmp_path, lambda: (tmp_path / 'large').write_bytes(bytes(2 * 10**6)))
    assert 'File too large' in found.ended_by


def test_a_run_is_measured(tmp_path):
    def work() -> int:
        kept = b'x' * 10**8
        print('said', len(kept))
        return 2

    found = measured(tmp_path, work, verdict='wrong')
    assert (found.about, found.status, found.ended_by, found.verdict) == ('about', 2, '', 'wrong')
    assert 90 * 10**6 < found.extra_nbytes < 150 * 10**6
    assert (tmp_path / 'out').read_text() == f'said {10**8}\n'


# --- faults ---

GOOD = Measured(about=None, status=0, verdict='')
REFUSED = Measured(about=None, status=2, verdict='')
CASE = Case('convert', 7, 'stage3', 'pickle', 'pickle of x', ('checkpoint-5', 'out'))
LINE = 'xhf-convert: x: is damaged\n'
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/a/xhf_hooks/planning/planner.py", line 3, in f\n    x\nKeyError: 1\n'
)


@pytest.mark.parametrize(
    ('result', 'out', 'err', 'expected'),
    [
        (GOOD, 'found x\nwrote y\n', 'xhf-convert: note: z\n', ''),
        (REFUSED, '', LINE, ''),
        (REFUSED, '', 'xhf-convert: note: z\nconverting: 1 of 2 GB\n' + LINE, ''),
        (REFUSED, '', 2 * LINE, '2 lines of errors with exit status 2'),
        (REFUSED, '', '', '0 lines of errors with exit status 2'),
        (GOOD, '', LINE, '1 lines of errors with exit status 0'),
        (GOOD, 'found \x1b[2J\n', '', 'control characters on standard output'),
        (REFUSED, '', 'xhf-convert: \u202e\n', 'control characters on standard error'),
        (REFUSED, '', LINE + 'UserWarning: 7\n', "a line that is not ours: 'UserWarning: ..'"),
        (REFUSED, '', 'xhf-convert: ' + 'x' * 5000, 'a line of more than 4000 characters on standard error'),
        (GOOD, 'x\n' * 1000, '', 'more than 400 lines on standard output'),
        (REFUSED, '', TRACEBACK, 'traceback: KeyError at planning/planner.py:3 f'),
        (Measured(about=None, ended_by='hang'), '', '', 'hang'),
        (Measured(about=None, status=3), '', '', 'exit status 3'),
        (Measured(about=None, status=0, verdict='WRONG WEIGHTS'), '', '', 'WRONG WEIGHTS'),
    ],
)
def test_what_is_printed_is_judged(tmp_path, result, out, err, expected):
    (tmp_path / 'out').write_text(out)
    (tmp_path / 'err').write_text(err)
    assert fault(CASE, result, tmp_path / 'out', tmp_path / 'err') == expected


@pytest.mark.parametrize('options', [[], ['--dtype', 'float32']])
@pytest.mark.parametrize('template', CHECKPOINTS)
def test_wrong_weights_are_seen(templates, tmp_path, monkeypatch, template, options):
    from xhf_hooks.cli.convert import main

    folder = Path(shutil.copytree(templates / template, tmp_path / 'files'))
    monkeypatch.chdir(folder)
    argv = [CHECKPOINTS[template], 'out', *options]
    assert main(argv) == 0
    (tmp_path / 'err').write_text('')
    case = Case('convert', 7, template, 'names', '', tuple(argv))
    assert judge(case, 0, templates, folder) == ''
    (file,) = (folder / 'out').glob('*.safetensors')
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[3] += 1
    save_file(tensors, file)
    assert judge(case, 0, templates, folder) == 'WRONG WEIGHTS'
    (folder / '.out.staging-7').mkdir()
    assert judge(case, 0, templates, folder).startswith("left ['.out.staging-7']")


@pytest.mark.parametrize('template', ['whole', 'sharded_no_manifest'])
def test_a_wrong_verdict_is_seen(templates, tmp_path, template):
    """The judge is told that a damaged folder was found good."""
    folder = Path(shutil.copytree(templates / template, tmp_path / 'files'))
    (tmp_path / 'out_text').write_text('')
    case = Case('verify', 7, template, 'bytes', '', ('model',))
    assert judge(case, 0, templates, folder) == ''
    file = sorted((folder / 'model').glob('*.safetensors'))[0]
    tensors = load_file(file)
    tensors[sorted(tensors)[0]] = torch.zeros(3, 5, dtype=torch.bfloat16)
    save_file(tensors, file, {'format': 'pt'})
    assert judge(case, 0, templates, folder).startswith('GOOD, and ')


# --- the command ---


def test_one_mutant_again():
    finished = subprocess.run(
        [sys.executable, 'tools/fuzz.py', 'verify', '--only', '3'], cwd=ROOT, capture_output=True, text=True
    )
    assert 'xhf-verify model' in finished.stdout and 'exit status' in finished.stdout, finished.stderr
    folder = finished.stdout.split('cd ')[1].split(' ')[0]
    assert Path(folder).name.startswith('xhf-fuzz-')
    shutil.rmtree(folder)
