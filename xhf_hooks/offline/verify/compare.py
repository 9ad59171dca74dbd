"""Compares two models: the same, equal but for rounding, of the same weights with another config, or different."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from xhf_hooks.format.text import size_text, some
from xhf_hooks.offline.verify.models import Model
from xhf_hooks.offline.verify.rounding import Difference, compare, narrower, roundings
from xhf_hooks.offline.verify.texts import differing_texts
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.system.library_settings import one_torch_thread
from xhf_hooks.system.threads import WorkerThreads, default_workers

IDENTICAL = 'identical'
ROUNDING = 'rounding'
DIFFERENT = 'different'
OTHER_CONFIG = 'other config'
_SHOWN = 20  # lines of each kind; JSON has all
#: Compared at once: few enough to stay in a core's cache.
_WINDOW_ELEMENTS = 1 << 17
_JOB_ELEMENTS = 8 * _WINDOW_ELEMENTS


class Pair:
    """A tensor that both models have, and the differences found so far.

    Args:
        name: Its name in A.
        name_in_b: Its name in B, where that stores it under the name of a tensor that is tied to it.

    Attributes:
        reason: Why they cannot be compared.
        ulp_of: The narrower dtype, whose ULPs count; None for tensors that are not floating point.
    """

    def __init__(self, name: str, name_in_b: str, a: TensorSpec, b: TensorSpec) -> None:
        self.name, self.name_in_b, self.shape = name, name_in_b, a.shape
        self.dtypes = a.dtype, b.dtype
        self.ulp_of = narrower(*self.dtypes)
        self.found, self.reason = Difference(), ''
        if a.shape != b.shape:
            self.reason = f'shapes {a.shape} and {b.shape}'
        elif a.dtype != b.dtype and self.ulp_of is None:
            self.reason = f'dtypes {a.dtype} and {b.dtype}'
        self.nbytes = 0 if self.reason else a.nbytes + b.nbytes

    @cached_property
    def through(self) -> str | None:
        """The dtype that one side was rounded to, if that explains all differences."""
        return next((code for code in roundings(*self.dtypes) if not self.found.unexplained[code]), None)

    @cached_property
    def verdict(self) -> str:
        """The result, once all elements have been compared."""
        if not self.reason and self.found.same_bytes and self.dtypes[0] == self.dtypes[1]:
            return IDENTICAL
        explained = self.through is not None or (self.ulp_of is not None and not self.found.n_differ)
        return ROUNDING if explained and not self.reason else DIFFERENT

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values; infinity becomes ``'inf'``."""
        found, n_elements = self.found, math.prod(self.shape)
        values = {
            'name': self.name,
            'verdict': self.verdict,
            'shape': self.shape,
            'dtypes': self.dtypes,
            'ulp_of': self.ulp_of,
            'reason': self.reason,
            'n_differ': found.n_differ,
            'max_abs': found.max_abs,
            'n_elements': n_elements,
            'mean_abs': found.sum_abs / max(1, n_elements),
            'max_ulps': None if self.ulp_of is None else found.max_ulps,
            'through': self.through if self.verdict == ROUNDING else None,
        }
        return {key: str(value) if value == math.inf else value for key, value in values.items()}

    def line(self) -> str:
        """The row of the table."""
        tensor = self.as_json()
        ulps = '' if self.ulp_of is None else f'{self.found.max_ulps:.4g} {self.ulp_of}'
        share = self.found.n_differ / max(1, tensor['n_elements'])
        why = self.reason or (f'rounded to {tensor["through"]}' if tensor['through'] else '')
        numbers = f'{self.found.max_abs:10.3g} {tensor["mean_abs"]:10.3g} {ulps:>12} {share:8.2%}'
        return f'{self.verdict:10} {numbers}  {self.name}' + (f' ({why})' if why else '')


