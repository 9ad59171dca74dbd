"""What a check found, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xhf_hooks.format.text import size_text

OK, PROBLEM, UNCHECKED, NOTE = 'ok', 'problem', 'unchecked', 'note'
_SHOWN = 20  # of one kind and check, to people; JSON has all


@dataclass(frozen=True)
class Finding:
    """One line of a report: what was checked, and what came of it."""

    kind: str
    check: str
    text: str


@dataclass
class Findings:
    """Collects findings; nothing that is found ends a check."""

    found: list[Finding] = field(default_factory=list)

    def ok(self, check: str, text: str) -> None:
        """Checked, and as it should be."""
        self.found.append(Finding(OK, check, text))

    def problem(self, check: str, text: str) -> None:
        """Damaged, changed, or not what another file says."""
        self.found.append(Finding(PROBLEM, check, text))

    def unchecked(self, check: str, text: str) -> None:
        """Could not be checked, and why."""
        self.found.append(Finding(UNCHECKED, check, text))

    def note(self, check: str, text: str) -> None:
        """Worth knowing, and no fault."""
        self.found.append(Finding(NOTE, check, text))

    def texts(self, kind: str) -> list[str]:
        return [finding.text for finding in self.found if finding.kind == kind]

    def has_problem(self, check: str | None = None) -> bool:
        return any(f.kind == PROBLEM and check in (None, f.check) for f in self.found)


@dataclass(frozen=True)
class FolderReport:
    """The result of checking one folder.

    Attributes:
        nbytes: Size of all files that were looked at.
        read_nbytes: Of these, read byte by byte.
    """

    path: Path
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
        """For programs."""
        return {
            'path': str(self.path),
            'good': self.is_good,
            'findings': [vars(finding) for finding in self.findings],
            **{key: getattr(self, key) for key in ('n_files', 'n_tensors', 'nbytes', 'read_nbytes', 'seconds')},
        }

    def lines(self) -> list[str]:
        """For people: problems last, where they are seen."""
        verdict = 'good' if self.is_good else 'DAMAGED OR CHANGED'
        rate = f', {self.read_nbytes / self.seconds / 1e9:.2f} GB/s' if self.read_nbytes else ''
        return [
            *self._of(OK),
            *self._of(NOTE),
            *self._of(UNCHECKED),
            *self._of(PROBLEM),
            f'{self.path}: {verdict} ({self.n_files} files, {self.n_tensors} tensors, {size_text(self.nbytes)} '
            f'in {self.seconds:.1f} s{rate})',
        ]

    def _of(self, kind: str) -> list[str]:
        lines = []
        by_check: dict[str, list[str]] = {}
        for finding in self.findings:
            if finding.kind == kind:
                by_check.setdefault(finding.check, []).append(finding.text)
        for check, texts in by_check.items():
            lines += [f'{kind:<10} {check:<11} {text}' for text in texts[:_SHOWN]]
            if len(texts) > _SHOWN:
                lines.append(f'{kind:<10} {check:<11} and {len(texts) - _SHOWN} more')
        return lines
