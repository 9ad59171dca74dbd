"""Checks a model folder in a store: small files are downloaded, weights are read by ranges.

The functions that check a folder get a temporary local one. Its weight files have the right sizes but only their
headers as content; the bytes of tensors come from the store, through :meth:`StoredFolder.open_reader`.
"""

from __future__ import annotations

import struct
import tempfile
from dataclasses import replace
from pathlib import Path

from xhf_hooks.errors import CheckpointError, StoreError
from xhf_hooks.files.holes import Range
from xhf_hooks.format import strict_json
from xhf_hooks.integrity.findings import FolderReport
from xhf_hooks.integrity.folder_scan import WEIGHTS_SUFFIX
from xhf_hooks.integrity.manifest import MANIFEST_NAME
from xhf_hooks.stores import Store, open_store
from xhf_hooks.stores.publication import read_pointer
from xhf_hooks.verify.model_reader import SafetensorsReader

_LENGTH_NBYTES = 8
#: Larger files than this are not downloaded: none of those that are read as a whole is so large.
_LARGE_NBYTES = 200 * 10**6
_MOST_FILES = 100_000


class StoredFolder:
    """A model folder in a store, open until :meth:`close`.

    Args:
        url: URL of the folder. If there is a pointer instead, its newest save is opened.
        name: Name of the saves that the pointer lists.

    Attributes:
        url: URL of the opened folder.
        path: The temporary folder that stands for it.

    Raises:
        StoreError: The store cannot be read.
        CheckpointError: There is no model folder.
    """

    def __init__(self, url: str, name: str = 'hf_model') -> None:
        self._store, self._prefix = _find(open_store(url, option='the address'), name)
        self.url = f'{self._store.url}/{self._prefix}'.rstrip('/')
        self._temporary = tempfile.TemporaryDirectory(prefix='xhf-stored-')
        self.path = Path(self._temporary.name)
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def open_reader(self, path: Path, nbytes: int, *, from_disk: bool = False) -> StoredFileReader:
        """An :data:`.OpenReader` for paths in :attr:`path`."""
        return StoredFileReader(self._store, self._prefix + path.relative_to(self.path).as_posix(), nbytes)

    def told(self, text: str) -> str:
        """Reword a message about the temporary folder to name the URL."""
        return text.replace(str(self.path), self.url)

    def told_report(self, report: FolderReport) -> FolderReport:
        """Reword a report in the same way."""
        findings = tuple(replace(finding, text=self.told(finding.text)) for finding in report.findings)
        return replace(report, path=self.url, findings=findings)

    def close(self) -> None:
        """Remove the temporary folder."""
        self._temporary.cleanup()

    def _fill(self) -> None:
        objects = self._store.list(self._prefix)
        if len(objects) > _MOST_FILES:
            raise CheckpointError(f'{self.url}: more than {_MOST_FILES} files; give a model folder')
        for key, info in objects.items():
            name = key.removeprefix(self._prefix)
            if name.startswith('.') or '..' in name.split('/'):
                continue
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open('wb') as file:
                if name.endswith(WEIGHTS_SUFFIX):
                    file.write(self._header(key, info.nbytes))
                elif info.nbytes <= _LARGE_NBYTES:
                    file.write(_read(self._store, key, 0, info.nbytes))
                file.truncate(info.nbytes)

    def _header(self, key: str, nbytes: int) -> bytes:
        """The safetensors header with its length; only the length if that is impossible."""
        start = _read(self._store, key, 0, min(_LENGTH_NBYTES, nbytes))
        if len(start) < _LENGTH_NBYTES:
            return start
        (length,) = struct.unpack('<Q', start)
        if length > min(nbytes - _LENGTH_NBYTES, strict_json.MOST_NBYTES):
            return start
        return _read(self._store, key, 0, _LENGTH_NBYTES + length)


class StoredFileReader:
    """A :class:`.Reader` of ranges of an object in the store."""

    def __init__(self, store: Store, key: str, nbytes: int) -> None:
        self._store, self._key, self._nbytes = store, key, nbytes
        self.holes: list[Range] = []

    def view(self, start: int, end: int, buffer: memoryview) -> memoryview:
        """The bytes from ``start`` to ``end``.

        Raises:
            StoreError: They cannot be read.
        """
        return memoryview(bytearray(_read(self._store, self._key, start, end)))

    def forget(self, start: int, end: int) -> None:
        """Do nothing: no bytes are kept."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class StoredReader(SafetensorsReader):
    """A :class:`.ModelReader` for a folder in a store."""

    def __init__(self, url: str) -> None:
        self._stored = StoredFolder(url)
        try:
            super().__init__(self._stored.path, self._stored.open_reader)
        except BaseException:
            self._stored.close()
            raise
        self.label = self._stored.told(self.label)

    def close(self) -> None:
        super().close()
        self._stored.close()


def _read(store: Store, key: str, start: int, end: int) -> bytes:
    data = store.get(key, start, end) if end > start else b''
    if data is None or len(data) != end - start:
        found = 'nothing' if data is None else f'{len(data)} bytes'
        raise StoreError(f'{store.url}/{key}: expected bytes {start} to {end}, found {found}')
    return data


def _find(store: Store, name: str) -> tuple[Store, str]:
    """The store and the folder's prefix in it; '' for the whole store."""
    try:
        pointer = None if store.info(MANIFEST_NAME) is not None else read_pointer(store, name)
    except StoreError as error:
        raise CheckpointError(str(error)) from None
    if pointer is not None:
        return store, f'{pointer.newest}/'
    if not any(key.endswith(WEIGHTS_SUFFIX) or key == MANIFEST_NAME for key in store.list()):
        raise CheckpointError(f'{store.url}: no folder with *.safetensors, and no {name}.json that names a save')
    return store, ''
