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


def has_precision(dtype: str) -> bool:
    """Whether the dtype is floating point; others are compared bit by bit."""
    return TORCH_DTYPES[dtype] in _FINFO


def narrower(a_dtype: str, b_dtype: str) -> str:
    """The dtype with fewer fraction bits."""
    return max(a_dtype, b_dtype, key=lambda dtype: _FINFO[TORCH_DTYPES[dtype]].eps)


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
        for name in ('n_elements', 'n_differ', 'n_beyond', 'sum_abs'):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ('max_abs', 'max_ulps'):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.same_bytes &= other.same_bytes
        return self


def compare(a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Compare two flat tensors of equal length."""
    if a.dtype == b.dtype and np.array_equal(a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy()):
        return Difference(n_elements=a.numel())
    if {a.dtype, b.dtype} <= _FINFO.keys():
        return _compare_floats(a, b)
    return _compare_exact(a, b)


def _compare_floats(a: torch.Tensor, b: torch.Tensor) -> Difference:
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    x, y = a.to(wide), b.to(wide)
    differ = (x != y) & ~(x.isnan() & y.isnan())
    result = Difference(a.numel(), n_differ=int(differ.sum()), same_bytes=False)
    if not result.n_differ:
        return result
    distance = (x - y).abs_()
    finite = distance.isfinite()
    has_infinite = bool((differ & ~finite).any())
    distance.masked_fill_(~(differ & finite), 0)
    result.max_abs, result.sum_abs = float(distance.max()), float(distance.sum())
    narrow = max(a.dtype, b.dtype, key=lambda dtype: _FINFO[dtype].eps)
    left = differ  # not yet explained by rounding
    if a.dtype != b.dtype and not has_infinite:
        left = differ & (x.to(narrow).to(wide) != y.to(narrow).to(wide))
    if has_infinite:
        result.max_ulps = math.inf
    else:
        result.max_ulps = _max_ulps(x, y, distance, _FINFO[narrow]) if left.any() else 0.5
    result.n_beyond = _count_beyond(a[left].double(), b[left].double(), a.dtype, b.dtype)
    return result


def _max_ulps(x: torch.Tensor, y: torch.Tensor, distance: torch.Tensor, narrow: torch.finfo) -> float:
    """The largest distance, in ULPs of the larger of the two values."""
    larger = torch.where(distance > 0, torch.maximum(x.abs(), y.abs()), 1)
    mantissa, exponent = torch.frexp(larger)  # larger = mantissa * 2**exponent, mantissa in [0.5, 1)
    power = torch.ldexp(torch.ones_like(mantissa), exponent - 1).clamp_(min=narrow.smallest_normal)
    return float((distance / power).max()) / narrow.eps


def _count_beyond(x: torch.Tensor, y: torch.Tensor, x_dtype: torch.dtype, y_dtype: torch.dtype) -> int:
    """Test exactly, in fp64: halfway between two values, rounding to either is right."""
    if x_dtype == y_dtype:
        return len(x)
    return int((~(_is_nearest(x, y, y_dtype) | _is_nearest(y, x, x_dtype))).sum())


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
    eps = _FINFO[TORCH_DTYPES[narrower(a_dtype, b_dtype)]].eps
    narrow = [dtype for dtype in HALF_DTYPES if _FINFO[TORCH_DTYPES[dtype]].eps > eps]
    return {(dtype, first) for dtype in narrow for first in (True, False)}


def went_through(a: torch.Tensor, b: torch.Tensor, way: tuple[str, bool]) -> bool:
    """Whether one piece equals the other rounded to the narrower dtype."""
    dtype, first = way
    target, values = (a, b) if first else (b, a)
    rounded = values.to(TORCH_DTYPES[dtype]).to(values.dtype)
    return bool((rounded == target).all()) and bool(target.isfinite().all())
