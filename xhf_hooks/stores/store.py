"""Objects under one URL: put, get, list, delete, and objects that are written in parts."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from xhf_hooks.errors import StoreError
from xhf_hooks.stores.secrets import without_secrets
from xhf_hooks.stores.senders import Senders
from xhf_hooks.stores.stored_object import PARTS_IN_MEMORY, SequentialParts, StoredObject

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

#: Smallest part; S3 accepts only a smaller last one.
LEAST_PART_NBYTES = 5 * 2**20
PART_NBYTES = 16 * 2**20
#: Prefix of the names of small test objects.
PROBE = '.xhf_probe-'
#: Protocols with which a file is visible while it is being written: small objects are written beside and renamed.
_WITH_FILES = {'file', 'local', 'hdfs', 'arrow_hdfs', 'webhdfs', 'sftp', 'ssh', 'smb'}


@dataclass(frozen=True)
class ObjectInfo:
    """What a store reports about an object.

    Attributes:
        checksum: The store's own checksum, of whatever kind (S3: the ETag); None if it has none.
        changed: Time of the last write, by the store's clock; None if unknown.
    """

    nbytes: int
    checksum: str | None = None
    changed: datetime | None = None

    @property
    def has_parts(self) -> bool:
        """Whether the checksum is S3's for multipart objects, which depends on the sizes of the parts."""
        return self.checksum is not None and '-' in self.checksum


