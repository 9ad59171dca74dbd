"""Uploads a file of a kept folder to a store, unless it is there already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xhf_hooks.errors import DamagedError, StoreError
from xhf_hooks.files.regular_files import open_regular_fd
from xhf_hooks.format.checksum import crc32, to_hex
from xhf_hooks.integrity.manifest import FileRecord
from xhf_hooks.stores import Store
from xhf_hooks.stores.stored_object import StoredObject
from xhf_hooks.uploads.job import Means

_READ_NBYTES = 1 << 20
#: Number of parts in memory: one is being filled, the others are being sent.
PARTS_IN_MEMORY = 4


class Unwanted(Exception):
    """The upload of this save was cancelled while it was in progress."""


@dataclass(frozen=True)
class FileUpload:
    """A file and its destination. Used by: the upload thread.

    Attributes:
        record: The file's entry in the manifest; a file that does not match is not uploaded.
    """

    store: Store
    key: str
    path: Path
    record: FileRecord

    def is_there(self) -> bool:
        """Whether the store has the file: sent by another rank, or before an answer was lost."""
        found = self.store.info(self.key)
        if found is None or found.nbytes != self.record.nbytes or found.checksum is None:
            return False
        return found.checksum in self.store.checksums(_read(self.path, self.store.part_nbytes(found.nbytes)))

    def send(self, means: Means) -> StoredObject:
        """Hand the whole file to the threads that send; :meth:`require_stored` waits for them.

        Raises:
            StoreError: It was not stored.
            DamagedError: The file does not match the manifest.
            Unwanted: The upload was cancelled.
        """
        record, crc = self.record, 0
        made = self.store.create(self.key, record.nbytes, senders=means.senders, room=means.room)
        try:
            for data in _read(self.path, _READ_NBYTES):
                if not means.is_wanted():
                    raise Unwanted
                crc = crc32(data, crc)
                made.write(data)
            if made.nbytes != record.nbytes or (record.crc32 is not None and crc != record.crc32):
                raise DamagedError(
                    f'{self.path}: changed since the save: expected {record.nbytes} bytes with CRC-32 '
                    f'{to_hex(record.crc32 or 0)}, found {made.nbytes} with {to_hex(crc)}; it is not uploaded'
                )
            if not means.is_wanted():
                raise Unwanted
            made.end()
        except BaseException:
            made.discard()
            raise
        return made

    def require_stored(self, made: StoredObject) -> int:
        """Wait, then check what the store has; returns bytes sent.

        Raises:
            StoreError: It was not stored.
        """
        made.commit()
        found = self.store.info(self.key)
        if found is None or found.nbytes != made.nbytes or _differ(found.checksum, made.checksum):
            self.store.delete([self.key])
            raise StoreError(
                f'{self.store.url}/{self.key}: expected {made.nbytes} bytes with {made.checksum}, found {found}'
            )
        return made.nbytes


def _differ(found: str | None, sent: str | None) -> bool:
    """Whether two ETags show different bytes. Those of multipart objects and of others cannot be compared."""
    return None not in (found, sent) and ('-' in found) == ('-' in sent) and found != sent


def _read(path: Path, nbytes: int) -> Iterator[bytearray]:
    with open(open_regular_fd(path), 'rb', buffering=0) as file:
        while True:
            data = bytearray(nbytes)
            view, found = memoryview(data), 0
            while found < nbytes and (some := file.readinto(view[found:])):
                found += some
            if not found:
                return
            view.release()
            del data[found:]
            yield data
