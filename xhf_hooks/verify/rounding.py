"""How two pieces of the same tensor differ: not at all, by rounding, or really.

A difference is *rounding* when one value is the nearest that its dtype has to the other: that is at most half
a unit in the last place of the narrower type. The narrower type may be hidden: fp32 numbers that were first rounded to
fp16 (as xtuner's ``pth_to_hf --fp32`` stores) are all values of fp16, each the nearest to what it was made of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from xhf_hooks.format.dtypes import TORCH_DTYPES

#: Explicit bits of the fraction, and the exponent of the least normal number.
_PRECISION = {'F64': (52, -1022), 'F32': (23, -126), 'F16': (10, -14), 'BF16': (7, -126)}
_PRECISION |= {'F8_E4M3': (3, -6), 'F8_E5M2': (2, -14)}
_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}
_USUAL = {'F32', 'F16', 'BF16'}
#: Types that values may have gone through before they were stored in a wider one.
_THROUGH = ('F16', 'BF16')


def has_precision(dtype: str) -> bool:
    """Whether values of this dtype are rounded; others are equal or not."""
    return dtype in _PRECISION


@dataclass
class Difference:
    """Sums over the pieces of one tensor that were compared; merged with ``+=``.

    Attributes:
        n_differ: Elements with another value; elements of other bits but equal value (zeros, NaNs) not counted.
        n_beyond: Of these, beyond what rounding between the two dtypes explains.
        same_bytes: Every byte is the same.
        max_abs, sum_abs: Over finite differences.
        max_ulps: Largest difference in units in the last place of the narrower dtype; 0.5, which it cannot
            exceed, for what is rounded to the nearest throughout.
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


class Workspace:
    """Memory of one thread for intermediate results, used again for each piece: fresh memory costs page faults.

    Args:
        n_elements: Of the largest piece.
    """

    def __init__(self, n_elements: int) -> None:
        self.floats = [torch.empty(n_elements) for _ in range(3)]
        self.ints = [np.empty(n_elements, np.int32) for _ in range(2)]
        self.mask = np.empty(n_elements, np.bool_)
        self.rounded = {code: torch.empty(n_elements, dtype=TORCH_DTYPES[code]) for code in ('F16', 'BF16')}


def compare(
    a: torch.Tensor, b: torch.Tensor, a_dtype: str, b_dtype: str, workspace: Workspace | None = None
) -> Difference:
    """Compare two flat pieces with as many elements each.

    Args:
        a_dtype, b_dtype: Codes of their dtypes.
        workspace: Of this thread; makes it faster.
    """
    if a.dtype == b.dtype and same_bits(a, b):
        return Difference(n_elements=a.numel())
    if not (has_precision(a_dtype) and has_precision(b_dtype)):
        return _compare_exact(a, b)
    found = None
    if {a_dtype, b_dtype} <= _USUAL and a.numel():
        space = workspace or Workspace(a.numel())
        found = _compare_rounded(a, b, a_dtype, b_dtype, space) or _compare_finite(a, b, a_dtype, b_dtype, space)
    return found or _compare_any(a, b, a_dtype, b_dtype)


def _compare_rounded(
    a: torch.Tensor, b: torch.Tensor, a_dtype: str, b_dtype: str, space: Workspace
) -> Difference | None:
    """The usual case of two dtypes: the one is the other, rounded. None when it is not, or not finite."""
    if a_dtype == b_dtype:
        return None
    n, code = a.numel(), narrower(a_dtype, b_dtype)
    wide, narrow, wide_dtype = (b, a, b_dtype) if code == a_dtype else (a, b, a_dtype)
    rounded = space.rounded[code][:n].copy_(wide)
    if not torch.equal(rounded.view(torch.int16), narrow.view(torch.int16)):
        return None
    if wide_dtype != 'F32':
        wide = space.floats[1][:n].copy_(wide)
    distance = torch.sub(wide, space.floats[0][:n].copy_(narrow), out=space.floats[2][:n]).abs_()
    largest = float(distance.numpy().max())  # NaN if there is one
    if not math.isfinite(largest):
        return None
    n_differ = int(np.count_nonzero(distance.view(torch.int32).numpy()))  # faster than of floats
    max_ulps = 0.5 if n_differ else 0.0
    return Difference(n, n_differ, 0, False, largest, float(distance.sum()), max_ulps)


