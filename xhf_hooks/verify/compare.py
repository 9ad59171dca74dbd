"""Compares two models: the same, equal but for rounding, or different."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.format.text import size_text
from xhf_hooks.threads import WorkerThreads
from xhf_hooks.verify.models import Model
from xhf_hooks.verify.rounding import (
    Difference,
    compare,
    has_precision,
    narrower,
    ways_through,
    went_through,
)

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


_JOB_ELEMENTS = 1 << 22
#: Per read and call of torch: large enough that threads seldom wait for the GIL, small enough for a core's cache.
_WINDOW_ELEMENTS = 1 << 17
_WIDEST = max(DTYPE_NBYTES.values())


class _Buffers(threading.local):
    """Per thread: one buffer for A, one for B."""

    def __init__(self) -> None:
        self.pair = [memoryview(bytearray(_WINDOW_ELEMENTS * _WIDEST)) for _ in range(2)]


class _Pair:
    """A tensor of A, its counterpart in B, and the differences found so far.

    Args:
        names: The tensor's name in A and in B.
    """

    def __init__(self, a: Model, b: Model, names: tuple[str, str]) -> None:
        self.names, self._sides = names, list(zip((a, b), names, strict=True))
        tensors = [model.tensors[name] for model, name in self._sides]
        self.shapes = tuple(tensor.shape for tensor in tensors)
        self.dtypes = (tensors[0].dtype, tensors[1].dtype)
        self.is_alike = self.shapes[0] == self.shapes[1]
        self.is_computed = any(model.is_computed(name) for model, name in self._sides)
        self.n_elements = math.prod(self.shapes[0])
        self.nbytes = sum(tensor.nbytes for tensor in tensors) if self.is_alike else 0
        self.found = Difference()

    def parts(self) -> Iterator[tuple[int, int]]:
        """Element ranges to read."""
        for start in range(0, self.n_elements if self.is_alike else 0, _JOB_ELEMENTS):
            yield start, min(start + _JOB_ELEMENTS, self.n_elements)

    def windows(self, start: int, end: int, buffers: _Buffers) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Both tensors, piece by piece; each pair is valid until the next is requested."""
        for first in range(start, end, _WINDOW_ELEMENTS):
            pieces = []
            for (model, name), dtype, buffer in zip(self._sides, self.dtypes, buffers.pair, strict=True):
                width = DTYPE_NBYTES[dtype]
                out = buffer[: (min(first + _WINDOW_ELEMENTS, end) - first) * width]
                model.read(name, first * width, out)
                pieces.append(torch.frombuffer(out, dtype=TORCH_DTYPES[dtype]))
            yield pieces[0], pieces[1]

    def compare(self, start: int, end: int, buffers: _Buffers) -> tuple[_Pair, Difference, int]:
        """The pair, the differences in one range of elements, and the bytes read."""
        found = Difference()
        for x, y in self.windows(start, end, buffers):
            found += compare(x, y)
        return self, found, (end - start) * sum(DTYPE_NBYTES[dtype] for dtype in self.dtypes)

    def _went_through(self, buffers: _Buffers) -> str | None:
        """The narrower dtype that one whole tensor was rounded to, if any. Rereads it, usually only one window."""
        ways = ways_through(*self.dtypes)
        for start, end in self.parts() if ways else ():
            for x, y in self.windows(start, end, buffers):
                wide = torch.promote_types(x.dtype, y.dtype)
                ways = {way for way in ways if went_through(x.to(wide), y.to(wide), way)}
                if not ways:
                    return None
        return min(ways)[0] if ways else None

    def verdict(self, buffers: _Buffers) -> TensorVerdict:
        """The result. Call it once all parts have been compared."""
        found, (first, second) = self.found, self.dtypes
        has_ulps = has_precision(first) and has_precision(second)
        through, reason = None, ''
        if not self.is_alike:
            verdict, reason = DIFFERENT, 'shapes {} and {}'.format(*self.shapes)
        elif found.same_bytes and first == second:
            verdict = IDENTICAL
        elif not has_ulps and first != second:
            verdict, reason = DIFFERENT, f'dtypes {first} and {second}'
        elif found.n_beyond == 0:
            verdict, through = ROUNDING, narrower(first, second)
        else:
            through = self._went_through(buffers)
            verdict = DIFFERENT if through is None else ROUNDING
        return TensorVerdict(
            name=self.names[0] if self.names[0] == self.names[1] else '{} and {}'.format(*self.names),
            verdict=verdict,
            shape=self.shapes[0],
            dtypes=self.dtypes,
            n_elements=self.n_elements,
            n_differ=found.n_differ,
            max_abs=found.max_abs,
            mean_abs=found.sum_abs / self.n_elements if self.n_elements else 0.0,
            max_ulps=found.max_ulps if has_ulps else None,
            ulp_of=narrower(first, second) if has_ulps else None,
            through=through,
            reason=reason,
        )


def compare_models(
    a: Model, b: Model, workers: int, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """Read both models once and compare them.

    Memory: a few MB per worker. Tensors that are computed together, such as fused experts, are held in full, and
    compared one after the other.

    Args:
        on_progress: Called in this thread with bytes done and total bytes.

    Raises:
        OSError, XhfError: A model cannot be read.
    """
    started, threads = time.perf_counter(), torch.get_num_threads()
    result = Comparison(a.label, b.label, notes=[*a.notes, *b.notes])
    pairs, buffers = _pairs(a, b, result), _Buffers()
    total = sum(pair.nbytes for pair in pairs)

    def add(pair: _Pair, found: Difference, nbytes: int) -> None:
        pair.found += found
        result.read_nbytes += nbytes
        on_progress(result.read_nbytes, total)

    stored = [pair for pair in pairs if not pair.is_computed]
    jobs = (partial(pair.compare, *part, buffers) for pair in stored for part in pair.parts())
    torch.set_num_threads(1)  # parallelism comes from the workers
    try:
        with WorkerThreads(workers) as pool:
            for done in pool.run(jobs):
                add(*done)
    finally:
        torch.set_num_threads(threads)
    result.tensors = [pair.verdict(buffers) for pair in stored]
    for pair in pairs:
        if pair.is_computed:
            for part in pair.parts():
                add(*pair.compare(*part, buffers))
            result.tensors.append(pair.verdict(buffers))
    result.tensors.sort(key=lambda t: ([DIFFERENT, ROUNDING, IDENTICAL].index(t.verdict), -t.max_abs, -t.n_differ))
    result.seconds = time.perf_counter() - started
    return result


def _pairs(a: Model, b: Model, result: Comparison) -> list[_Pair]:
    """Match tensors by name. A tied tensor may be stored under any of its names, or under all.

    Those that are computed together are neighbours.
    """
    names = [(name, name) for name in a.tensors if name in b.tensors]
    for name in a.tensors:
        if name not in b.tensors:
            (names.append((name, b.ties[name])) if name in b.ties else result.missing.append(name))
    for name in b.tensors:
        if name not in a.tensors:
            (names.append((a.ties[name], name)) if name in a.ties else result.extra.append(name))
    place_in_a, place_in_b = ({name: i for i, name in enumerate(model.tensors)} for model in (a, b))
    order = place_in_a if any(map(a.is_computed, a.tensors)) else place_in_b
    side = 0 if order is place_in_a else 1
    return [_Pair(a, b, pair) for pair in sorted(dict.fromkeys(names), key=lambda pair: order[pair[side]])]
