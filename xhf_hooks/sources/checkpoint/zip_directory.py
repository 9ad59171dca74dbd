"""Reads the directory of a zip file of ``torch.save`` with limits.

Unlike :mod:`zipfile`, it limits the number of entries before it creates objects for them, and refuses overlapping
parts. Layout: .ZIP File Format Specification 6.3, sections 4.3.7 to 4.3.16 and 4.5.3. torch writes no comments, and
nothing before the parts or after the directory.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from xhf_hooks.sources.checkpoint.file_bytes import FileBytes

#: A checkpoint of 100,000 parameters with the state of Adam has 300,000 parts.
_MOST_PARTS = 1_000_000
_MOST_NBYTES = 256 * 10**6

_LOCAL = struct.Struct('<4s5H3I2H')
_CENTRAL = struct.Struct('<4s6H3I5H2I')
_END = struct.Struct('<4s4H2IH')
_LOCATOR = struct.Struct('<4sIQI')
_END64 = struct.Struct('<4sQ2H2I4Q')
_STORED, _ENCRYPTED = 0, 1
_ZIP64 = 1
_SATURATED = 0xFFFFFFFF


class BadZip(ValueError):
    """The zip file is truncated, damaged, or not laid out like those of ``torch.save``."""


class Part(NamedTuple):
    """An entry of the directory.

    Attributes:
        header: Offset of its local header.
        end: Offset of the next part or the directory.
        plain: Neither compressed nor encrypted.
    """

    header: int
    nbytes: int
    end: int
    crc: int
    plain: bool


def first_folder(data: FileBytes) -> str | None:
    """The top folder, from the first part; None if the file is not a zip file."""
    if data[:4] != b'PK\x03\x04':
        return None
    name_nbytes = int.from_bytes(data[26:28], 'little')
    return data[_LOCAL.size : _LOCAL.size + name_nbytes].partition(b'/')[0].decode(errors='replace')


def read_directory(data: FileBytes) -> tuple[str, dict[str, Part]]:
    """The name of the top folder, and the parts by their names in it.

    Raises:
        BadZip: There are too many parts, parts overlap or have equal names, or the directory is incomplete.
    """
    n_parts, start, end = _bounds(data)
    if n_parts > _MOST_PARTS or end - start > _MOST_NBYTES:
        raise BadZip(
            f'has {n_parts} parts and a directory of {end - start} bytes; expected at most {_MOST_PARTS} parts'
        )
    found: dict[str, Part] = {}
    places: list[tuple[int, int, str]] = []
    folder = None
    listing, position = data[start:end], 0
    for _ in range(n_parts):
        name, part, name_nbytes, position = _entry(listing, position)
        inside, slash, name = name.partition('/')
        if not slash or folder not in (None, inside):
            raise BadZip('does not consist of one folder: not a checkpoint')
        if name in found:
            raise BadZip('has two parts of the same name')
        folder = inside
        found[name] = part
        places.append((part.header, part.header + _LOCAL.size + name_nbytes + part.nbytes, name))
    if position != len(listing):
        raise BadZip('has more parts than its directory counts')
    places.sort()
    for (_, last, name), (following, _, _) in zip(places, [*places[1:], (start, 0, '')], strict=True):
        if last > following:
            raise BadZip(f'has parts that overlap each other or the directory ({name[:80]!a})')
        found[name] = found[name]._replace(end=following)
    return folder or '', found


def content_start(data: FileBytes, part: Part, name: str) -> int:
    """The offset of a part's content, after its local header and the padding.

    Args:
        name: Name including the folder.

    Raises:
        BadZip: The part is missing or compressed.
    """
    if not part.plain:
        raise BadZip(f'{name[:80]!a} is compressed, which torch.save never does')
    fields = _unpack(_LOCAL, data, part.header, b'PK\x03\x04')
    name_nbytes, extra_nbytes = fields[-2:]
    name_start = part.header + _LOCAL.size
    if data[name_start : name_start + name_nbytes] != name.encode():
        raise BadZip(f'the directory and the part {name[:80]!a} disagree on the name')
    start = name_start + name_nbytes + extra_nbytes
    if start + part.nbytes > part.end:
        raise BadZip(f'{name[:80]!a} ends at byte {start + part.nbytes}, expected at most {part.end}')
    return start


def _bounds(data: FileBytes) -> tuple[int, int, int]:
    """Number of parts, start and end of the directory."""
    at = len(data) - _END.size
    _, disk, start_disk, n_here, n_parts, nbytes, start, comment = _unpack(_END, data, at, b'PK\x05\x06')
    end = at
    if at >= _LOCATOR.size and data[at - _LOCATOR.size : at - _LOCATOR.size + 4] == b'PK\x06\x07':
        _, _, end, _ = _LOCATOR.unpack(data[at - _LOCATOR.size : at])
        *_, disk, start_disk, n_here, n_parts, nbytes, start = _unpack(_END64, data, end, b'PK\x06\x06')
        if end + _END64.size != at - _LOCATOR.size:
            raise BadZip('has data after its directory')
    if disk or start_disk or comment or n_here != n_parts or start + nbytes != end:
        raise BadZip('its directory is not where its end record says')
    return n_parts, start, end


def _entry(data: bytes, position: int) -> tuple[str, Part, int, int]:
    """Name, part, length of the name, and offset of the next entry."""
    if position + _CENTRAL.size > len(data):
        raise BadZip('has fewer parts than it counts')
    _, _, _, flags, method, _, _, crc, packed, nbytes, name_nbytes, extra_nbytes, comment_nbytes, _, _, _, header = (
        _unpack(_CENTRAL, data, position, b'PK\x01\x02')
    )
    after_name = position + _CENTRAL.size + name_nbytes
    after = after_name + extra_nbytes + comment_nbytes
    if after > len(data):
        raise BadZip('has fewer parts than it counts')
    try:
        name = data[position + _CENTRAL.size : after_name].decode()
    except UnicodeDecodeError as error:
        raise BadZip('has a part whose name is not UTF-8') from error
    if _SATURATED in (nbytes, packed, header):
        extra = data[after_name : after_name + extra_nbytes]
        nbytes, packed, header = _wide(extra, nbytes, packed, header)
    plain = method == _STORED and not flags & _ENCRYPTED and packed == nbytes
    # Compressed parts are refused later
    return name, Part(header, packed, 0, crc, plain), name_nbytes, after


def _wide(extra: bytes, *numbers: int) -> list[int]:
    """Replace saturated 32-bit numbers with those in the zip64 extra field."""
    position = 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack_from('<2H', extra, position)
        position += 4
        if kind == _ZIP64:
            field = extra[position : position + nbytes]
            wide = iter(struct.unpack(f'<{len(field) // 8}Q', field[: len(field) // 8 * 8]))
            return [next(wide, number) if number == _SATURATED else number for number in numbers]
        position += nbytes
    return list(numbers)


def _unpack(layout: struct.Struct, data: FileBytes | bytes, position: int, signature: bytes) -> tuple:
    if not 0 <= position <= len(data) - layout.size:
        raise BadZip('is truncated or damaged')
    found = data[position : position + layout.size]
    if found[:4] != signature:
        raise BadZip('is truncated or damaged')
    return layout.unpack(found)
