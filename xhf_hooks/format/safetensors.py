"""Writes and validates headers of safetensors files: 8-byte header length, JSON header, tensor bytes.

Headers are written like ``safetensors.serialize`` 0.4 to 0.8 (``safetensors/src/tensor.rs``, ``prepare``): tensors
sorted by dtype, widest alignment first, then by name; padded with spaces to a multiple of 8 bytes. Files with equal
tensors are therefore equal byte for byte.

Reading checks what the library's ``SafeTensors::read_metadata`` checks: tensors are contiguous, have the size of their
shape and dtype, and fill the file. ``safe_open`` does not tell where they begin.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError, IncompleteError
from xhf_hooks.format import strict_json

#: All dtypes in the order of safetensors' ``Dtype`` enum, its sort order: bits per element and name in torch. Those of
#: less than a byte (safetensors 0.6 and newer) are recognised in headers only.
DTYPES: dict[str, tuple[int, str | None]] = {
    'BOOL': (8, 'bool'),
    'F4': (4, None),
    'F6_E2M3': (6, None),
    'F6_E3M2': (6, None),
    'U8': (8, 'uint8'),
    'I8': (8, 'int8'),
    'F8_E5M2': (8, 'float8_e5m2'),
    'F8_E4M3': (8, 'float8_e4m3fn'),
    'F8_E8M0': (8, 'float8_e8m0fnu'),
    'I16': (16, 'int16'),
    'U16': (16, 'uint16'),
    'F16': (16, 'float16'),
    'BF16': (16, 'bfloat16'),
    'I32': (32, 'int32'),
    'U32': (32, 'uint32'),
    'F32': (32, 'float32'),
    'C64': (64, 'complex64'),
    'F64': (64, 'float64'),
    'I64': (64, 'int64'),
    'U64': (64, 'uint64'),
}
DTYPE_NBYTES: dict[str, int] = {code: bits // 8 for code, (bits, _) in DTYPES.items() if bits % 8 == 0}
#: Dtypes of training with fp32 master weights.
HALF_DTYPES = ('BF16', 'F16')
FLOAT_DTYPES = frozenset({*HALF_DTYPES, 'F32', 'F64'})
#: In place of a dtype: each tensor as in the files of the base model.
AS_IN_BASE = 'base'
_DTYPE_RANK = {code: rank for rank, code in enumerate(DTYPES)}
_ALIGNMENT = 8
_LENGTH_NBYTES = 8


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
        The bytes before the tensor data, and the entries in file order.
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
    data_start = _LENGTH_NBYTES + len(text)
    entries = [
        HeaderEntry(name, dtype, shape, data_start + start, data_start + end)
        for (name, dtype, shape), (start, end) in zip(ordered, spans, strict=True)
    ]
    return struct.pack('<Q', len(text)) + text, entries


def check_file(path: Path, header: bytes, nbytes: int) -> None:
    """Compare the size and header of a written file with the plan.

    Raises:
        IncompleteError: The file is missing, or has another size or header.
    """
    if not path.is_file():
        raise IncompleteError(f'{path}: planned file is missing')
    found = path.stat().st_size
    if found != nbytes:
        raise IncompleteError(f'{path}: expected {nbytes} bytes, found {found}')
    with path.open('rb') as file:
        if file.read(len(header)) != header:
            raise IncompleteError(f'{path}: its header differs from the plan')


@dataclass(frozen=True)
class Header:
    """A validated header.

    Attributes:
        entries: In file order.
        data_start: Bytes before the first tensor.
        nbytes: Size of the file.
    """

    path: Path
    entries: tuple[HeaderEntry, ...]
    data_start: int
    nbytes: int


def read_header(path: Path) -> Header:
    """Parse and validate a header, without reading tensors.

    Raises:
        DamagedError: The file cannot be read, or the header is invalid.
    """
    try:
        with open(path, 'rb') as file:
            nbytes = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH_NBYTES)
            if len(start) < _LENGTH_NBYTES:
                raise DamagedError(f'{path}: {nbytes} bytes are too few for a safetensors file')
            (length,) = struct.unpack('<Q', start)
            if length > nbytes - _LENGTH_NBYTES:
                raise DamagedError(f'{path}: a header of {length} bytes in a file of {nbytes} bytes')
            text = file.read(length)
    except OSError as error:
        raise DamagedError(f'{path}: cannot be read ({error.strerror})') from None
    content, data_start = strict_json.parse(text, f'{path}: header'), _LENGTH_NBYTES + length
    content.pop('__metadata__', None)
    entries = [_entry(path, name, tensor, data_start) for name, tensor in content.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position, before = data_start, 'the header'
    for entry in entries:
        if entry.start != position:
            what = 'overlaps' if entry.start < position else 'leaves a hole after'
            raise DamagedError(
                f'{path}: {entry.name[:200]} {what} {before[:200]}: expected offset {position - data_start}, found '
                f'{entry.start - data_start}'
            )
        position, before = entry.end, entry.name
    if position != nbytes:
        raise DamagedError(f'{path}: the header describes {position} bytes, the file has {nbytes}')
    return Header(path, tuple(entries), data_start, nbytes)


def _entry(path: Path, name: str, tensor: Any, data_start: int) -> HeaderEntry:
    try:
        dtype, shape, (start, end) = tensor['dtype'], tuple(tensor['shape']), tensor['data_offsets']
        is_valid = all(map(strict_json.is_count, (*shape, start, end)))
        is_valid = is_valid and math.prod(shape) * DTYPES[dtype][0] == 8 * (end - start)
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise DamagedError(
            f'{path}: tensor {name[:200]!r}: expected dtype, shape, and data_offsets of as many bytes, '
            f'found {str(tensor)[:200]}'
        )
    return HeaderEntry(name, dtype, shape, data_start + start, data_start + end)
