"""Saves of many models hold what tests/golden has recorded for the installed transformers.

tools/golden_answers.py compares the same for any version, and records.
"""

from importlib.metadata import version

import pytest
import transformers

from tests.helpers.checks.golden import PACKAGES, answer_of, differences, minor_version, read_answers
from tests.helpers.models.golden_cases import OF_XTUNER, cases, save

VERSION, PEFT = minor_version(transformers.__version__), minor_version(version('peft'))
RECORDED = read_answers()
EXPECTED = RECORDED.pop(VERSION, {})
PEFT_RECORDED = EXPECTED.pop(PACKAGES, {}).get('peft')
CASES = {name: case for name, case in cases() if case.needs()} if EXPECTED else {}

pytestmark = [
    # In the first tier, test_families and the tests of the other exporters compare with the installed libraries
    pytest.mark.needs(),
    pytest.mark.skipif(
        not EXPECTED,
        reason=f'no answers of transformers {VERSION}, but of {", ".join(RECORDED)}: tools/golden_answers.py',
    ),
]


def is_compared(name: str) -> bool:
    """Whether the answer is to be that of this set: XTuner's classes are recorded in its two sets (test_versions)."""
    is_of_this_peft = PEFT == PEFT_RECORDED or 'lora' not in CASES[name].options
    return is_of_this_peft and (name in EXPECTED or not name.startswith(OF_XTUNER))


@pytest.mark.parametrize('name', filter(is_compared, CASES))
def test_a_save_is_as_recorded(name, tmp_path):
    assert name in EXPECTED, 'no answer is recorded: python tools/golden_answers.py --record'
    found = answer_of(save(CASES[name], tmp_path), replaced=tmp_path, with_bytes=CASES[name].is_exact)
    lines = differences(found, EXPECTED[name])
    assert not lines, '\n'.join(['', *lines])


@pytest.mark.skipif(
    PEFT != PEFT_RECORDED, reason=f'answers of adapters are those of peft {PEFT_RECORDED}, not of {PEFT}'
)
def test_each_recorded_case_is_compared():
    assert [name for name in sorted(EXPECTED.keys() - CASES.keys()) if not name.startswith(OF_XTUNER)] == []
