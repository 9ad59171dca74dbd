"""Mutations of zip file fields: entries, offsets, sizes, checksums, flags, counts. Each has a number."""

from __future__ import annotations

import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from io import BytesIO

_LOCAL = struct.Struct('<4s5H3I2H')
_CENTRAL = struct.Struct('<4s6H3I5H2I')
_END = struct.Struct('<4s4H2IH')
_END64 = struct.Struct('<4sQ2H2I4Q')
_LOCATOR = struct.Struct('<4sIQI')
_ALIGNMENT = 64


@dataclass
class Entry:
    """One part of a zip file, and what its two headers claim; None: the true value."""

    name: bytes
    data: bytes
    local_name: bytes | None = None
    method: int = 0
    flags: int = 0
    crc: int | None = None
    stored: int | None = None
    size: int | None = None
    local_size: int | None = None
    offset: int | None = None
    extra: bytes = b''
    comment: bytes = b''
    local_padding: int | None = None


@dataclass
class Archive:
    """The contents of a zip file."""

    entries: list[Entry]
    n_entries: int | None = None
    directory_offset: int | None = None
    directory_nbytes: int | None = None
    comment: bytes = b''
    before: bytes = b''
    zip64: bool = False
    listed: list[int] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """The file as bytes; header values are clamped to their fields."""
        parts, position, offsets = [self.before], len(self.before), []
        for entry in self.entries:
            offsets.append(position)
            local = self._local(entry, position)
            parts += [local, entry.data]
            position += len(local) + len(entry.data)
        order = self.listed or range(len(self.entries))
        directory = b''.join(self._central(self.entries[i], offsets[i]) for i in order)
        return b''.join([*parts, directory, self._end(position, len(directory), len(order))])

    @staticmethod
    def _local(entry: Entry, position: int) -> bytes:
        name = entry.local_name if entry.local_name is not None else entry.name
        padding = entry.local_padding
        if padding is None:
            padding = -(position + _LOCAL.size + len(name)) % _ALIGNMENT
        crc = zlib.crc32(entry.data) if entry.crc is None else entry.crc
        size = len(entry.data) if entry.local_size is None else entry.local_size
        fields = (b'PK\x03\x04', 20, entry.flags, entry.method, 0, 33, crc, _u32(size), _u32(size))
        return _LOCAL.pack(*fields, _u16(len(name)), _u16(padding)) + name[:65535] + bytes(_u16(padding))

    @staticmethod
    def _central(entry: Entry, offset: int) -> bytes:
        crc = zlib.crc32(entry.data) if entry.crc is None else entry.crc
        stored = len(entry.data) if entry.stored is None else entry.stored
        size = len(entry.data) if entry.size is None else entry.size
        offset = offset if entry.offset is None else entry.offset
        name, extra, comment = entry.name[:65535], entry.extra[:65535], entry.comment[:65535]
        sizes = (_u32(stored), _u32(size), len(name), len(extra), len(comment), 0, 0, 0, _u32(offset))
        head = (b'PK\x01\x02', 20, 20, entry.flags, entry.method, 0, 33, crc)
        return _CENTRAL.pack(*head, *sizes) + name + extra + comment

    def _end(self, offset: int, nbytes: int, count: int) -> bytes:
        count = count if self.n_entries is None else self.n_entries
        where = offset if self.directory_offset is None else self.directory_offset
        length = nbytes if self.directory_nbytes is None else self.directory_nbytes
        end = b''
        if self.zip64 or count > 65535:
            fields = (44, 45, 45, 0, 0, count % 2**64, count % 2**64, length % 2**64, where % 2**64)
            end = _END64.pack(b'PK\x06\x06', *fields) + _LOCATOR.pack(b'PK\x06\x07', 0, offset + nbytes, 1)
        counts = (_u16(count), _u16(count), _u32(length), _u32(where), len(self.comment[:65535]))
        return end + _END.pack(b'PK\x05\x06', 0, 0, *counts) + self.comment[:65535]


def read_archive(data: bytes) -> Archive:
    """The parts of a zip file of ``torch.save``."""
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return Archive([Entry(info.filename.encode(), archive.read(info)) for info in archive.infolist()])


