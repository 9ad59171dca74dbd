"""Writes and reads headers of safetensors files: 8-byte header length, JSON header, tensor bytes.

Headers are written like ``safetensors.serialize`` 0.4 to 0.8 (``safetensors/src/tensor.rs``, ``prepare``): tensors
sorted by dtype, widest alignment first, then by name; padded with spaces to a multiple of 8 bytes. Files with equal
tensors are therefore equal byte for byte.

``safe_open`` validates a header (tensors are contiguous, have the size of their shape and dtype, and fill the file),
but does not say where they begin.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.errors import DamagedError, IncompleteError

#: Dtypes in the order of safetensors' ``Dtype`` enum, its sort order: bytes per element and name in torch.
DTYPES: dict[str, tuple[int, str]] = {
    'BOOL': (1, 'bool'),
    'U8': (1, 'uint8'),
    'I8': (1, 'int8'),
    'F8_E5M2': (1, 'float8_e5m2'),
    'F8_E4M3': (1, 'float8_e4m3fn'),
    'F8_E8M0': (1, 'float8_e8m0fnu'),
    'I16': (2, 'int16'),
    'U16': (2, 'uint16'),
    'F16': (2, 'float16'),
    'BF16': (2, 'bfloat16'),
    'I32': (4, 'int32'),
    'U32': (4, 'uint32'),
    'F32': (4, 'float32'),
    'C64': (8, 'complex64'),
    'F64': (8, 'float64'),
    'I64': (8, 'int64'),
    'U64': (8, 'uint64'),
}
DTYPE_NBYTES = {code: nbytes for code, (nbytes, _) in DTYPES.items()}
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
    """A validated header; its entries are in file order."""

    entries: tuple[HeaderEntry, ...]
    data_start: int


#: How a file begins that Git LFS has not replaced with its content.
LFS_MAGIC = b'version https://git-lfs'
LFS_PROBLEM = 'a pointer of Git LFS, not the file itself; run git lfs pull'


def read_header(path: Path) -> Header:
    """Validate a header with safetensors' own ``safe_open``, and read where its tensors are. Reads no tensors.

    Raises:
        DamagedError: The file cannot be read, or the header is invalid.
    """
    from safetensors import SafetensorError, safe_open  # transformers brings it, and is asked for first

    try:
        with open(path, 'rb') as file, safe_open(path, 'np'):
            (length,) = struct.unpack('<Q', file.read(_LENGTH_NBYTES))
            content, data_start = json.loads(file.read(length)), _LENGTH_NBYTES + length
    except OSError as error:
        raise DamagedError(f'{path}: cannot be read ({error.strerror or error})') from None
    except SafetensorError as error:
        with open(path, 'rb') as file:
            if file.read(len(LFS_MAGIC)) == LFS_MAGIC:
                raise DamagedError(f'{path}: {LFS_PROBLEM}') from None
        raise DamagedError(f'{path}: not a complete safetensors file ({str(error)[:300]})') from None
    content.pop('__metadata__', None)
    entries = []
    for name, tensor in content.items():
        start, end = (data_start + offset for offset in tensor['data_offsets'])
        entries.append(HeaderEntry(name, tensor['dtype'], tuple(tensor['shape']), start, end))
    return Header(tuple(sorted(entries, key=lambda entry: (entry.start, entry.end))), data_start)
