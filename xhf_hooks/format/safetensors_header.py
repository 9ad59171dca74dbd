"""Reads the header of a safetensors file and believes nothing of it.

The rules are those of ``safetensors/src/tensor.rs`` (``SafeTensors::read_metadata``, ``Metadata::validate``): tensors
lie one after the other without a hole, each as long as its shape and dtype say, and fill the file.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.files.regular_files import open_regular
from xhf_hooks.format import strict_json
from xhf_hooks.format.safetensors import DTYPE_NBYTES, HeaderEntry

#: Bits of an element. Those of less than a byte are in safetensors 0.6 and newer; nothing of ours writes them.
DTYPE_BITS = {code: 8 * nbytes for code, nbytes in DTYPE_NBYTES.items()} | {'F4': 4, 'F6_E2M3': 6, 'F6_E3M2': 6}
_LENGTH_NBYTES = 8
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class Header:
    """What a safetensors file says that it holds.

    Attributes:
        entries: In file order.
        data_start: Bytes before the first tensor.
        nbytes: Size of the file.
    """

    path: Path
    entries: tuple[HeaderEntry, ...]
    metadata: dict[str, str] = field(repr=False)
    data_start: int
    nbytes: int

    @property
    def misaligned(self) -> tuple[str, ...]:
        """Tensors that do not start at a multiple of their element's size: they load, but are copied first."""
        return tuple(e.name for e in self.entries if e.start % max(1, DTYPE_BITS[e.dtype] // 8))


def read_header(path: Path) -> Header:
    """Parse and check; no tensor is read.

    Raises:
        DamagedError: The first thing that is wrong.
    """
    try:
        with open_regular(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH_NBYTES)
            if len(start) < _LENGTH_NBYTES:
                raise DamagedError(f'{path}: {nbytes} bytes are too few for a safetensors file')
            (length,) = struct.unpack('<Q', start)
            most = min(nbytes - _LENGTH_NBYTES, strict_json.MOST_NBYTES)
            if length > most:
                raise DamagedError(f'{path}: a header of {length} bytes; in a file of {nbytes} at most {most}')
            text = file.read(length)
    except OSError as error:
        raise DamagedError(f'{path}: cannot be read ({error.strerror})') from None
    if not text.startswith(b'{'):
        raise DamagedError(f'{path}: the header does not begin with {{')
    return _checked(path, strict_json.parse(text, f'{path}: header'), _LENGTH_NBYTES + length, nbytes)


def _checked(path: Path, content: dict[str, Any], data_start: int, nbytes: int) -> Header:
    metadata = content.pop('__metadata__', {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedError(f'{path}: __metadata__ is not a set of texts')
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
    return Header(path, tuple(entries), metadata, data_start, nbytes)


def _entry(path: Path, name: str, tensor: Any, data_start: int) -> HeaderEntry:
    where = f'{path}: tensor {name[:200]!r}'
    if not isinstance(tensor, dict) or set(tensor) != {'dtype', 'shape', 'data_offsets'}:
        raise DamagedError(f'{where}: expected dtype, shape and data_offsets')
    dtype, shape, offsets = tensor['dtype'], tensor['shape'], tensor['data_offsets']
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise DamagedError(f'{where}: unknown dtype {str(dtype)[:80]!r}')
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS or not all(map(strict_json.is_count, shape)):
        raise DamagedError(f'{where}: {str(shape)[:80]} is no shape')
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(strict_json.is_count, offsets)):
        raise DamagedError(f'{where}: {str(offsets)[:80]} are no offsets')
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    start, end = offsets
    if bits % 8 or end - start != bits // 8:
        raise DamagedError(f'{where}: {dtype} {shape} takes {bits / 8:.10g} bytes, its offsets say {end - start}')
    return HeaderEntry(name, dtype, tuple(shape), data_start + start, data_start + end)
