"""Saves of many models hold what tests/golden has recorded for the installed transformers.

tools/golden_answers.py compares the same for any version, and records.
"""

import pytest
import transformers

from tests.helpers.checks.golden import answer_of, differences, minor_version, read_answers
from tests.helpers.models.golden_cases import cases, save

VERSION = minor_version(transformers.__version__)
RECORDED = read_answers()
EXPECTED = RECORDED.get(VERSION, {})
CASES = dict(cases())

pytestmark = pytest.mark.skipif(
    not EXPECTED, reason=f'answers are recorded for transformers {", ".join(RECORDED)}, not for {VERSION}'
)


@pytest.mark.parametrize('name', [name for name, case in CASES.items() if case.needs()] if EXPECTED else ['all'])
def test_a_save_is_as_recorded(name, tmp_path):
    assert name in EXPECTED, 'no answer is recorded: python tools/golden_answers.py --record'
    found = answer_of(save(CASES[name], tmp_path), replaced=tmp_path, with_bytes=CASES[name].is_exact)
    lines = differences(found, EXPECTED[name])
    assert not lines, '\n'.join(['', *lines])


def test_each_recorded_case_is_compared():
    assert sorted(EXPECTED.keys() - CASES.keys()) == []
