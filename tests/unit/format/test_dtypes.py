"""Names of dtypes."""

from __future__ import annotations

from xhf_hooks.format.dtypes import CODES_BY_NAME, TORCH_DTYPES
from xhf_hooks.format.safetensors import DTYPE_NBYTES


def test_one_table_names_every_dtype():
    assert set(CODES_BY_NAME.values()) == set(DTYPE_NBYTES)
    for code, dtype in TORCH_DTYPES.items():
        assert dtype.itemsize == DTYPE_NBYTES[code] and CODES_BY_NAME[str(dtype).removeprefix('torch.')] == code
