"""The same model? Tensor by tensor, out of core."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.files.holes import Range, in_both
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.format.text import size_text
from xhf_hooks.verify.model_reader import ModelReader
from xhf_hooks.verify.rounding import (
    Difference,
    compare,
    has_precision,
    narrower,
    same_bits,
    ways_through,
    went_through,
)
from xhf_hooks.verify.windows import PIECE_ELEMENTS, Windows

IDENTICAL, ROUNDING, DIFFERENT = 'identical', 'rounding', 'different'
_JOB_ELEMENTS = 1 << 22
_SHOWN = 20  # of each kind, to people
_Part = tuple[tuple[str, str], Difference, int]  # names in A and B, what differs, bytes read


@dataclass(frozen=True)
class _Elements:
    """Elements ``start`` to ``end`` of a tensor of A and one of B; ``unwritten``: both are holes there."""

    one: str
    two: str
    start: int
    end: int
    unwritten: bool = False


@dataclass(frozen=True)
class TensorVerdict:
    """One tensor of both models.

    Attributes:
        verdict: ``'identical'``, ``'rounding'`` or ``'different'``.
        through: The dtype by which rounding is explained, for ``'rounding'``.
        max_ulps: In units in the last place of ``ulp_of``; None for tensors that are not floating point.
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
        """For people."""
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
        missing: In A only. ``extra``: in B only.
        read_nbytes: Of both.
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
        """For programs. Infinite numbers are texts."""
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
        """For people."""
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


def compare_models(
    a: ModelReader, b: ModelReader, workers: int, on_progress: Callable[[int, int], None] | None = None
) -> Comparison:
    """Read both once and compare. Memory: a few MB for each worker; what is made together, as fused experts, whole.

    Args:
        on_progress: Called in this thread with bytes done and bytes in all.

    Raises:
        OSError, XhfError: One cannot be read.
    """
    started, threads = time.perf_counter(), torch.get_num_threads()
    result = Comparison(a.label, b.label, notes=[*a.notes, *b.notes])
    pairs, windows = _pair(a, b, result), Windows()
    found = {pair: Difference() for pair in pairs}
    total = sum(_nbytes_to_read(a, b, one, two) for one, two in pairs if _alike(a, b, one, two))
    torch.set_num_threads(1)  # each worker is one thread already
    try:
        with WorkerThreads(workers) as pool:
            for parts in pool.run(_jobs(a, b, pairs, windows)):
                for pair, difference, nbytes in parts:
                    found[pair] += difference
                    result.read_nbytes += nbytes
                if on_progress is not None:
                    on_progress(result.read_nbytes, total)
        result.tensors = [_judge(a, b, one, two, found[one, two], windows) for one, two in pairs]
    finally:
        torch.set_num_threads(threads)
    result.tensors.sort(key=lambda t: ([DIFFERENT, ROUNDING, IDENTICAL].index(t.verdict), -t.max_abs, -t.n_differ))
    result.seconds = time.perf_counter() - started
    return result


def _pair(a: ModelReader, b: ModelReader, result: Comparison) -> list[tuple[str, str]]:
    """Names in A and in B of the same tensor. A tied one may be stored under one of its names, or under each."""
    pairs = [(name, name) for name in a.tensors if name in b.tensors]
    for name in a.tensors:
        if name not in b.tensors:
            (pairs.append((name, b.ties[name])) if name in b.ties else result.missing.append(name))
    for name in b.tensors:
        if name not in a.tensors:
            (pairs.append((a.ties[name], name)) if name in a.ties else result.extra.append(name))
    return list(dict.fromkeys(pairs))


def _alike(a: ModelReader, b: ModelReader, one: str, two: str) -> bool:
    return a.tensors[one].shape == b.tensors[two].shape


def _jobs(
    a: ModelReader, b: ModelReader, pairs: list[tuple[str, str]], windows: Windows
) -> Iterator[Callable[[], list[_Part]]]:
    """Plain tensors in parts; tensors that are made together in one job, of which only one runs at a time."""
    done: set[tuple[str, str]] = set()
    for one, two in pairs:
        if (one, two) in done or not _alike(a, b, one, two):
            continue
        together = {*a.made_together(one), *b.made_together(two)}
        if not together:
            yield from (partial(_compare_parts, a, b, [part], windows) for part in _parts(a, b, one, two))
            continue
        group = [(x, y) for x, y in pairs if (x in together or y in together) and _alike(a, b, x, y)]
        done.update(group)
        yield partial(_compare_group, a, b, group, windows)


