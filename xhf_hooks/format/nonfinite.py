"""Counts infinities and NaNs in the bytes of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Dtype to (unsigned type of its words, bits to look at, least value that is not finite).
#: E4M3 and E8M0 have no infinity and a single NaN; a complex number is two of F32.
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
_WORDS = 1 << 19  # at once: the passes after the first find them in the processor's cache


def count_non_finite(data: memoryview | bytearray | bytes, dtype: str) -> int:
    """How many words of ``data`` are infinite or NaN; 0 for integers. A complex number is two words.

    Args:
        data: Contiguous bytes, a whole number of elements.
        dtype: Safetensors dtype.
    """
    if dtype not in _FORMATS:
        return 0
    kind, mask, least = _FORMATS[dtype]
    words = np.frombuffer(data, kind)
    return sum(_count(words[start : start + _WORDS], mask, least) for start in range(0, len(words), _WORDS))


def _count(words: np.ndarray, mask: int, least: int) -> int:
    """Two maxima, at the speed of memory, tell that there are none: of the positive numbers, and of the negative."""
    every_bit = np.iinfo(words.dtype).max
    sign = every_bit - mask
    if words.max() < sign + least and (not sign or words.view(f'i{words.itemsize}').max() < least):
        return 0
    return int(np.count_nonzero((words & words.dtype.type(mask)) >= least))
