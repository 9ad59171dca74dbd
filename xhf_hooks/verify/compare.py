"""Compares two models: the same, equal but for rounding, or different."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from xhf_hooks.convert.weights import one_torch_thread
from xhf_hooks.format.text import size_text
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.threads import WorkerThreads
from xhf_hooks.verify.models import ConvertedModel, FolderModel
from xhf_hooks.verify.rounding import Difference, compare, narrower, roundings

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


#: Compared at once: few enough to stay in a core's cache.
_WINDOW_ELEMENTS = 1 << 17


class _Pair:
    """A tensor of A, its counterpart in B, and the differences found so far.

    Args:
        names: The tensor's name in A and in B.
    """

    def __init__(self, names: tuple[str, str], a: TensorSpec, b: TensorSpec) -> None:
        self.names, self._tensors = names, (a, b)
        self.dtypes = (a.dtype, b.dtype)
        self.found = Difference()
        self.reason = ''
        if a.shape != b.shape:
            self.reason = f'shapes {a.shape} and {b.shape}'
        elif a.dtype != b.dtype and narrower(*self.dtypes) is None:
            self.reason = f'dtypes {a.dtype} and {b.dtype}'

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return 0 if self.reason else sum(tensor.nbytes for tensor in self._tensors)

    def verdict(self) -> TensorVerdict:
        """The result, once all elements have been compared."""
        found, through = self.found, None
        if self.reason:
            verdict = DIFFERENT
        elif found.same_bytes and self.dtypes[0] == self.dtypes[1]:
            verdict = IDENTICAL
        elif found.n_differ == 0 and narrower(*self.dtypes) is not None:  # zeros and NaNs of other bits; wider copies
            verdict, through = ROUNDING, narrower(*self.dtypes)
        else:
            through = next((code for code in roundings(*self.dtypes) if not found.unexplained[code]), None)
            verdict = DIFFERENT if through is None else ROUNDING
        n_elements = math.prod(self._tensors[0].shape)
        return TensorVerdict(
            name=self.names[0] if self.names[0] == self.names[1] else '{} and {}'.format(*self.names),
            verdict=verdict,
            shape=self._tensors[0].shape,
            dtypes=self.dtypes,
            n_elements=n_elements,
            n_differ=found.n_differ,
            max_abs=found.max_abs,
            mean_abs=found.sum_abs / max(1, n_elements),
            max_ulps=None if narrower(*self.dtypes) is None else found.max_ulps,
            ulp_of=narrower(*self.dtypes),
            through=through,
            reason=self.reason,
        )


def compare_models(
    a: FolderModel | ConvertedModel,
    b: FolderModel | ConvertedModel,
    workers: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Read both models once and compare them. Memory: a few MB per worker, and the tensors that one is made of.

    Args:
        on_progress: Called in this thread with bytes done and total bytes.

    Raises:
        OSError, XhfError: A model cannot be read.
    """
    started, lock = time.perf_counter(), threading.Lock()
    result = Comparison(a.label, b.label, notes=[*a.notes, *b.notes])
    pairs = _pairs(a, b, result)
    total = sum(pair.nbytes for pair in pairs)
    made, held, side = (a, b, 0) if isinstance(b, FolderModel) else (b, cast(FolderModel, a), 1)

    def compare_piece(name: str, first: int, piece: torch.Tensor) -> None:
        for pair in pairs_of.get(name, ()):
            for start in range(0, len(piece), _WINDOW_ELEMENTS):
                one = piece[start : start + _WINDOW_ELEMENTS]
                other = held.read(pair.names[1 - side], first + start, len(one))
                found = compare(*((one, other) if side == 0 else (other, one)), pair.dtypes)
                with lock:
                    pair.found += found
                    result.read_nbytes += one.nbytes + other.nbytes

    pairs_of: dict[str, list[_Pair]] = {}
    for pair in pairs:
        if not pair.reason:
            pairs_of.setdefault(pair.names[side], []).append(pair)
    with one_torch_thread(), WorkerThreads(workers) as threads:
        for _ in threads.run(made.jobs(compare_piece)):
            on_progress(result.read_nbytes, total)
    result.tensors = [pair.verdict() for pair in pairs]
    result.tensors.sort(key=lambda t: ([DIFFERENT, ROUNDING, IDENTICAL].index(t.verdict), -t.max_abs, -t.n_differ))
    result.seconds = time.perf_counter() - started
    return result


def _pairs(a: FolderModel | ConvertedModel, b: FolderModel | ConvertedModel, result: Comparison) -> list[_Pair]:
    """Match tensors by name. A tied tensor may be stored under any of its names, or under all."""
    names = dict.fromkeys((name, name) for name in a.tensors if name in b.tensors)
    for name in a.tensors:
        if name not in b.tensors:
            (names.setdefault((name, b.ties[name])) if name in b.ties else result.missing.append(name))
    for name in b.tensors:
        if name not in a.tensors:
            (names.setdefault((a.ties[name], name)) if name in a.ties else result.extra.append(name))
    return [_Pair(pair, a.tensors[pair[0]], b.tensors[pair[1]]) for pair in names]
