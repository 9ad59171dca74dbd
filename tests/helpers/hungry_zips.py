"""Zip files whose directories would take gigabytes or contain false statements."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from tests.helpers.torch_zip import pickled

_PKL = pickled({'w': 1})


def local(name: bytes, data: bytes, extra: bytes = b'') -> bytes:
    return (
        struct.pack('<4s5H3I2H', b'PK\x03\x04', 0, 0, 0, 0, 0, 0, len(data), len(data), len(name), len(extra))
        + name
        + (extra + data)
    )


def central(name: bytes, header: int, nbytes: int, extra: bytes = b'', crc: int = 0) -> bytes:
    return struct.pack(
        '<4s6H3I5H2I', b'PK\x01\x02', 0, 0, 0, 0, 0, 0, crc, nbytes, nbytes, len(name), len(extra), 0, 0, 0, 0, header
    ) + name + extra  # fmt: skip


def ending(n: int, nbytes: int, start: int, comment: bytes = b'') -> bytes:
    few = min(n, 0xFFFF)
    return struct.pack('<4s4H2IH', b'PK\x05\x06', 0, 0, few, few, nbytes, start, len(comment)) + comment


def ending64(n: int, nbytes: int, start: int) -> bytes:
    end = struct.pack('<4sQ2H2I4Q', b'PK\x06\x06', 44, 45, 45, 0, 0, n, n, nbytes, start)
    return end + struct.pack('<4sIQI', b'PK\x06\x07', 0, start + nbytes, 1) + ending(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)


def entries(n: int, *, counted: int | None = None) -> Callable[[Path], None]:
    """A pickle and ``n`` empty parts with different names."""

    def write(path: Path) -> None:
        first = local(b'a/data.pkl', _PKL)
        with path.open('wb') as file:
            file.write(first)
            file.write(central(b'a/data.pkl', 0, len(_PKL)))
            head, tail = central(b'a/data/0000000', 0, 0)[:46], b'a/data/%07d'
            for start in range(0, n, 100_000):
                file.write(b''.join(head + tail % i for i in range(start, min(start + 100_000, n))))
            nbytes = file.tell() - len(first)
            file.write(ending64(n + 1 if counted is None else counted, nbytes, len(first)))

    return write


def made(*parts: tuple[bytes, bytes], end: Callable[[int, bytes, int], bytes] | None = None, header: int | None = None):
    """A zip file with these parts.

    Args:
        end: Makes all that follows the parts, from their number, the directory and its offset.
        header: The offset that all parts but the first claim.
    """

    def write(path: Path) -> None:
        body, directory = b'', b''
        for name, data in parts:
            directory += central(name, header if body and header is not None else len(body), len(data))
            body += local(name, data)
        finish = end or (lambda n, directory, start: directory + ending(n, len(directory), start))
        path.write_bytes(body + finish(len(parts), directory, len(body)))

    return write


_PICKLE = (b'a/data.pkl', _PKL)
_PARTS = (_PICKLE, (b'a/data/0', b'x' * 64), (b'a/data/1', b'y' * 64))
_DAMAGED = 'not a valid zip file of torch.save: '
#: Name to a function that writes the file, and part of the message.
HUNGRY_ZIPS: dict[str, tuple[Callable[[Path], None], str]] = {
    '3 million parts': (entries(3_000_000), '3000001 parts'),
    '8 million parts': (entries(8_000_000), '8000001 parts'),
    '3 million parts, one counted': (entries(3_000_000, counted=1), 'more parts than its directory counts'),
    '2**63 parts counted': (entries(10, counted=2**63), f'{2**63} parts'),
    'fewer parts than counted': (entries(10, counted=999_999), 'fewer parts'),
}
ODD_ZIPS: dict[str, tuple[Callable[[Path], None], str]] = {
    'one name twice': (made(*_PARTS, _PARTS[1]), 'two parts of the same name'),
    'parts that overlap': (made(*_PARTS, header=60), 'overlap'),
    'a part within the list of parts': (made(_PICKLE, (b'a/data/0', b''), header=130), 'overlap'),
    'a part behind the end': (made(*_PARTS, header=2**31), 'overlap'),
    'a part that is the pickle': (made(_PICKLE, _PARTS[1], header=0), 'overlap'),
    'outside of the folder': (made(_PICKLE, (b'b/data/0', b'')), 'one folder'),
    'a path upwards': (made(_PICKLE, (b'../data/0', b'')), 'one folder'),
    'a comment': (made(*_PARTS, end=lambda n, d, s: d + ending(n, len(d), s, b'x' * 65535)), _DAMAGED),
    'an end in the comment': (
        made(*_PARTS, end=lambda n, d, s: d + ending(n, len(d), s, ending(0, 0, 0))), 'not where its end record says'),
    'something behind the list': (made(*_PARTS, end=lambda n, d, s: d + b'xx' + ending(n, len(d), s)), 'not where'),
    'a list that starts too early': (made(*_PARTS, end=lambda n, d, s: d + ending(n, len(d) + 5, s - 5)), _DAMAGED),
    'a list behind the end': (made(*_PARTS, end=lambda n, d, s: d + ending(n, len(d), 2**31)), 'not where'),
    'two disks': (
        made(*_PARTS, end=lambda n, d, s: d + ending(n, len(d), s).replace(b'\x06\0', b'\x06\1', 1)), 'not where'),
    'no end of a wide list': (
        made(*_PARTS, end=lambda n, d, s: d + ending64(n, len(d), s)[56:]), 'truncated'),
    'a wide list in itself': (
        made(*_PARTS, end=lambda n, d, s: d + ending64(n, len(d), s).replace(struct.pack('<Q', s + len(d)), bytes(8))),
        'truncated'),
    'a name that is no text': (made(_PICKLE, (b'a/\xff', b'')), 'not UTF-8'),
    'an end alone': (made(end=lambda n, d, s: local(b'a/data.pkl', _PKL) + ending(0, 0, 0)), _DAMAGED),
}  # fmt: skip
