"""Files of ``torch.save``: reads the pickle as data and locates the storages, without reading them.

Zip files (torch ``serialization.py``, ``_open_zipfile_writer``, ``_load``): one folder with ``data.pkl``, uncompressed
``data/<key>``, and ``byteorder``. Legacy files (``_legacy_load``): five pickles, then each storage as its number of
elements (8 bytes) and its bytes.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.sources.checkpoint.unpickler import Storage, UnsafePickle, load_pickle, make_storage

COPY_HINT = 'copy or download it again, or take another iteration'
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_ZIP_MAGIC = b'PK\x03\x04'
#: A part's local header (.ZIP File Format Specification 6.3, 4.3.7), up to the lengths of its name and extra field.
_LOCAL = struct.Struct('<4s22xHH')


def load_torch_file(path: Path, window: tuple[int, int] | None = None) -> Any:
    """The object in a file of ``torch.save``, with :class:`LazyTensor` for tensors. Executes nothing.

    Args:
        window: Offset and size of a zip archive within the file; None: the file itself.

    Raises:
        CheckpointError: The file is missing, empty, truncated, damaged, or not of ``torch.save``.
    """
    with _opened(path, window) as file:
        if window is not None or file.peek(4)[:4] == _ZIP_MAGIC:
            return _ZipFile(path, file, window[0] if window else 0).load(file)
        return _load_legacy(path, file)


def load_pickle_file(path: Path) -> Any:
    """The object in a file of ``pickle.dump``. Executes nothing.

    Raises:
        CheckpointError: The file is missing, empty, damaged, or refers to storages.
    """

    def persistent(pid: Any) -> Any:
        raise UnsafePickle('a persistent id, which only files of torch.save have')

    with _opened(path) as file:
        return load_pickle(file, persistent)


def zip_root(path: Path) -> str | None:
    """The top folder of a zip file of ``torch.save``; None for a legacy file.

    ``torch.save(obj, path)`` names it after the file, without the last suffix (torch ``serialization.py``,
    ``_open_zipfile_writer_file``; C++ ``PyTorchStreamWriter``), which reveals renamed files. It is ``'archive'`` if
    torch was given an open file or a path that is not ASCII.

    Raises:
        CheckpointError: The file can no longer be read.
    """
    with _opened(path) as file:
        head = file.read(_LOCAL.size)
        if len(head) < _LOCAL.size or head[:4] != _ZIP_MAGIC:
            return None
        return file.read(_LOCAL.unpack(head)[1]).partition(b'/')[0].decode(errors='replace')


@contextmanager
def _opened(path: Path, window: tuple[int, int] | None = None) -> Iterator[io.BufferedReader]:
    """A file, or a window of it. Inside the block, errors in the content become a CheckpointError with the path."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            start, nbytes = window or (0, size)
            if not size:
                raise CheckpointError(f'{path}: empty file; {COPY_HINT}')
            if start + nbytes > size:
                raise CheckpointError(f'{path}: truncated: expected {start + nbytes} bytes, found {size}; {COPY_HINT}')
            yield io.BufferedReader(_Window(fd, start, nbytes))
        finally:
            os.close(fd)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f'{path}: not a valid zip file of torch.save: {error}; {COPY_HINT}') from error
    except UnsafePickle as error:
        raise CheckpointError(f'{path}: invalid or unsafe pickle: {error}; {COPY_HINT}') from error
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f'{path}: cannot be read ({reason}); check its name and permissions') from error


class _Window(io.RawIOBase):
    """Consecutive bytes of an open file, as a file."""

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        self._fd, self._start, self._nbytes, self._at = fd, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if self._at < 0:
            raise OSError(f'a position before the start: {self._at}')
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: max(0, self._nbytes - self._at)]
        count = os.preadv(self._fd, [room], self._start + self._at) if len(room) else 0
        self._at += count
        return count


