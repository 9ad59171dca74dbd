"""What a check of a folder found, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xhf_hooks.format.text import counted, size_text

OK, PROBLEM, UNCHECKED, NOTE = 'ok', 'problem', 'unchecked', 'note'
_ORDER = (OK, NOTE, UNCHECKED, PROBLEM)


@dataclass(frozen=True)
class Finding:
    """One line of a report: :data:`OK`, :data:`PROBLEM`, :data:`UNCHECKED` or :data:`NOTE`, and what was looked at."""

    kind: str
    check: str
    text: str

    def line(self) -> str:
        """The finding as a row of the report."""
        return f'{self.kind:<10} {self.check:<11} {self.text}'


@dataclass
class Report:
    """The result of checking one folder.

    Attributes:
        nbytes: Size of all files.
        read_nbytes: Bytes that were read.
    """

    path: Path
    findings: list[Finding] = field(default_factory=list)
    n_files: int = 0
    n_tensors: int = 0
    nbytes: int = 0
    read_nbytes: int = 0
    seconds: float = 0.0

    def add(self, kind: str, check: str, text: str) -> None:
        """Add a finding. A problem does not stop the checks."""
        self.findings.append(Finding(kind, check, text))

    def problems(self, check: str | None = None) -> list[str]:
        """The texts of all problems, or of those that one check found."""
        return [found.text for found in self.findings if found.kind == PROBLEM and check in (None, found.check)]

    @property
    def is_good(self) -> bool:
        return not self.problems()

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
        lines = [finding.line() for finding in sorted(self.findings, key=lambda found: _ORDER.index(found.kind))]
        verdict = 'good' if self.is_good else 'DAMAGED OR CHANGED'
        rate = f', {self.read_nbytes / self.seconds / 1e9:.2f} GB/s' if self.read_nbytes else ''
        counts = f'{counted(self.n_files, "file")}, {counted(self.n_tensors, "tensor")}'
        size = f'{size_text(self.nbytes)} in {self.seconds:.1f} s'
        return [*lines, f'{self.path}: {verdict} ({counts}, {size}{rate})']
