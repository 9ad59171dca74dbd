"""The result of comparing two models, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from xhf_hooks.format.text import size_text

IDENTICAL, ROUNDING, DIFFERENT = 'identical', 'rounding', 'different'
_SHOWN = 20  # lines of each kind; JSON has all


@dataclass(frozen=True)
class TensorVerdict:
    """The comparison of one tensor.

    Attributes:
        verdict: ``'identical'``, ``'rounding'`` or ``'different'``.
        through: For ``'rounding'``: the dtype that one side was rounded to.
        max_ulps: Largest difference, in ULPs of the dtype ``ulp_of``; None for tensors that are not floating point.
    """

    name: str
    verdict: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    n_elements: int
    n_differ: int
    max_abs: float
    mean_abs: float
    max_ulps: float | None
    ulp_of: str | None
    through: str | None = None
    reason: str = ''

    def line(self) -> str:
        """The row of the table."""
        ulps = '' if self.max_ulps is None else f'{self.max_ulps:.4g} {self.ulp_of}'
        share = self.n_differ / max(1, self.n_elements)
        why = self.reason or (f'rounded to {self.through}' if self.through else '')
        numbers = f'{self.max_abs:10.3g} {self.mean_abs:10.3g} {ulps:>12} {share:8.2%}'
        return f'{self.verdict:10} {numbers}  {self.name}' + (f' ({why})' if why else '')


@dataclass
class Comparison:
    """The result of comparing two models.

    Attributes:
        tensors: Worst first.
        missing: Names in A only. ``extra``: names in B only.
        read_nbytes: Bytes read from both.
    """

    a: str
    b: str
    tensors: list[TensorVerdict] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    read_nbytes: int = 0
    seconds: float = 0.0

    def count(self, verdict: str) -> int:
        return sum(tensor.verdict == verdict for tensor in self.tensors)

    @property
    def verdict(self) -> str:
        if self.missing or self.extra or self.count(DIFFERENT) or not self.tensors:
            return DIFFERENT
        return ROUNDING if self.count(ROUNDING) else IDENTICAL

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values; infinity becomes ``'inf'``."""
        tensors = [
            {key: str(value) if value == float('inf') else value for key, value in vars(tensor).items()}
            for tensor in self.tensors
        ]
        return {
            'same': self.verdict != DIFFERENT,
            'verdict': self.verdict,
            'counts': {kind: self.count(kind) for kind in (IDENTICAL, ROUNDING, DIFFERENT)},
            **{key: getattr(self, key) for key in ('a', 'b', 'missing', 'extra', 'notes', 'read_nbytes', 'seconds')},
            'tensors': tensors,
        }

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f'A: {self.a}', f'B: {self.b}', *(f'note: {note}' for note in self.notes)]
        worst = [tensor for tensor in self.tensors if tensor.verdict != IDENTICAL]
        if worst:
            lines.append(f'{"":10} {"max diff":>10} {"mean diff":>10} {"max ULPs":>12} {"differ":>8}  tensor')
        lines += [tensor.line() for tensor in worst[:_SHOWN]]
        if len(worst) > _SHOWN:
            lines.append(f'... and {len(worst) - _SHOWN} more; --json has all')
        for what, names in (('only in A', self.missing), ('only in B', self.extra)):
            lines += [f'{what}: {name}' for name in names[:_SHOWN]]
            lines += [f'{what}: and {len(names) - _SHOWN} more'] if len(names) > _SHOWN else []
        verdict = {IDENTICAL: 'identical', ROUNDING: 'the same but for rounding', DIFFERENT: 'DIFFERENT'}[self.verdict]
        counts = ', '.join(f'{self.count(kind)} {kind}' for kind in (IDENTICAL, ROUNDING, DIFFERENT))
        rate = self.read_nbytes / max(self.seconds, 1e-9) / 1e9
        size = f'{size_text(self.read_nbytes)} in {self.seconds:.1f} s, {rate:.2f} GB/s'
        return [*lines, f'{verdict}: {counts} ({size})']