def _parts(a: ModelReader, b: ModelReader, one: str, two: str) -> Iterator[_Elements]:
    """All elements in their order."""
    position, end = 0, a.tensors[one].n_elements
    for first, last in (*_unwritten(a, b, one, two), (end, end)):
        for start in range(position, first, _JOB_ELEMENTS):
            yield _Elements(one, two, start, min(start + _JOB_ELEMENTS, first))
        if last > first:
            yield _Elements(one, two, first, last, unwritten=True)
        position = last


def _unwritten(a: ModelReader, b: ModelReader, one: str, two: str) -> list[Range]:
    """Elements that lie in holes of both."""
    first, second = a.tensors[one].dtype, b.tensors[two].dtype
    if first != second and not (has_precision(first) and has_precision(second)):
        return []
    return in_both(_whole_elements(a.holes(one), first), _whole_elements(b.holes(two), second))


def _whole_elements(holes: list[Range], dtype: str) -> list[Range]:
    width = DTYPE_NBYTES[dtype]
    found = [(-(-start // width), end // width) for start, end in holes]
    return [(start, end) for start, end in found if start < end]


def _nbytes_to_read(a: ModelReader, b: ModelReader, one: str, two: str) -> int:
    widths = DTYPE_NBYTES[a.tensors[one].dtype] + DTYPE_NBYTES[b.tensors[two].dtype]
    return widths * (a.tensors[one].n_elements - sum(end - start for start, end in _unwritten(a, b, one, two)))


def _compare_group(a: ModelReader, b: ModelReader, group: list[tuple[str, str]], windows: Windows) -> list[_Part]:
    with windows.alone, a.held([x for x, _ in group]), b.held([y for _, y in group]):
        return _compare_parts(a, b, [part for x, y in group for part in _parts(a, b, x, y)], windows)


def _compare_parts(a: ModelReader, b: ModelReader, parts: list[_Elements], windows: Windows) -> list[_Part]:
    found = []
    for part in parts:
        one, two, start, end = part.one, part.two, part.start, part.end
        if part.unwritten:
            same_bytes = a.tensors[one].dtype == b.tensors[two].dtype
            found.append(((one, two), Difference(end - start, same_bytes=same_bytes), 0))
            continue
        difference, nbytes = Difference(), 0
        for x, y in windows.between(a, b, one, two, start, end):
            nbytes += x.nbytes + y.nbytes
            if x.dtype == y.dtype and same_bits(x, y):
                difference += Difference(len(x))
                continue
            for pieces in zip(x.split(PIECE_ELEMENTS), y.split(PIECE_ELEMENTS), strict=True):
                difference += compare(*pieces, a.tensors[one].dtype, b.tensors[two].dtype, windows.workspace)
        found.append(((one, two), difference, nbytes))
    return found


def _judge(a: ModelReader, b: ModelReader, one: str, two: str, found: Difference, windows: Windows) -> TensorVerdict:
    first, second = a.tensors[one], b.tensors[two]
    floats = has_precision(first.dtype) and has_precision(second.dtype)
    through, reason = None, ''
    if first.shape != second.shape:
        verdict, reason = DIFFERENT, f'shapes {first.shape} and {second.shape}'
    elif found.same_bytes and first.dtype == second.dtype:
        verdict = IDENTICAL
    elif not floats and first.dtype != second.dtype:
        verdict, reason = DIFFERENT, f'dtypes {first.dtype} and {second.dtype}'
    elif found.n_beyond == 0:
        verdict, through = ROUNDING, narrower(first.dtype, second.dtype)
    else:
        through = _find_through(a, b, one, two, windows)
        verdict = DIFFERENT if through is None else ROUNDING
    return TensorVerdict(
        name=one if one == two else f'{one} and {two}',
        verdict=verdict,
        shape=first.shape,
        dtypes=(first.dtype, second.dtype),
        n_elements=first.n_elements,
        n_differ=found.n_differ,
        max_abs=found.max_abs,
        mean_abs=found.sum_abs / first.n_elements if first.n_elements else 0.0,
        max_ulps=found.max_ulps if floats else None,
        ulp_of=narrower(first.dtype, second.dtype) if floats else None,
        through=through,
        reason=reason,
    )


def _find_through(a: ModelReader, b: ModelReader, one: str, two: str, windows: Windows) -> str | None:
    """A narrower type that one whole tensor went through: read again, as a rule only to the first piece."""
    ways = ways_through(a.tensors[one].dtype, b.tensors[two].dtype)
    if not ways:
        return None
    with a.held([one]), b.held([two]):
        for part in _parts(a, b, one, two):
            if part.unwritten:  # zeros go through any type
                continue
            for x, y in windows.between(a, b, one, two, part.start, part.end):
                wide = torch.promote_types(x.dtype, y.dtype)
                ways = {way for way in ways if went_through(x.to(wide), y.to(wide), way)}
                if not ways:
                    return None
    return min(ways)[0]
