"""Compares two pieces of a tensor: the same, different by rounding, or different.

A difference is *rounding* if one value is the other rounded once: to its own dtype, or to a narrower one that both
dtypes hide. The fp32 values that ``pth_to_hf --fp32`` stores were first rounded to fp16.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.safetensors import FLOAT_DTYPES, HALF_DTYPES

_FLOATS = {code: TORCH_DTYPES[code] for code in (*sorted(FLOAT_DTYPES), 'F8_E4M3', 'F8_E5M2')}


@dataclass
class Difference:
    """Differences over the compared pieces of one tensor; merged with ``+=``.

    Attributes:
        n_differ: Elements with different values; equal values with different bits (zeros, NaNs) do not count.
        unexplained: For each dtype of :func:`roundings`: those of ``n_differ`` that rounding to it does not explain.
        same_bytes: All bytes are equal.
        max_abs, sum_abs: Over finite differences.
        max_ulps: Largest difference in ULPs of the narrower dtype.
    """

    n_differ: int = 0
    unexplained: Counter[str] = field(default_factory=Counter)
    same_bytes: bool = True
    max_abs: float = 0.0
    sum_abs: float = 0.0
    max_ulps: float = 0.0

    def __iadd__(self, other: Difference) -> Difference:
        self.n_differ += other.n_differ
        self.unexplained += other.unexplained
        self.same_bytes &= other.same_bytes
        self.sum_abs += other.sum_abs
        self.max_abs, self.max_ulps = max(self.max_abs, other.max_abs), max(self.max_ulps, other.max_ulps)
        return self


def narrower(a: str, b: str) -> str | None:
    """The floating-point dtype with fewer fraction bits; None if one of them is not floating point."""
    return max(a, b, key=_eps) if {a, b} <= _FLOATS.keys() else None


def _eps(code: str) -> float:
    return torch.finfo(_FLOATS[code]).eps


def roundings(a: str, b: str) -> dict[str, tuple[str, ...]]:
    """The dtypes that a difference may be explained by: the narrower one, and narrower ones that both hide.

    Each with the dtypes that one value, rounded to one of them, has to equal the other.
    """
    narrow = narrower(a, b)
    if narrow is None:
        return {}
    found = {} if a == b else {narrow: tuple(sorted((a, b), key=_eps, reverse=True))}
    return found | {code: (code,) for code in sorted(HALF_DTYPES) if _eps(code) > _eps(narrow)}


def compare(a: torch.Tensor, b: torch.Tensor, dtypes: tuple[str, str]) -> Difference:
    """Compare two flat tensors of equal length and of these dtypes."""
    if dtypes[0] == dtypes[1] and np.array_equal(a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy()):
        return Difference()
    narrow = narrower(*dtypes)
    if narrow is None:
        return _compare_exact(a, b)
    wide = torch.float64 if 'F64' in dtypes else torch.float32
    x, y = a.to(wide), b.to(wide)
    differ = (x != y) & ~(x.isnan() & y.isnan())
    result = Difference(int(differ.sum()), same_bytes=False)
    if not result.n_differ:
        return result
    distance = (x - y).abs_()
    finite = distance.isfinite()
    for through, targets in roundings(*dtypes).items():
        left = differ
        for dtype in (TORCH_DTYPES[code] for code in targets):
            for one, other in ((x, y), (y, x)):
                if bool(left.any()):  # usually the first explains all
                    left = left & ~(finite & _is_nearest(one, other, distance, dtype))
        result.unexplained[through] = int(left.sum())
    has_infinite = bool((differ & ~finite).any())
    distance.masked_fill_(~(differ & finite), 0)
    result.max_abs, result.sum_abs = float(distance.max()), float(distance.sum())
    result.max_ulps = math.inf if has_infinite else _max_ulps(x, y, distance, torch.finfo(_FLOATS[narrow]))
    return result


def _is_nearest(x: torch.Tensor, y: torch.Tensor, distance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where ``y`` is a value of the dtype, and none is nearer to ``x``.

    Halfway, either is right: of fp16 and bf16 copies of one model, neither may be the other one rounded to even.
    """
    rounded, stored = (tensor.to(dtype).to(tensor.dtype) for tensor in (x, y))
    return (stored == y) & rounded.isfinite() & (distance <= (x - rounded).abs())


def _max_ulps(x: torch.Tensor, y: torch.Tensor, distance: torch.Tensor, narrow: torch.finfo) -> float:
    """The largest distance, in ULPs of the larger of the two values."""
    larger = torch.where(distance > 0, torch.maximum(x.abs(), y.abs()), 1)
    mantissa, exponent = torch.frexp(larger)  # larger = mantissa * 2**exponent, mantissa in [0.5, 1)
    power = torch.ldexp(torch.ones_like(mantissa), exponent - 1).clamp_(min=narrow.smallest_normal)
    return float((distance / power).max()) / narrow.eps


def _compare_exact(a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Compare a dtype without rounding, such as integers."""
    distance = (a.to(torch.complex128) - b.to(torch.complex128)).abs()
    distance.nan_to_num_(0, 0)
    n_differ = int((a.view(torch.uint8) != b.view(torch.uint8)).view(-1, a.itemsize).any(dim=1).sum())
    return Difference(n_differ, same_bytes=False, max_abs=float(distance.max()), sum_abs=float(distance.sum()))