class Store:
    """Objects under one URL, by keys relative to it, with slashes. May be used by several threads.

    Args:
        url: The URL without secrets, for messages.
        options: Arguments of the file system; their secret values are removed from messages.
        root: The path of the URL in the file system.
        option: The user's option with the URL, for messages.
    """

    #: Smallest size of a part that is not the last.
    least_part_nbytes = 1
    most_parts = 2**31

    def __init__(
        self, file_system: AbstractFileSystem, root: str, url: str, options: Mapping[str, Any], option: str
    ) -> None:
        self.url, self.option = url, option
        self._fs, self._root, self._options = file_system, root.rstrip('/'), options
        protocols = file_system.protocol
        self._has_files = bool(_WITH_FILES & {*([protocols] if isinstance(protocols, str) else protocols)})

    def create(
        self,
        key: str,
        nbytes: int,
        part_nbytes: int = PART_NBYTES,
        *,
        senders: Senders | None = None,
        room: threading.Semaphore | None = None,
    ) -> StoredObject:
        """Begin an object that is written in order, part by part.

        Args:
            nbytes: Size of the whole object, or an upper bound.
            part_nbytes: Requested size of a part; :meth:`part_nbytes` returns the actual one.
            senders: Threads that send; None starts some now.
            room: For parts in memory; see :class:`.StoredObject`.
        """
        part_nbytes = self.part_nbytes(nbytes, part_nbytes)
        told = partial(self.told, key, 'write')
        most_at_once = PARTS_IN_MEMORY if senders is None else senders.count
        at_once = most_at_once if self._sends_in_any_order else 1
        return StoredObject(self._parts(key, part_nbytes), told, part_nbytes, at_once, senders, room)

    def part_nbytes(self, nbytes: int, part_nbytes: int = PART_NBYTES) -> int:
        """Size of an object's parts: larger than requested if the store limits their number or requires larger ones."""
        return max(part_nbytes, self.least_part_nbytes, -(-nbytes // self.most_parts))

    def checksums(self, parts: Iterable[bytes | bytearray]) -> set[str]:
        """Checksums that the store may report for an object sent in these parts; empty if unknown."""
        return set()

    def put(self, key: str, data: bytes) -> None:
        """Write a small object atomically: readers see the old or the new one."""
        with self.told(key, 'write'):
            if not self._has_files:
                self._put(key, data)
                return
            path = self.path(key)
            beside = f'{path}.{uuid.uuid4().hex[:12]}'
            self._fs.makedirs(self._fs._parent(path), exist_ok=True)
            try:
                self._fs.pipe_file(beside, data)
                self._fs.mv(beside, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(beside)
                raise

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes | None:
        """Bytes of an object; None if there is no such object."""
        with self.told(key, 'read'):
            try:
                return self._fs.cat_file(self.path(key), start=start, end=end)
            except FileNotFoundError:
                return None

    def info(self, key: str) -> ObjectInfo | None:
        """What the store currently reports about an object; None if there is no such object."""
        with self.told(key, 'read'):
            self._fs.invalidate_cache()
            try:
                found = self._fs.info(self.path(key))
            except FileNotFoundError:
                return None
        return _info(found) if found['type'] == 'file' else None

    def list(self, prefix: str = '') -> dict[str, ObjectInfo]:
        """Objects by key: all, or those whose keys begin with a folder name and a slash."""
        place = self.path(prefix.rstrip('/')) if prefix else self._root
        with self.told(prefix, 'list'):
            self._fs.invalidate_cache()
            found = self._fs.find(place, detail=True)
        keys = {self._key(path): entry for path, entry in found.items()}
        return {key: _info(entry) for key, entry in sorted(keys.items()) if key and entry['type'] == 'file'}

    def delete(self, keys: Collection[str]) -> None:
        """Remove those of the objects that exist."""
        for key in keys:
            with self.told(key, 'delete'), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self.path(key))

    def unfinished_uploads(self, prefix: str = '') -> dict[str, str]:
        """Upload id to key of objects that were begun and neither committed nor discarded; empty for most stores."""
        return {}

    def abort(self, upload: str, key: str) -> None:
        """Discard an unfinished upload with its parts."""

    def require_usable(self) -> None:
        """Write, read, list and remove a small object.

        Raises:
            StoreError: One of these did not work.
        """
        key, data = f'{PROBE}{uuid.uuid4().hex[:12]}', b'written to see whether that works; may be deleted'
        self.put(key, data)
        if self.get(key) != data or self.info(key) is None:
            raise StoreError(f'{self.url}: what was written cannot be read back; set {self.option} to another place')
        self.list(PROBE)
        self.delete([key])

    def path(self, key: str) -> str:
        """The path of an object in the file system."""
        return f'{self._root}/{key}'

    @contextmanager
    def told(self, key: str, what: str) -> Iterator[None]:
        """Turn whatever a library raises into a StoreError that says where, without secrets."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            said = without_secrets(f'{type(error).__name__}: {error}', self._options)
            where = f'{self.url}/{key}' if key else self.url
            raise StoreError(
                f'{where}: cannot {what}: {said}. Check {self.option}, backend_args, and the credentials where the '
                f"store's library looks for them"
            ) from None

    #: Whether parts of an object may be sent at the same time.
    _sends_in_any_order = False

    def _parts(self, key: str, part_nbytes: int) -> Any:
        return SequentialParts(self._fs, self.path(key), part_nbytes, makes_folders=self._has_files)

    def _put(self, key: str, data: bytes | bytearray) -> str | None:
        self._fs.pipe_file(self.path(key), data)
        return None

    def _key(self, path: str) -> str:
        return path[len(self._root) :].lstrip('/')


def _info(found: Mapping[str, Any]) -> ObjectInfo:
    checksum = found.get('ETag') or found.get('etag') or found.get('md5Hash')
    names = ('LastModified', 'last_modified', 'mtime', 'updated', 'created')  # S3 and OSS, Azure, files, GCS, any other
    changed = next((found[name] for name in names if found.get(name)), None)
    if isinstance(changed, (int, float)):
        changed = datetime.fromtimestamp(changed, timezone.utc)
    elif not isinstance(changed, datetime):
        changed = None
    checksum = checksum.strip('"') if isinstance(checksum, str) else None
    return ObjectInfo(int(found['size']), checksum or None, changed)