def with_pickle(data: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    """The zip file with an edited ``data.pkl``; otherwise valid."""
    archive = read_archive(data)
    for entry in archive.entries:
        if entry.name.endswith(b'/data.pkl'):
            entry.data = edit(entry.data)
    return archive.to_bytes()


def mutated_zip(data: bytes, number: int) -> bytes:
    """One to three edits of what the file states about its parts."""
    rng = random.Random(number)
    archive = read_archive(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if archive.entries:
            rng.choice(_EDITS)(archive, rng)
    return archive.to_bytes()


# --- edits, in place ---


def _twice(archive: Archive, rng: random.Random) -> None:
    """Repeat an entry, in the file or only in the directory, with its own or another name."""
    at = rng.randrange(len(archive.entries))
    other = rng.choice(archive.entries)
    copy = replace(archive.entries[at])
    kind = rng.randrange(4)
    if kind == 0:
        archive.listed = [*range(len(archive.entries)), at]
        return
    if kind == 1:
        copy.data = other.data
    elif kind == 2:
        copy.name = other.name
    archive.entries.insert(rng.randrange(len(archive.entries) + 1), copy)


def _rename(archive: Archive, rng: random.Random) -> None:
    """Rename a part in the directory, in its local header, or both; or rename the folder of all parts."""
    entry, other = rng.choice(archive.entries), rng.choice(archive.entries)
    folder, _, rest = entry.name.partition(b'/')
    names = [
        other.name, rest, b'x/' + rest, folder + b'/data/../' + rest, b'/' + entry.name, entry.name + b'/', b'',
        b'../' * 9 + b'etc/passwd', folder + b'/\x1b[2J\n', folder + b'/' + b'\n' * 3000, entry.name + b'\0x',
        b'x' * 65535, b'\xff\xfe', folder + b'/data/01', folder + b'/.format_version', folder + b'/constants.pkl',
        folder + b'/byteorder', folder + b'/data/9' + b'9' * 4000, entry.name.upper(),
    ]  # fmt: skip
    kind, name = rng.randrange(4), rng.choice(names)
    if kind == 0:
        entry.local_name = name
    elif kind == 1:
        entry.local_name, entry.name = entry.name, name
    elif kind == 2:
        entry.name = name
    else:
        new = rng.choice([b'archive', b'zero_pp_rank_0_mp_rank_00_optim_states', b'', b'a/b', b'x' * 300, b'\x1b[2J'])
        for each in archive.entries:
            each.name = new + b'/' + each.name.partition(b'/')[2]


def _reorder(archive: Archive, rng: random.Random) -> None:
    """Reorder the parts or only the directory, or swap the contents of two parts."""
    kind = rng.randrange(3)
    if kind == 0:
        rng.shuffle(archive.entries)
    elif kind == 1:
        archive.listed = rng.sample(range(len(archive.entries)), len(archive.entries))
    else:
        one, other = rng.choice(archive.entries), rng.choice(archive.entries)
        one.data, other.data = other.data, one.data


def _offsets(archive: Archive, rng: random.Random) -> None:
    entry = rng.choice(archive.entries)
    entry.offset = rng.choice([0, 1, 2, 64, 65, 1000, 4000, 2**31, 2**32 - 1])
    if rng.random() < 0.3:
        entry.offset, entry.local_padding = None, rng.choice([0, 1, 7, 63, 65, 4000, 65535])


def _sizes(archive: Archive, rng: random.Random) -> None:
    entry = rng.choice(archive.entries)
    size = rng.choice([0, 1, len(entry.data) - 1, len(entry.data) + 1, len(entry.data) * 2, 10**6, 2**31, 2**32 - 1])
    for name in rng.choice(
        [('size',), ('stored',), ('local_size',), ('size', 'stored'), ('size', 'stored', 'local_size')]
    ):
        setattr(entry, name, max(0, size))
    if rng.random() < 0.3:
        entry.data = entry.data[: max(0, size) % (len(entry.data) + 1)]


def _zip64(archive: Archive, rng: random.Random) -> None:
    """Use 64-bit sizes and offsets, complete or not."""
    entry = rng.choice(archive.entries)
    kind = rng.randrange(4)
    if kind == 0:
        archive.zip64 = True
        return
    numbers = [rng.choice([0, len(entry.data), 2**32, 2**40, 2**62, 2**63, 2**64 - 1]) for _ in range(3)]
    body = struct.pack('<3Q', *numbers)[: rng.choice([24, 24, 16, 8, 7, 0])]
    entry.extra = struct.pack('<HH', 1, rng.choice([len(body), len(body), 0, 24, 65535])) + body
    entry.size = entry.stored = 2**32 - 1
    if kind == 1:
        entry.offset = 2**32 - 1


def _fields(archive: Archive, rng: random.Random) -> None:
    """Change the checksum, compression, flags, extra field or comment of a part."""
    entry = rng.choice(archive.entries)
    kind = rng.randrange(5)
    if kind == 0:
        entry.crc = rng.choice([0, 1, 2**32 - 1, zlib.crc32(entry.data) ^ 1])
    elif kind == 1:
        entry.method = rng.choice([1, 8, 9, 12, 14, 93, 99, 65535])
        if entry.method == 8 and rng.random() < 0.7:
            entry.size, packed = len(entry.data), zlib.compressobj(9, zlib.DEFLATED, -15)
            entry.data = packed.compress(entry.data) + packed.flush()
            if rng.random() < 0.3:
                packed = zlib.compressobj(9, zlib.DEFLATED, -15)
                entry.data, entry.size = packed.compress(bytes(2 * 10**8)) + packed.flush(), 2 * 10**8
    elif kind == 2:
        entry.flags = rng.choice([1, 8, 9, 0x20, 0x40, 0x800, 0x2000, 65535])
    elif kind == 3:
        entry.extra = rng.choice([b'x', bytes(65535), b'\x01\0\xff\xff', b'FB\x04\0ZZZZ', rng.randbytes(40)])
    else:
        entry.comment = rng.choice([b'x' * 65535, b'PK\x05\x06' * 100, b'\x1b[2J'])


def _ends(archive: Archive, rng: random.Random) -> None:
    """Change what the end record says of the directory, or the bytes around it."""
    kind = rng.randrange(5)
    if kind == 0:
        archive.n_entries = rng.choice([0, 1, len(archive.entries) + 1, len(archive.entries) - 1, 65535, 2**33])
    elif kind == 1:
        archive.directory_offset = rng.choice([0, 1, 64, 4096, 2**31, 2**32 - 1])
    elif kind == 2:
        archive.directory_nbytes = rng.choice([0, 1, 46, 1000, 10**6, 2**31, 2**32 - 1])
    elif kind == 3:
        archive.comment = rng.choice(
            [b'x', b'x' * 65535, _END.pack(b'PK\x05\x06', 0, 0, 0, 0, 0, 0, 0), b'PK\x05\x06' * 9]
        )
    else:
        archive.before = rng.choice([b'#!/bin/sh\n', bytes(1), bytes(10**6), b'PK\x03\x04' * 100, b'\x80\x02'])


def _more(archive: Archive, rng: random.Random) -> None:
    """Add very many parts, small or empty; large numbers are rare."""
    count = int(10 ** min(6.3, 1 + rng.expovariate(0.7)))
    folder = archive.entries[0].name.partition(b'/')[0]
    same = rng.random() < 0.2
    data = rng.choice([b'', b'x'])
    for number in range(count):
        name = folder + b'/data/%d' % (1000 if same else 1000 + number)
        archive.entries.append(Entry(name, data, local_padding=0))


def _fewer(archive: Archive, rng: random.Random) -> None:
    archive.listed = []
    del archive.entries[rng.randrange(len(archive.entries))]


_EDITS: list[Callable[[Archive, random.Random], None]] = [
    _twice, _rename, _rename, _reorder, _offsets, _offsets, _sizes, _sizes, _zip64, _fields, _fields, _ends, _more,
    _fewer,
]  # fmt: skip


def _u16(value: int) -> int:
    return min(max(value, 0), 2**16 - 1)


def _u32(value: int) -> int:
    return min(max(value, 0), 2**32 - 1)
