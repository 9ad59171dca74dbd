"""A test's folder is its marker; what could not be tested on this machine is said where nobody overlooks it."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent

#: How a skip's reason begins when the machine lacks what the test needs.
NOT_TESTED = 'NOT TESTED: '


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        '--times', type=int, default=1, help='how often tests/stress kills runs, and saves on a network file system'
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the argument ``turn`` runs that often."""
    if 'turn' in metafunc.fixturenames:
        metafunc.parametrize('turn', range(metafunc.config.getoption('--times')), scope='module')


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """tests/unit are marked ``unit``, and so on. Launches come last: what they need is compiled meanwhile."""
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])
    items.sort(key=lambda item: item.path.relative_to(TESTS).parts[0] not in ('unit', 'e2e'))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exempt what was imported from garbage collection, which transformers and DeepSpeed start again and again."""
    if len(sys.modules) != getattr(item.session, 'n_modules', 0):
        item.session.n_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List what was left out, and why."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get('skipped', []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if NOT_TESTED in reason:
            reasons[reason.partition(NOT_TESTED)[2]] += 1
    if reasons:
        terminalreporter.section('NOT TESTED ON THIS MACHINE', sep='!', red=True, bold=True)
    for reason, count in reasons.items():
        terminalreporter.line(f'{count} tests of {reason}', red=True, bold=True)