def _compare_finite(
    a: torch.Tensor, b: torch.Tensor, a_dtype: str, b_dtype: str, space: Workspace
) -> Difference | None:
    """Finite values, several times faster than :func:`_compare_any`; None when some are not."""
    n = a.numel()
    x, y = (
        tensor if code == 'F32' else space.floats[i][:n].copy_(tensor)
        for i, (tensor, code) in enumerate(((a, a_dtype), (b, b_dtype)))
    )
    distance = torch.sub(x, y, out=space.floats[2][:n])
    largest = max(float(distance.max()), -float(distance.min()))  # NaN if there is one
    if not math.isfinite(largest):
        return None
    result = Difference(n, same_bytes=False)
    mask = np.not_equal(x.numpy(), y.numpy(), out=space.mask[:n])
    result.n_differ = int(np.count_nonzero(mask))
    if result.n_differ == 0:
        return result
    result.max_abs, result.sum_abs = largest, float(distance.abs_().sum())
    result.max_ulps = _max_ulps_finite(x, y, distance, narrower(a_dtype, b_dtype), space)
    if a_dtype == b_dtype:
        result.n_beyond = result.n_differ
        return result
    code = narrower(a_dtype, b_dtype)
    wide, narrow = (y, a) if code == a_dtype else (x, b)
    rounded = space.rounded[code][:n].copy_(wide)
    mask &= np.not_equal(rounded.view(torch.int16).numpy(), narrow.view(torch.int16).numpy())
    if mask.any():
        left = torch.from_numpy(np.flatnonzero(mask))
        result.n_beyond = _count_beyond(x[left].double(), y[left].double(), a_dtype, b_dtype)
    return result


def _max_ulps_finite(x: torch.Tensor, y: torch.Tensor, distance: torch.Tensor, dtype: str, space: Workspace) -> float:
    """As :func:`_max_ulps`; the larger of two exponents is the larger of two integers."""
    bits, least = _PRECISION[dtype]
    exponents = [ints[: len(x)] for ints in space.ints]
    for values, out in zip((x, y), exponents, strict=True):
        np.bitwise_and(values.view(torch.int32).numpy(), np.int32(0x7F800000), out=out)
    power = np.maximum(exponents[0], exponents[1], out=exponents[0])
    np.maximum(power, np.float32(2.0**least).view(np.int32), out=power)
    units = torch.from_numpy(exponents[1].view(np.float32))
    torch.div(distance, torch.from_numpy(power.view(np.float32)), out=units)
    return float(units.max()) * 2.0**bits


