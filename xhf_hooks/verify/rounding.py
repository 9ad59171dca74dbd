"""Compares two pieces of a tensor: identical, different by rounding, or different.

A difference is *rounding* if one value is the other rounded to nearest in its dtype: at most half an ULP of the
narrower dtype. The narrower dtype may be hidden: the fp32 values that xtuner's ``pth_to_hf --fp32`` stores were first
rounded to fp16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.safetensors import FLOAT_DTYPES, HALF_DTYPES

_FINFO = {TORCH_DTYPES[code]: torch.finfo(TORCH_DTYPES[code]) for code in (*sorted(FLOAT_DTYPES), 'F8_E4M3', 'F8_E5M2')}
#: The integer dtype of the same width, and the mask of the exponent bits.
_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


def has_precision(dtype: str) -> bool:
    """Whether the dtype is floating point; others are compared bit by bit."""
    return TORCH_DTYPES[dtype] in _FINFO


def narrower(a_dtype: str, b_dtype: str) -> str:
    """The dtype with fewer fraction bits."""
    return max(a_dtype, b_dtype, key=_eps)


def _eps(dtype: str) -> float:
    """Machine epsilon."""
    return _FINFO[TORCH_DTYPES[dtype]].eps


@dataclass
class Difference:
    """Differences over the compared pieces of one tensor; merged with ``+=``.

    Attributes:
        n_differ: Elements with different values; equal values with different bits (zeros, NaNs) do not count.
        n_beyond: Those of ``n_differ`` that rounding between the two dtypes does not explain.
        same_bytes: All bytes are equal.
        max_abs, sum_abs: Over finite differences.
        max_ulps: Largest difference in ULPs of the narrower dtype; 0.5 if every difference is rounding.
    """

    n_elements: int = 0
    n_differ: int = 0
    n_beyond: int = 0
    same_bytes: bool = True
    max_abs: float = 0.0
    sum_abs: float = 0.0
    max_ulps: float = 0.0

    def __iadd__(self, other: Difference) -> Difference:
        self.n_elements += other.n_elements
        self.n_differ += other.n_differ
        self.n_beyond += other.n_beyond
        self.same_bytes &= other.same_bytes
        self.max_abs = max(self.max_abs, other.max_abs)
        self.sum_abs += other.sum_abs
        self.max_ulps = max(self.max_ulps, other.max_ulps)
        return self


def compare(a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Compare two flat tensors of equal length."""
    if a.dtype == b.dtype and same_bits(a, b):
        return Difference(n_elements=a.numel())
    if {a.dtype, b.dtype} <= _FINFO.keys():
        return _compare_floats(a, b)
    return _compare_exact(a, b)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bytes are equal."""
    one, two = a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy()
    whole = len(one) // 8 * 8
    words = np.array_equal(one[:whole].view(np.uint64), two[:whole].view(np.uint64))
    return words and np.array_equal(one[whole:], two[whole:])


def _compare_floats(a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Compare floats. Each step uses torch or NumPy, whichever was measured to be faster."""
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    x, y = a.to(wide), b.to(wide)
    distance = (x - y).abs_()
    differ = np.not_equal(x.numpy(), y.numpy())
    left = differ  # not yet explained by rounding
    if a.dtype != b.dtype:
        left = differ & (_bits_differ(y.to(a.dtype), a) if _narrower(a, b) is a else _bits_differ(x.to(b.dtype), b))
    result = Difference(a.numel(), same_bytes=False, max_abs=float(distance.numpy().max(initial=0)))
    if not math.isfinite(result.max_abs):
        differ &= ~(x.isnan() & y.isnan()).numpy()
        infinite = ~distance.isfinite()
        result.max_ulps = math.inf if (differ & infinite.numpy()).any() else 0.0
        left = differ & (left | infinite.numpy())
        distance = torch.where(infinite, 0, distance)
        result.max_abs = float(distance.max())
    result.n_differ = int(np.count_nonzero(differ))
    if result.n_differ:
        result.sum_abs = float(distance.sum())
        ulps = _max_ulps(x, y, distance, _FINFO[_narrower(a, b).dtype]) if left.any() else 0.5
        result.max_ulps = max(result.max_ulps, ulps)
        result.n_beyond = result.n_differ if a.dtype == b.dtype else _count_beyond(a, b, left)
    return result


def _narrower(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return max(a, b, key=lambda tensor: _FINFO[tensor.dtype].eps)


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    words = f'u{a.element_size()}'
    return np.not_equal(*(tensor.view(torch.uint8).numpy().view(words) for tensor in (a, b)))


def _max_ulps(x: torch.Tensor, y: torch.Tensor, distance: torch.Tensor, narrow: torch.finfo) -> float:
    """The largest distance, in ULPs of the larger of the two values."""
    kind, mask = _EXPONENT[x.dtype]
    exponent = x.view(kind) & mask
    torch.maximum(exponent, y.view(kind) & mask, out=exponent)
    power = exponent.view(x.dtype)  # the value rounded down to a power of two; infinite if not finite
    units = distance.div_(power.clamp_(min=narrow.smallest_normal))
    return float(units.numpy().max()) / narrow.eps


def _count_beyond(a: torch.Tensor, b: torch.Tensor, left: np.ndarray) -> int:
    """Test the remaining elements exactly: halfway between two values, rounding to either is right."""
    places = torch.from_numpy(np.flatnonzero(left))
    x, y = a[places].double(), b[places].double()
    return int((~(_is_nearest(x, y, b.dtype) | _is_nearest(y, x, a.dtype))).sum())


def _is_nearest(values: torch.Tensor, target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded = values.to(dtype).to(values.dtype)
    distance = (values - target).abs()
    return distance.isfinite() & rounded.isfinite() & (distance <= (values - rounded).abs())


def _compare_exact(a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Compare dtypes without rounding: integers, booleans, and dtypes that torch only stores."""
    result = Difference(a.numel(), same_bytes=False)
    wide = torch.complex128 if a.dtype.is_complex or b.dtype.is_complex else torch.float64
    try:
        x, y = a.to(wide), b.to(wide)
    except (RuntimeError, TypeError):  # torch only stores this dtype
        x, y = a.view(torch.uint8).to(wide), b.view(torch.uint8).to(wide)
    distance = (x - y).abs()
    result.n_differ = result.n_beyond = max(1, int((distance != 0).sum()))
    finite = distance[distance.isfinite()]
    result.max_abs, result.sum_abs = float(finite.max()) if len(finite) else 0.0, float(finite.sum())
    return result


def ways_through(a_dtype: str, b_dtype: str) -> set[tuple[str, bool]]:
    """Narrower dtypes that one of the tensors may have been rounded to: (dtype, whether it is the first tensor)."""
    if not (has_precision(a_dtype) and has_precision(b_dtype)):
        return set()
    eps = _eps(narrower(a_dtype, b_dtype))
    return {(dtype, first) for dtype in HALF_DTYPES if _eps(dtype) > eps for first in (True, False)}


def went_through(a: torch.Tensor, b: torch.Tensor, way: tuple[str, bool]) -> bool:
    """Whether one piece equals the other rounded to the narrower dtype."""
    dtype, first = way
    target, values = (a, b) if first else (b, a)
    rounded = values.to(TORCH_DTYPES[dtype]).to(values.dtype)
    return bool((rounded == target).all()) and bool(target.isfinite().all())
