"""The safetensors file layout: 8-byte header length, JSON header, tensor bytes.

Layout and ordering are those of ``safetensors.serialize`` 0.4 to 0.8 (``safetensors/src/tensor.rs``,
``prepare``): tensors sorted by dtype, widest alignment first, then by name; the header padded
with spaces to a multiple of 8 bytes. A file with the same tensors is therefore the same file, byte for
byte, as the library writes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.errors import IncompleteError

#: Safetensors dtypes in the order of safetensors' ``Dtype`` enum, which is its sort order, with widths in bytes.
DTYPE_NBYTES: dict[str, int] = {
    'BOOL': 1,
    'U8': 1,
    'I8': 1,
    'F8_E5M2': 1,
    'F8_E4M3': 1,
    'F8_E8M0': 1,
    'I16': 2,
    'U16': 2,
    'F16': 2,
    'BF16': 2,
    'I32': 4,
    'U32': 4,
    'F32': 4,
    'C64': 8,
    'F64': 8,
    'I64': 8,
    'U64': 8,
}
_DTYPE_RANK = {code: rank for rank, code in enumerate(DTYPE_NBYTES)}
FLOAT_DTYPES = frozenset({'F16', 'BF16', 'F32', 'F64'})
_ALIGNMENT = 8


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a header; ``start`` and ``end`` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def build_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[HeaderEntry]]:
    """Lay out one file.

    Args:
        tensors: (name, safetensors dtype, shape) of each tensor, in any order.

    Returns:
        The bytes that come before the tensor data, and the entries in file order.
    """
    ordered = sorted(tensors, key=lambda t: (-_DTYPE_RANK[t[1]], t[0]))
    header: dict[str, object] = {'__metadata__': {'format': 'pt'}}
    spans: list[tuple[int, int]] = []
    position = 0
    for name, dtype, shape in ordered:
        end = position + math.prod(shape) * DTYPE_NBYTES[dtype]
        header[name] = {'dtype': dtype, 'shape': list(shape), 'data_offsets': [position, end]}
        spans.append((position, end))
        position = end
    text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
    text += b' ' * (-len(text) % _ALIGNMENT)
    data_start = 8 + len(text)
    entries = [
        HeaderEntry(name, dtype, shape, data_start + start, data_start + end)
        for (name, dtype, shape), (start, end) in zip(ordered, spans, strict=True)
    ]
    return struct.pack('<Q', len(text)) + text, entries


def check_file(path: Path, header: bytes, nbytes: int) -> None:
    """Compare a written file's size and header with what was planned.

    Raises:
        IncompleteError: The file is missing, short, long, or begins with other bytes.
    """
    if not path.is_file():
        raise IncompleteError(f'{path}: planned file is missing')
    found = path.stat().st_size
    if found != nbytes:
        raise IncompleteError(f'{path}: expected {nbytes} bytes, found {found}')
    with path.open('rb') as file:
        if file.read(len(header)) != header:
            raise IncompleteError(f'{path}: its header is not the planned one')
