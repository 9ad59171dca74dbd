"""Compares two models tensor by tensor, without loading either."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from xhf_hooks.concurrency.thread_pool import WorkerThreads
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.verify.comparison import DIFFERENT, IDENTICAL, ROUNDING, Comparison, TensorVerdict
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

_JOB_ELEMENTS = 1 << 22
_WINDOW_ELEMENTS = 1 << 19  # per read
#: Per call of torch or NumPy: large enough that threads seldom wait for the GIL.
_PIECE_ELEMENTS = 1 << 17
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

    def __init__(self, a: ModelReader, b: ModelReader, names: tuple[str, str]) -> None:
        self.readers, self.names = (a, b), names
        self._tensors = (a.tensors[names[0]], b.tensors[names[1]])
        self.shapes = tuple(tensor.shape for tensor in self._tensors)
        self.dtypes = (self._tensors[0].dtype, self._tensors[1].dtype)
        self.is_alike = self.shapes[0] == self.shapes[1]
        self.n_elements = math.prod(self.shapes[0])
        self.has_precision = all(map(has_precision, self.dtypes))
        self.found = Difference()

    @property
    def made_together(self) -> set[str]:
        """Names of all tensors that are computed together with this one, in A or in B."""
        (a, b), (one, two) = self.readers, self.names
        return {*a.made_together(one), *b.made_together(two)}

    def nbytes_to_read(self) -> int:
        return self.n_elements * sum(DTYPE_NBYTES[dtype] for dtype in self.dtypes)

    def parts(self) -> Iterator[tuple[int, int]]:
        """Element ranges to read."""
        for start in range(0, self.n_elements, _JOB_ELEMENTS):
            yield start, min(start + _JOB_ELEMENTS, self.n_elements)

    def windows(self, start: int, end: int, buffers: _Buffers) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Read-only views of both tensors; each pair is valid until the next is requested."""
        for first in range(start, end, _WINDOW_ELEMENTS):
            last = min(first + _WINDOW_ELEMENTS, end)
            sides = list(zip(self.readers, self.names, self.dtypes, buffers.pair, strict=True))
            one, two = (
                torch.frombuffer(
                    reader.view(name, first * DTYPE_NBYTES[dtype], last * DTYPE_NBYTES[dtype], buffer),
                    dtype=TORCH_DTYPES[dtype],
                )
                for reader, name, dtype, buffer in sides
            )
            yield one, two
            for reader, name, dtype, _ in sides:
                reader.forget(name, first * DTYPE_NBYTES[dtype], last * DTYPE_NBYTES[dtype])

    def differences(self, start: int, end: int, buffers: _Buffers) -> Difference:
        """Compare one range of elements."""
        found = Difference()
        for x, y in self.windows(start, end, buffers):
            if x.dtype == y.dtype and same_bits(x, y):
                found += Difference(len(x))
                continue
            for pieces in zip(x.split(_PIECE_ELEMENTS), y.split(_PIECE_ELEMENTS), strict=True):
                found += compare(*pieces)
        return found

    def went_through(self, buffers: _Buffers) -> str | None:
        """The narrower dtype that one whole tensor was rounded to, if any. Rereads it, usually only one window."""
        ways = ways_through(*self.dtypes)
        with _held([self]):
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
        through, reason = None, ''
        if not self.is_alike:
            verdict, reason = DIFFERENT, 'shapes {} and {}'.format(*self.shapes)
        elif found.same_bytes and first == second:
            verdict = IDENTICAL
        elif not self.has_precision and first != second:
            verdict, reason = DIFFERENT, f'dtypes {first} and {second}'
        elif found.n_beyond == 0:
            verdict, through = ROUNDING, narrower(first, second)
        else:
            through = self.went_through(buffers)
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
            max_ulps=found.max_ulps if self.has_precision else None,
            ulp_of=narrower(first, second) if self.has_precision else None,
            through=through,
            reason=reason,
        )


def compare_models(
    a: ModelReader, b: ModelReader, workers: int, on_progress: Callable[[int, int], None] | None = None
) -> Comparison:
    """Read both models once and compare them.

    Memory: a few MB per worker. Tensors that are computed together, such as fused experts, are held in full.

    Args:
        on_progress: Called in this thread with bytes done and total bytes.

    Raises:
        OSError, XhfError: A model cannot be read.
    """
    started, threads = time.perf_counter(), torch.get_num_threads()
    result = Comparison(a.label, b.label, notes=[*a.notes, *b.notes])
    pairs, buffers = _pairs(a, b, result), _Buffers()
    total = sum(pair.nbytes_to_read() for pair in pairs if pair.is_alike)
    torch.set_num_threads(1)  # parallelism comes from the workers
    try:
        with WorkerThreads(workers) as pool:
            for parts in pool.run(_jobs(pairs, buffers)):
                for pair, difference, nbytes in parts:
                    pair.found += difference
                    result.read_nbytes += nbytes
                if on_progress is not None:
                    on_progress(result.read_nbytes, total)
        result.tensors = [pair.verdict(buffers) for pair in pairs]
    finally:
        torch.set_num_threads(threads)
    result.tensors.sort(key=lambda t: ([DIFFERENT, ROUNDING, IDENTICAL].index(t.verdict), -t.max_abs, -t.n_differ))
    result.seconds = time.perf_counter() - started
    return result


def _pairs(a: ModelReader, b: ModelReader, result: Comparison) -> list[_Pair]:
    """Match tensors by name. A tied tensor may be stored under any of its names, or under all."""
    names = [(name, name) for name in a.tensors if name in b.tensors]
    for name in a.tensors:
        if name not in b.tensors:
            (names.append((name, b.ties[name])) if name in b.ties else result.missing.append(name))
    for name in b.tensors:
        if name not in a.tensors:
            (names.append((a.ties[name], name)) if name in a.ties else result.extra.append(name))
    return [_Pair(a, b, pair) for pair in dict.fromkeys(names)]


_Part = tuple[_Pair, Difference, int]  # and bytes read


def _jobs(pairs: Sequence[_Pair], buffers: _Buffers) -> Iterator[Callable[[], list[_Part]]]:
    """Jobs: parts of plain tensors, and whole groups of tensors that are computed together, one at a time."""
    done: set[_Pair] = set()
    alone = threading.Lock()
    for pair in pairs:
        if pair in done or not pair.is_alike:
            continue
        together = pair.made_together
        if not together:
            yield from (partial(_compare_parts, pair, [part], buffers) for part in pair.parts())
            continue
        group = [other for other in pairs if other.is_alike and not together.isdisjoint(other.names)]
        done.update(group)
        yield partial(_compare_group, group, buffers, alone)


def _compare_group(group: Sequence[_Pair], buffers: _Buffers, alone: threading.Lock) -> list[_Part]:
    with alone, _held(group):
        return [part for pair in group for part in _compare_parts(pair, pair.parts(), buffers)]


def _compare_parts(pair: _Pair, parts: Iterable[tuple[int, int]], buffers: _Buffers) -> list[_Part]:
    width = sum(DTYPE_NBYTES[dtype] for dtype in pair.dtypes)
    return [(pair, pair.differences(start, end, buffers), (end - start) * width) for start, end in parts]


@contextmanager
def _held(pairs: Sequence[_Pair]) -> Iterator[None]:
    """Inside the block, tensors that are computed together are computed only once."""
    (a, b), (in_a, in_b) = pairs[0].readers, zip(*(pair.names for pair in pairs), strict=True)
    with a.held(in_a), b.held(in_b):
        yield