@dataclass
class Comparison:
    """The result of comparing two models.

    Attributes:
        tensors: Worst first.
        missing: Names in A only. ``extra``: names in B only.
        config: Differences of config, adapter settings and code, which make another model of the same weights.
        files: Differences of other files that loaders read, such as the tokenizer's. They do not change the verdict.
        read_nbytes: Bytes read from both.
    """

    a: str
    b: str
    notes: list[str]
    tensors: list[Pair] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    config: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    read_nbytes: int = 0
    seconds: float = 0.0

    def count(self, verdict: str) -> int:
        return sum(tensor.verdict == verdict for tensor in self.tensors)

    @property
    def verdict(self) -> str:
        if self.missing or self.extra or self.count(DIFFERENT) or not self.tensors:
            return DIFFERENT
        return OTHER_CONFIG if self.config else self._of_weights

    @property
    def is_same(self) -> bool:
        """Whether both load as the same model."""
        return self.verdict in (IDENTICAL, ROUNDING)

    @property
    def _of_weights(self) -> str:
        return ROUNDING if self.count(ROUNDING) else IDENTICAL

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            **vars(self),
            'same': self.is_same,
            'verdict': self.verdict,
            'counts': {kind: self.count(kind) for kind in (IDENTICAL, ROUNDING, DIFFERENT)},
            'tensors': [tensor.as_json() for tensor in self.tensors],
        }

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f'A: {self.a}', f'B: {self.b}', *(f'note: {note}' for note in (*self.notes, *self.files))]
        lines += [f'config: {text}' for text in self.config]
        worst = [tensor for tensor in self.tensors if tensor.verdict != IDENTICAL]
        if worst:
            lines.append(f'{"":10} {"max diff":>10} {"mean diff":>10} {"max ULPs":>12} {"differ":>8}  tensor')
        lines += [tensor.line() for tensor in worst[:_SHOWN]]
        lines += [f'... and {len(worst) - _SHOWN} more; --json has all'] if len(worst) > _SHOWN else []
        for what, names in (('only in A', self.missing), ('only in B', self.extra)):
            lines += [f'{what}: {some(names, _SHOWN)}'] if names else []
        verdict = {IDENTICAL: 'identical', ROUNDING: 'the same but for rounding'}.get(self.verdict, 'DIFFERENT')
        if self.verdict == OTHER_CONFIG:
            weights = 'same weights' if self._of_weights == IDENTICAL else 'same weights but for rounding'
            verdict = f'{weights}, other config: {"; ".join(self.config[:3])}'
            verdict += f' and {len(self.config) - 3} more' if len(self.config) > 3 else ''
        elif self.files and self.is_same:
            verdict = f'weights {verdict}, but other files differ'
        counts = ', '.join(f'{self.count(kind)} {kind}' for kind in (IDENTICAL, ROUNDING, DIFFERENT))
        rate = self.read_nbytes / max(self.seconds, 1e-9) / 1e9
        size = f'{size_text(self.read_nbytes)} in {self.seconds:.1f} s, {rate:.2f} GB/s'
        return [*lines, f'{verdict}: {counts} ({size})']


def _pairs_of_tied(a: Model, b: Model) -> list[tuple[str, str]]:
    """Names in A and in B of tensors that one of them does not store, since its config ties them to one that it has.

    ``from_pretrained`` loads that one in their place, so that is what they are compared with.
    """
    missing = [name for name in a.tensors if name not in b.tensors]
    extra = [name for name in b.tensors if name not in a.tensors]
    tied_in_b = b.tied_names() if missing else []
    tied_in_a = a.tied_names() if extra else []
    pairs = [(name, there) for name in missing for there in _stored_for(name, tied_in_b, b)]
    return pairs + [(here, name) for name in extra for here in _stored_for(name, tied_in_a, a)]


def _stored_for(name: str, tied: list[set[str]], model: Model) -> list[str]:
    """The name under which the model stores the tensor that is tied to ``name``, in a list; [] if there is none."""
    return [other for names in tied if name in names for other in sorted(names) if other in model.tensors][:1]


def compare_models(
    a: Model, b: Model, workers: int | None, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """Read both models once and compare them. Memory: a few MB per worker, and the tensors that one is made of.

    Args:
        workers: Number of threads that read; None: see :func:`.default_workers`.
        on_progress: Called in this thread with bytes done and total bytes.

    Raises:
        OSError, XhfError: A model cannot be read.
    """
    started, lock = time.perf_counter(), threading.Lock()
    result = Comparison(a.label, b.label, [*a.notes, *b.notes])
    names = [name for name in (b if b.is_made else a).tensors if name in a.tensors and name in b.tensors]
    pairs = [*((name, name) for name in names), *_pairs_of_tied(a, b)]
    result.tensors = [Pair(here, there, a.tensors[here], b.tensors[there]) for here, there in pairs]
    paired_in_a, paired_in_b = ({pair[side] for pair in pairs} for side in (0, 1))
    result.missing = [name for name in a.tensors if name not in paired_in_a]
    result.extra = [name for name in b.tensors if name not in paired_in_b]
    if a.folder is not None and b.folder is not None:
        have_same_dtypes = all(pair.dtypes[0] == pair.dtypes[1] for pair in result.tensors)
        result.config, result.files = differing_texts(a.texts, b.texts, have_same_dtypes=have_same_dtypes)
    total = sum(pair.nbytes for pair in result.tensors)

    def compare_part(pair: Pair, part: range) -> None:
        for first in part[::_WINDOW_ELEMENTS]:
            count = min(_WINDOW_ELEMENTS, part.stop - first)
            one, other = a.read(pair.name, first, count), b.read(pair.name_in_b, first, count)
            found = compare(one, other, pair.dtypes)
            with lock:
                pair.found += found
                result.read_nbytes += one.nbytes + other.nbytes

    def jobs() -> Iterator[Callable[[], None]]:
        for pair in result.tensors:
            elements = range(0 if pair.reason else math.prod(pair.shape))
            for first in elements[::_JOB_ELEMENTS]:
                yield partial(compare_part, pair, elements[first : first + _JOB_ELEMENTS])

    with one_torch_thread(), WorkerThreads(workers or default_workers()) as threads:
        for _ in threads.run(jobs()):
            on_progress(result.read_nbytes, total)
    order = [DIFFERENT, ROUNDING, IDENTICAL]
    result.tensors.sort(key=lambda pair: (order.index(pair.verdict), -pair.found.max_abs, -pair.found.n_differ))
    result.seconds = time.perf_counter() - started
    return result
