"""Uploads a file of a kept folder to a store, unless it is there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from xhf_hooks.errors import DamagedError, StoreError
from xhf_hooks.files.regular_files import open_regular_fd
from xhf_hooks.format.checksum import crc32, to_hex
from xhf_hooks.integrity.manifest import FileRecord
from xhf_hooks.stores import ObjectInfo, Store
from xhf_hooks.stores.senders import Senders
from xhf_hooks.uploads.bandwidth import Bandwidth

_READ_NBYTES = 1 << 20
#: Number of parts in memory: one is being filled, the others are being sent.
PARTS_IN_MEMORY = 4


class Unwanted(Exception):
    """The upload of this save was cancelled while it was in progress."""


def upload_file(
    store: Store,
    key: str,
    path: Path,
    record: FileRecord,
    senders: Senders,
    bandwidth: Bandwidth,
    is_wanted: Callable[[], bool],
) -> int:
    """Send a file and check what the store then has. Runs on: the upload thread.

    Args:
        record: Size and checksum in the manifest. A file that differs is not sent.

    Returns:
        Bytes sent; 0 if the store already has the file.

    Raises:
        StoreError: It was not stored.
        DamagedError: The file differs from what was saved.
        Unwanted: The upload was cancelled.
    """
    part_nbytes = store.part_nbytes(record.nbytes)
    if _is_there(store, store.info(key), path, record, part_nbytes):
        return 0
    made = store.create(key, record.nbytes, senders=senders, n_parts=PARTS_IN_MEMORY)
    crc = 0
    try:
        for data in _read(path, _READ_NBYTES):
            bandwidth.take(len(data), is_wanted)
            if not is_wanted():
                raise Unwanted
            crc = crc32(data, crc)
            made.write(data)
        if made.nbytes != record.nbytes or (record.crc32 is not None and crc != record.crc32):
            raise DamagedError(
                f'{path}: not what was saved: expected {record.nbytes} bytes of CRC-32 {to_hex(record.crc32 or 0)}, '
                f'found {made.nbytes} of {to_hex(crc)}; it is not uploaded'
            )
        if not is_wanted():
            raise Unwanted
    except BaseException:
        made.discard()
        raise
    made.commit()
    found = store.info(key)
    checksums = None if found is None or made.checksum is None else (found.checksum, made.checksum)
    is_other = checksums is not None and ('-' in checksums[0]) == ('-' in checksums[1]) and len({*checksums}) > 1
    if found is None or found.nbytes != record.nbytes or is_other:
        store.delete([key])
        raise StoreError(f'{store.url}/{key}: expected {record.nbytes} bytes with {made.checksum}, found {found}')
    return record.nbytes


def _is_there(store: Store, found: ObjectInfo | None, path: Path, record: FileRecord, part_nbytes: int) -> bool:
    """Whether the file is in the store: sent by another rank, or before an answer was lost."""
    if found is None or found.nbytes != record.nbytes or found.checksum is None:
        return False
    return found.checksum in store.checksums(_read(path, part_nbytes))


def _read(path: Path, nbytes: int) -> Iterator[bytes]:
    with open(open_regular_fd(path), 'rb', buffering=0) as file:
        while True:
            data = bytearray()
            while len(data) < nbytes and (some := file.read(nbytes - len(data))):
                data += some
            if not data:
                return
            yield bytes(data)
