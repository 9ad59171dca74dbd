"""What is rounding and what is not, against exact arithmetic with fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.verify.rounding import compare

FLOATS = ('F64', 'F32', 'BF16', 'F16')


def neighbours(value: Fraction, code: str) -> set[Fraction]:
    """The values of a dtype nearest to a number: one, or two that are equally near."""
    dtype = TORCH_DTYPES[code]
    near = torch.tensor(float(value), dtype=torch.float64).to(dtype)
    if not math.isfinite(float(near)):
        return set()  # too large for the type: infinity is no rounding
    found = [near, *(torch.nextafter(near, torch.tensor(s * math.inf, dtype=dtype)) for s in (1, -1))]
    exact = [Fraction(float(one)) for one in found if math.isfinite(float(one))]
    least = min((abs(one - value) for one in exact), default=None)
    return {one for one in exact if abs(one - value) == least}


def is_rounding(a: float, b: float, a_code: str, b_code: str) -> bool:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    if not (math.isfinite(a) and math.isfinite(b)):
        return False
    x, y = Fraction(a), Fraction(b)
    return y in neighbours(x, b_code) or x in neighbours(y, a_code)


values = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.floats(-2, 2, width=32),
    st.floats(-(2**-20), 2**-20, width=32),
    st.sampled_from([0.0, -0.0, 1.0, 1 + 2**-8, 1 + 2**-11, 1 + 3 * 2**-8, 65504.0, 65520.0, 2**-24, 2**-25, 3.4e38]),
)


@settings(max_examples=100, deadline=None)
@given(
    numbers=st.lists(st.tuples(values, st.sampled_from(['rounded', 'next', 'other']), values), max_size=8),
    codes=st.sampled_from([(a, b) for a in FLOATS for b in FLOATS if a != b]),
)
def test_against_fractions(numbers, codes):
    a_dtype, b_dtype = (TORCH_DTYPES[code] for code in codes)
    a = torch.tensor([one for one, _, _ in numbers], dtype=torch.float64).to(a_dtype)
    b = a.to(b_dtype)
    for i, (_, kind, other) in enumerate(numbers):
        if kind == 'next':
            b[i] = torch.nextafter(b[i], torch.tensor(math.inf, dtype=b_dtype))
        elif kind == 'other':
            b[i] = torch.tensor(other, dtype=torch.float64).to(b_dtype)
    found = compare(a, b, codes)
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    narrow = max(codes, key=lambda code: torch.finfo(TORCH_DTYPES[code]).eps)
    assert found.unexplained[narrow] == sum(not is_rounding(x, y, *codes) for x, y in pairs)
    assert found.n_differ == sum(x != y and not (math.isnan(x) and math.isnan(y)) for x, y in pairs)
    exact = [abs(Fraction(x) - Fraction(y)) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    largest = float(max(exact, default=0))
    assert found.max_abs == pytest.approx(largest, rel=1e-6) or largest > 3.4e38


@pytest.mark.parametrize('code', ['I8', 'U8', 'I64', 'BOOL', 'C64'])
def test_exact_types(code):
    a = torch.tensor([0, 1, 0, 1]).to(TORCH_DTYPES[code])
    b = a.clone()
    assert compare(a, b, (code, code)).same_bytes
    b[2] = 1
    found = compare(a, b, (code, code))
    assert (found.n_differ, found.max_abs) == (1, 1.0) and not found.unexplained
