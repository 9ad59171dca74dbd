"""What could not be tested on this machine is said where nobody overlooks it."""

from __future__ import annotations

from collections import Counter
from typing import Any

#: How a skip's reason begins when the machine lacks what the test needs.
NOT_TESTED = 'NOT TESTED: '


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
