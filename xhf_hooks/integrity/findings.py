"""The findings of a check, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xhf_hooks.format.text import counted, size_text

OK, PROBLEM, UNCHECKED, NOTE = 'ok', 'problem', 'unchecked', 'note'
_ORDER = (OK, NOTE, UNCHECKED, PROBLEM)
_SHOWN = 20  # lines per kind and check; JSON has all


@dataclass(frozen=True)
class Finding:
    """One line of a report."""

    kind: str
    check: str
    text: str

    def line(self) -> str:
        """The finding as a row of the report."""
        return f'{self.kind:<10} {self.check:<11} {self.text}'


@dataclass
class Findings:
    """Collects findings; a problem does not stop the checks."""

    found: list[Finding] = field(default_factory=list)

    def ok(self, check: str, text: str) -> None:
        """The check passed."""
        self.found.append(Finding(OK, check, text))

    def problem(self, check: str, text: str) -> None:
        """Damaged, changed or inconsistent."""
        self.found.append(Finding(PROBLEM, check, text))

    def unchecked(self, check: str, text: str) -> None:
        """Not checked; the text says why."""
        self.found.append(Finding(UNCHECKED, check, text))

    def note(self, check: str, text: str) -> None:
        """A remark, not a fault."""
        self.found.append(Finding(NOTE, check, text))

    def texts(self, kind: str) -> list[str]:
        return [finding.text for finding in self.found if finding.kind == kind]

    def has_problem(self, check: str | None = None) -> bool:
        return any(f.kind == PROBLEM and check in (None, f.check) for f in self.found)


@dataclass(frozen=True)
class FolderReport:
    """The result of checking one folder.

    Attributes:
        path: The folder, or its URL.
        nbytes: Size of all files.
        read_nbytes: Bytes that were read.
    """

    path: Path | str
    findings: tuple[Finding, ...]
    n_files: int
    n_tensors: int
    nbytes: int
    read_nbytes: int
    seconds: float

    @property
    def is_good(self) -> bool:
        return all(finding.kind != PROBLEM for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            'path': str(self.path),
            'good': self.is_good,
            'findings': [vars(finding) for finding in self.findings],
            **{key: getattr(self, key) for key in ('n_files', 'n_tensors', 'nbytes', 'read_nbytes', 'seconds')},
        }

    def lines(self) -> list[str]:
        """The report as text: problems last, where a terminal shows them."""
        verdict = 'good' if self.is_good else 'DAMAGED OR CHANGED'
        rate = f', {self.read_nbytes / self.seconds / 1e9:.2f} GB/s' if self.read_nbytes else ''
        grouped: dict[tuple[str, str], list[Finding]] = {}
        for finding in sorted(self.findings, key=lambda finding: _ORDER.index(finding.kind)):
            grouped.setdefault((finding.kind, finding.check), []).append(finding)
        lines = []
        for (kind, check), group in grouped.items():
            lines += [finding.line() for finding in group[:_SHOWN]]
            if len(group) > _SHOWN:
                lines.append(Finding(kind, check, f'and {len(group) - _SHOWN} more').line())
        return [
            *lines,
            f'{self.path}: {verdict} ({counted(self.n_files, "file")}, {counted(self.n_tensors, "tensor")}, '
            f'{size_text(self.nbytes)} '
            f'in {self.seconds:.1f} s{rate})',
        ]