def _compare_any(a: torch.Tensor, b: torch.Tensor, a_dtype: str, b_dtype: str) -> Difference:
    """Any types with a precision, any values."""
    wide = torch.float64 if 'F64' in (a_dtype, b_dtype) else torch.float32
    x, y = a.to(wide), b.to(wide)
    distance = (x - y).abs_()
    result = Difference(a.numel(), same_bytes=False)
    differ = (x != y) & ~(x.isnan() & y.isnan())
    result.n_differ = int(differ.sum())
    if result.n_differ == 0:
        return result
    finite = distance.isfinite()
    if not finite.all():
        distance = torch.where(finite, distance, 0)
        result.max_ulps = float('inf') if bool((differ & ~finite).any()) else 0.0
    result.max_abs = float(distance.max())
    result.sum_abs = float(distance.sum(dtype=torch.float64))
    result.max_ulps = max(result.max_ulps, _max_ulps(x, y, distance, narrower(a_dtype, b_dtype)))
    beyond = differ.clone()
    for dtype in {a_dtype, b_dtype}:  # a quick way for nearly all: the one, rounded, is the other
        if TORCH_DTYPES[dtype] != wide:
            beyond &= ~_rounds_to(x, y, dtype) & ~_rounds_to(y, x, dtype)
    result.n_beyond = _count_beyond(x[beyond].double(), y[beyond].double(), a_dtype, b_dtype)
    return result


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Byte for byte."""
    one, two = a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy()
    whole = len(one) // 8 * 8
    words = np.array_equal(one[:whole].view(np.uint64), two[:whole].view(np.uint64))
    return words and np.array_equal(one[whole:], two[whole:])


def narrower(a_dtype: str, b_dtype: str) -> str:
    """Of two dtypes the one with the shorter fraction."""
    return min(a_dtype, b_dtype, key=lambda dtype: _PRECISION[dtype][0])


def _compare_exact(a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Integers, booleans, and types that are not computed with: of these only the bits count."""
    result = Difference(a.numel(), same_bytes=False)
    if a.dtype.is_complex or b.dtype.is_complex or a.element_size() == 1 or b.element_size() == 1:
        try:
            a, b = a.to(torch.complex128), b.to(torch.complex128)
        except (RuntimeError, TypeError):  # a type that torch only stores
            a, b = a.view(torch.uint8).to(torch.float64), b.view(torch.uint8).to(torch.float64)
    else:
        a, b = a.to(torch.float64), b.to(torch.float64)
    distance = (a - b).abs()
    result.n_differ = result.n_beyond = max(1, int((distance != 0).sum()))
    finite = distance[distance.isfinite()]
    result.max_abs, result.sum_abs = float(finite.max()) if len(finite) else 0.0, float(finite.sum())
    return result


def _rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    return values.to(TORCH_DTYPES[dtype]).to(values.dtype)


def _rounds_to(values: torch.Tensor, target: torch.Tensor, dtype: str) -> torch.Tensor:
    """Finite values whose nearest of ``dtype`` is ``target``."""
    return (_rounded(values, dtype) == target) & values.isfinite() & target.isfinite()


def _count_beyond(x: torch.Tensor, y: torch.Tensor, a_dtype: str, b_dtype: str) -> int:
    """Exactly, for the few that are left: two values of a type may be equally near, and either is right."""
    nearest = _is_nearest(x, y, b_dtype) | _is_nearest(y, x, a_dtype)
    return int((~nearest).sum())


def _is_nearest(values: torch.Tensor, target: torch.Tensor, dtype: str) -> torch.Tensor:
    rounded = _rounded(values, dtype)
    distance = (values - target).abs()
    return distance.isfinite() & rounded.isfinite() & (distance <= (values - rounded).abs())


def ways_through(a_dtype: str, b_dtype: str) -> set[tuple[str, bool]]:
    """Narrower types that one of two wide tensors may have gone through: (type, whether that was the first one)."""
    if not (has_precision(a_dtype) and has_precision(b_dtype)):
        return set()
    bits = _PRECISION[narrower(a_dtype, b_dtype)][0]
    return {(dtype, first) for dtype in _THROUGH if _PRECISION[dtype][0] < bits for first in (True, False)}


def went_through(a: torch.Tensor, b: torch.Tensor, way: tuple[str, bool]) -> bool:
    """Whether a piece is, value for value, what the other gives when it is rounded to a narrower type."""
    dtype, first = way
    target, values = (a, b) if first else (b, a)
    return bool((_rounded(values, dtype) == target).all()) and bool(target.isfinite().all())


def _max_ulps(x: torch.Tensor, y: torch.Tensor, distance: torch.Tensor, dtype: str) -> float:
    """In units of the larger of the two values: of a value just below a power of two, those of that power."""
    bits, least = _PRECISION[dtype]
    larger = torch.maximum(x.abs(), y.abs())
    kind, mask = _EXPONENT[larger.dtype]
    power = (larger.view(kind) & mask).view(larger.dtype)  # the power of two below; infinite for what is not finite
    return float((distance / power.clamp_(min=2.0**least)).max()) * 2.0**bits
