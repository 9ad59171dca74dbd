"""Configs and tokenizers that ask for too much, or are of other kinds: one line, soon, and little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hostile_models import ABSURD, ADAPTERS, BESIDE, WRONG, Outcome, outcomes

ROOT = Path(__file__).parents[2]
#: Beyond what the process had before, which had imported all that is imported.
_CPU_SECS, _MEMORY_NBYTES = 30, 2 * 10**9
#: What bounds them is a process of ours, whichever transformers it runs.
TOO_MUCH = [pytest.param(case, marks=pytest.mark.modern_only) for case in ABSURD]
_FIRST = {case.partition(' ')[0]: case for case in reversed(WRONG)}
#: Older versions of transformers get one wrong value of each field.
OF_WRONG_KIND = [
    case if case in _FIRST.values() else pytest.param(case, marks=pytest.mark.modern_only) for case in WRONG
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp('hostile')


@pytest.fixture(scope='module')
def found(folder, request) -> dict[tuple[str, str], Outcome]:
    """One process imports, and forks for each case of the tests that are run: see the helper."""
    tests = [item for item in request.session.items if item.path == request.path]
    cases = {item.callspec.params['case'] for item in tests if hasattr(item, 'callspec')} | {'code'}
    subprocess.run([sys.executable, '-m', 'tests.helpers.hostile_models', folder, *sorted(cases)], cwd=ROOT, check=True)
    return outcomes(folder)


def said(outcome: Outcome) -> list[str]:
    """On standard error, apart from progress, which a busy machine shows."""
    lines = [line for line in outcome.err.splitlines() if line]
    return [line for line in lines if not line.startswith(('reading: ', 'converting: ', 'Loading weights: '))]


@pytest.mark.parametrize('command', ['verify', 'convert'])
@pytest.mark.parametrize('case', [*TOO_MUCH, *OF_WRONG_KIND, *BESIDE, *ADAPTERS, 'code'])
def test_an_answer_within_bounds(found, case, command):
    outcome = found[case, command]
    assert outcome.status in ((0, 1) if command == 'verify' else (0, 2)), outcome
    assert 'Traceback' not in outcome.err
    assert outcome.cpu_secs < _CPU_SECS and outcome.peak_nbytes < _MEMORY_NBYTES, outcome


@pytest.mark.parametrize('case', [*TOO_MUCH, *OF_WRONG_KIND])
def test_a_config_that_no_model_has(found, case):
    """A problem to the one; to the other too, but for what it does not need. Nothing but ours is said."""
    verified, converted = found[case, 'verify'], found[case, 'convert']
    assert verified.status == 1 and 'problem    config' in verified.out and not said(verified)
    assert all(line.startswith('xhf-convert: ') for line in said(converted))
    if converted.status == 2:
        assert converted.out == '' and len(said(converted)) == 1
    else:
        assert case.startswith(('auto_map', 'torch_dtype', 'eos_token_id', 'tie_word'))


@pytest.mark.modern_only  # what older versions of transformers make the best of is another question
@pytest.mark.parametrize('case', BESIDE)
def test_a_tokenizer_that_no_model_has(found, case):
    """Nothing but ours is said. Converting has no use for some of it."""
    verified, converted = found[case, 'verify'], found[case, 'convert']
    assert verified.status == 1 and 'problem    ' in verified.out and not said(verified)
    assert all(line.startswith('xhf-convert: ') for line in said(converted))


@pytest.mark.parametrize('case', ADAPTERS)
def test_an_adapter_that_no_model_has(found, case):
    converted = found[case, 'convert']
    assert converted.status == 2 and converted.out == ''
    (line,) = said(converted)
    assert line.startswith('xhf-convert: ')


def test_code_is_told_of_and_not_run(found, folder):
    """In one line of ours, and none of transformers."""
    verified, converted = found['code', 'verify'], found['code', 'convert']
    assert verified.status == 0 and 'ok         load' in verified.out
    assert not said(verified)
    (note,) = (line for line in verified.out.splitlines() if '_x.py' in line)
    assert note.startswith('note') and 'modeling_x.py' in note and 'tokenization_x.py' in note and 'not run' in note
    assert converted.status == 0
    (note,) = (line for line in said(converted) if '_x.py' in line)
    assert note.startswith('xhf-convert: note: ') and 'not run' in note and '--trust-remote-code' in note
    assert len(said(converted)) == 1
    assert not list(folder.rglob('*.ran'))
