"""Casts, and what they count."""

from __future__ import annotations

import pytest
import torch

from xhf_hooks.format.dtypes import CODES_BY_NAME, CODES_BY_STORAGE, TORCH_DTYPES, cast
from xhf_hooks.format.safetensors import DTYPE_NBYTES

pytestmark = pytest.mark.modern_only  # it does not depend on the stack

INF, NAN = float('inf'), float('nan')


@pytest.mark.parametrize(
    ('values', 'overflows'),
    [([1e5, -1e5, 1.0], 2), ([INF, -INF, 2.0], 0), ([NAN, 1e5], 1), ([NAN, INF], 0), ([65504.0], 0), ([], 0)],
)
def test_finite_numbers_that_become_infinite_are_counted(values, overflows):
    found, count = cast(torch.tensor(values), 'F16')
    assert count == overflows and found.dtype == torch.float16
    assert torch.equal(found.nan_to_num(7.0), torch.tensor(values).half().nan_to_num(7.0))


def test_integers_and_wider_types_never_overflow():
    assert cast(torch.tensor([2**40]), 'I64')[1] == cast(torch.tensor([3e38]), 'BF16')[1] == 0
    assert cast(torch.tensor([INF, 6e4]).half(), 'F32')[1] == 0


def test_one_table_names_every_dtype():
    assert set(CODES_BY_NAME.values()) == set(DTYPE_NBYTES)
    for code, dtype in TORCH_DTYPES.items():
        assert dtype.itemsize == DTYPE_NBYTES[code] and CODES_BY_NAME[str(dtype).removeprefix('torch.')] == code
    for storage, code in CODES_BY_STORAGE.items():
        assert hasattr(torch, storage) and code in TORCH_DTYPES