class _ZipFile:
    """The zip archive ``file``, which is at byte ``start`` of the file ``path``.

    Raises:
        CheckpointError: It is not of ``torch.save``.
        zipfile.BadZipFile: It is damaged.
    """

    def __init__(self, path: Path, file: io.BufferedReader, start: int) -> None:
        self._path, self._start = path, start
        try:
            self._archive = zipfile.ZipFile(file)
        except (struct.error, ValueError, NotImplementedError) as error:
            raise zipfile.BadZipFile(f'its directory is damaged ({error})') from error
        parts = self._archive.infolist()
        self._folder = parts[0].filename.partition('/')[0] if parts else ''
        names = {part.filename for part in parts}
        if f'{self._folder}/data.pkl' not in names:
            raise CheckpointError(f'{path}: a zip file, but not of torch.save (no data.pkl); give a checkpoint')
        if f'{self._folder}/constants.pkl' in names:
            raise CheckpointError(f'{path}: a TorchScript program; give a checkpoint')
        self._has_byteorder = f'{self._folder}/byteorder' in names
        prefix = f'{self._folder}/data/'
        #: Key of each storage to the offset of its local header and its size; None: it is compressed
        self._parts = {
            part.filename.removeprefix(prefix): (part.header_offset, part.file_size)
            if part.compress_type == zipfile.ZIP_STORED and part.compress_size == part.file_size
            else None
            for part in parts
            if part.filename.startswith(prefix)
        }
        self._storages: dict[str, Storage] = {}

    def load(self, file: io.BufferedReader) -> Any:
        """The object. The directory is then dropped: it is large."""
        with self._archive as archive:
            order = _content(archive, f'{self._folder}/byteorder') if self._has_byteorder else b'little'
            if order != b'little':
                raise CheckpointError(
                    f'{self._path}: was written on a {order[:9]!r}-endian machine; save it on another'
                )
            pickled = _content(archive, f'{self._folder}/data.pkl')
        del self._archive
        return load_pickle(io.BytesIO(pickled), self._persistent)

    def locate(self, key: str) -> int:
        """The offset of a storage in the file, behind its local header."""
        offset, nbytes = self._parts[key]
        with _opened(self._path) as file:
            file.seek(self._start + offset)
            head = file.read(_LOCAL.size)
            if len(head) < _LOCAL.size or head[:4] != _ZIP_MAGIC:
                raise zipfile.BadZipFile(f'data/{key[:80]} is not where the directory says')
            found = self._start + offset + _LOCAL.size + sum(_LOCAL.unpack(head)[1:])
            if found + nbytes > file.seek(0, os.SEEK_END):
                raise zipfile.BadZipFile(f'data/{key[:80]} ends behind the file')
            return found

    def _persistent(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != 'storage':
            raise UnsafePickle('a persistent id is not that of a storage')
        _, typename, key, _, numel = pid
        known = self._storages.get(key) if type(key) is str else None
        storage = make_storage(typename, key, numel, self._path, self.locate)
        if known is not None and known.dtype == storage.dtype and known.nbytes == storage.nbytes:
            return known
        if storage.key not in self._parts:
            raise UnsafePickle(f'storage {key[:80]!a} is not in the file')
        part = self._parts[storage.key]
        if part is None:
            raise UnsafePickle(f'storage {key[:80]!a} is compressed, which torch.save never does')
        if storage.dtype is not None and part[1] != storage.nbytes:
            raise UnsafePickle(f'storage {key[:80]!a} has {part[1]} bytes, expected {storage.nbytes}')
        self._storages[key] = storage
        return storage


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    """A part's bytes, with their checksum compared."""
    try:
        return archive.read(name)
    # RuntimeError: encrypted, or an unknown method; ValueError: a name that is not UTF-8
    except (EOFError, zlib.error, RuntimeError, ValueError, struct.error) as error:
        raise zipfile.BadZipFile(f'{name}: {error}') from error


def _load_legacy(path: Path, file: io.BufferedReader) -> Any:
    """A file of ``torch.save(..., _use_new_zipfile_serialization=False)``."""
    offsets: dict[str, int] = {}  # filled by _place_storages
    storages: dict[str, Storage] = {}

    def persistent(pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == 'module':
            return pid[1]
        if not isinstance(pid, tuple) or len(pid) != 6 or pid[0] != 'storage' or pid[5] is not None:
            raise UnsafePickle('a persistent id is not that of a storage')
        storage = make_storage(pid[1], pid[2], pid[4], path, offsets.__getitem__)
        return storages.setdefault(storage.key, storage)

    try:
        magic = load_pickle(file, persistent)
    except UnsafePickle:
        magic = None
    if magic != _LEGACY_MAGIC:
        raise CheckpointError(f'{path}: not a file of torch.save; give a .pth file or the folder of a checkpoint')
    if load_pickle(file, persistent) != _LEGACY_PROTOCOL:
        raise UnsafePickle('unknown format version')
    system = load_pickle(file, persistent)
    if isinstance(system, dict) and system.get('little_endian') is False:
        raise CheckpointError(f'{path}: was written on a big-endian machine; save it on another')
    found, keys = load_pickle(file, persistent), load_pickle(file, persistent)
    _place_storages(path, file, keys, storages, offsets)
    return found


def _place_storages(
    path: Path, file: io.BufferedReader, keys: Any, storages: dict[str, Storage], offsets: dict[str, int]
) -> None:
    if not isinstance(keys, list) or not all(type(key) is str for key in keys) or set(keys) != set(storages):
        raise UnsafePickle('its list of storages does not match its tensors')
    position = file.tell()
    end = file.seek(0, os.SEEK_END)
    for key in keys:
        storage = storages[key]
        if storage.dtype is None:
            raise UnsafePickle(f'storage {storage.key[:80]!a} has an unknown dtype and therefore an unknown size')
        file.seek(position)
        header = file.read(8)
        if len(header) < 8 or position + 8 + storage.nbytes > end:
            raise CheckpointError(f'{path}: truncated at storage {storage.key[:80]!a}; {COPY_HINT}')
        if struct.unpack('<q', header)[0] != storage.nbytes // DTYPE_NBYTES[storage.dtype]:
            raise UnsafePickle(f'storage {storage.key[:80]!a} has another size than recorded')
        offsets[storage.key] = position + 8
        position += 8 + storage.nbytes
