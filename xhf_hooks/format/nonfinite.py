"""Counts infinities and NaNs in the bytes of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Dtype to (unsigned word, mask without the sign bit, smallest masked value that is not finite).
#: E4M3 and E8M0 have no infinity and one NaN; C64 is two F32.
_FORMATS: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    'BF16': (np.uint16, 0x7FFF, 0x7F80),
    'F16': (np.uint16, 0x7FFF, 0x7C00),
    'F32': (np.uint32, 0x7FFFFFFF, 0x7F800000),
    'C64': (np.uint32, 0x7FFFFFFF, 0x7F800000),
    'F64': (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    'F8_E5M2': (np.uint8, 0x7F, 0x7C),
    'F8_E4M3': (np.uint8, 0x7F, 0x7F),
    'F8_E8M0': (np.uint8, 0xFF, 0xFF),
}
_WORDS = 1 << 19  # per pass, so that they stay in the CPU cache


def count_non_finite(data: memoryview | bytearray | bytes, dtype: str) -> int:
    """Number of infinite or NaN words in ``data``; 0 for integers. A complex number is two words.

    Args:
        data: Contiguous bytes of complete elements.
        dtype: Safetensors dtype.
    """
    if dtype not in _FORMATS:
        return 0
    kind, mask, least = _FORMATS[dtype]
    words = np.frombuffer(data, kind)
    return sum(_count(words[start : start + _WORDS], mask, least) for start in range(0, len(words), _WORDS))


def _count(words: np.ndarray, mask: int, least: int) -> int:
    """Usually, two fast maxima of positive and of negative numbers show that there are none."""
    every_bit = np.iinfo(words.dtype).max
    sign = every_bit - mask
    if words.max() < sign + least and (not sign or words.view(f'i{words.itemsize}').max() < least):
        return 0
    return int(np.count_nonzero((words & words.dtype.type(mask)) >= least))
