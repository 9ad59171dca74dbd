"""The lock files say all that is installed, and installing by them comes to what the requirements name."""

import re
import sysconfig
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.checks.golden import minor_version, read_answers
from tests.helpers.models.golden_cases import OF_XTUNER

REQUIREMENTS = Path(__file__).parents[2] / 'requirements'
STACKS = {
    'modern': ['modern.txt', 'test.txt', 'docs.txt'],
    'xtuner': ['xtuner.txt', 'xtuner_no_deps.txt', 'test.txt'],
    'xtuner-0.1': ['xtuner-0.1.txt', 'xtuner-0.1_no_deps.txt', 'test.txt'],
}
THIS_STACK = 'xtuner' if find_spec('xtuner') else 'modern'
#: pip comes with the environment.
NOT_LOCKED = {'pip', 'xhf-hooks'}


def pins(file: str, applicable: bool = True) -> dict[str, set[str]]:
    """Package to version, `name==version` a line; those for other Pythons and systems only if not ``applicable``."""
    found: dict[str, set[str]] = {}
    for line in (REQUIREMENTS / file).read_text().splitlines():
        text = line.partition('#')[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        (specifier,) = requirement.specifier
        assert specifier.operator == '==', f'{file}: {line} is no pin'
        if not applicable or requirement.marker is None or requirement.marker.evaluate():
            found.setdefault(canonicalize_name(requirement.name), set()).add(specifier.version)
    return found


def test_all_that_is_installed_is_locked():
    """The two builds of torch are one version."""
    locked = pins(f'{THIS_STACK}.lock.txt')
    found = distributions(path=list({sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}))
    installed = {canonicalize_name(one.metadata['Name']): one.version.partition('+')[0] for one in found}
    others = {n: v for n, v in installed.items() if n not in NOT_LOCKED and v not in locked.get(n, ())}
    assert others == {}, f'not as in requirements/{THIS_STACK}.lock.txt: remove .venv*, or run tools/lock.sh'


@pytest.mark.parametrize('stack', STACKS)
def test_every_requirement_is_locked(stack):
    locked = pins(f'{stack}.lock.txt', applicable=False)
    for file in STACKS[stack]:
        for name, versions in pins(file, applicable=False).items():
            assert versions <= locked.get(name, set()), f'{file}: {name} {versions}; run tools/lock.sh'


@pytest.mark.parametrize('stack', STACKS)
def test_the_cuda_build_of_torch_is_locked_too(stack):
    locked = pins(f'{stack}.lock.txt', applicable=False)
    assert 'triton' in locked and any(name.startswith('nvidia-nccl-cu') for name in locked)


def test_the_table_in_docs_is_what_is_required():
    text = (REQUIREMENTS.parent / 'docs' / 'versions.md').read_text()
    rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in text.splitlines() if line.startswith('| ')]
    for column, stack in enumerate(STACKS, start=1):
        required = {name: version for file in STACKS[stack] for name, version in pins(file, applicable=False).items()}
        told = {row[0]: row[column] for row in rows if len(row) == 4 and row[0] in required and row[column]}
        assert len(told) >= 7
        assert {name: version for name, version in told.items() if version not in required[name]} == {}


def test_the_versions_on_the_page_of_xtuner_were_run():
    """By tools/matrix.sh, which writes rows of docs/versions.md, or as a pinned set."""
    docs = REQUIREMENTS.parent / 'docs'
    row_of_a_set = r'(?m)^\| [\w.-]+ \| 3\.[\d.]+ \| ([\d.]+) \| ([\d.]+) \| '
    run = set(re.findall(row_of_a_set, (docs / 'versions.md').read_text(encoding='utf-8')))
    for stack in ('xtuner', 'xtuner-0.1'):
        pinned = pins(f'{stack}.txt')
        run |= {(*pinned['torch'], *pinned['transformers'])}
    row_of_xtuner = r'(?m)^\| 0\.[\d.]+ \| ([\d.]+) \| ([\d.]+) \| 3\.\d+ \|'
    shown = re.findall(row_of_xtuner, (docs / 'xtuner.md').read_text(encoding='utf-8'))
    assert len(shown) >= 7 and {(torch, transformers) for transformers, torch in shown} <= run


def test_both_sets_of_xtuner_have_answers_of_its_classes():
    """CI runs one of the two sets, so that a run of the other one must not be the first to miss them."""
    answers, cases = read_answers(), {}
    for stack in ('xtuner', 'xtuner-0.1'):
        (version,) = pins(f'{stack}.txt')['transformers']
        cases[stack] = {name for name in answers[minor_version(version)] if name.startswith(OF_XTUNER)}
    assert cases['xtuner'] == cases['xtuner-0.1'] != set(), 'python tools/golden_answers.py --record xtuner'


def test_what_the_matrix_leaves_out_exists():
    """``# without tests/unit/FILE.py::TEST[CASE]: REASON`` in requirements/matrix."""
    for file in sorted((REQUIREMENTS / 'matrix').glob('*.txt')):
        for path, test in re.findall(r'^# without ([^: ]+)(?:::(\w+))?', file.read_text(), re.MULTILINE):
            assert f'def {test}' in (REQUIREMENTS.parent / path).read_text(), f'{file}: {path}::{test}'
