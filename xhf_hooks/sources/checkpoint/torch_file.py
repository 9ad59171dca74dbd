"""Files of ``torch.save``: reads the pickle as data; its tensors are views of the mapped file.

Zip files (torch ``serialization.py``, ``_open_zipfile_writer``, ``_load``): one folder with ``data.pkl``, uncompressed
``data/<key>``, and ``byteorder``. Legacy files (``_legacy_load``): five pickles, then each storage as its number of
elements (8 bytes) and its bytes.

Not torch.load itself: it clips a storage beyond the end of a mapped file silently, maps neither legacy files nor the
chunks within a .distcp file, and extracts tar files.
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

import torch

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.unpickler import Storage, UnsafePickle, load_pickle
from xhf_hooks.sources.mapped_files import COPY_HINT, MappedFile

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_ZIP_MAGIC = b'PK\x03\x04'
#: Besides ours, what zipfile raises for a damaged directory, a wrong compression, encryption, names that are no UTF-8.
_DAMAGE = (UnsafePickle, zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, TypeError, ValueError, EOFError)
#: A part's local header (.ZIP File Format Specification 6.3, 4.3.7): the lengths of its name and extra field.
_LOCAL = struct.Struct('<26xHH')


def load_torch_file(path: Path) -> Any:
    """The object in a file of ``torch.save``. Executes nothing.

    Raises:
        CheckpointError: The file is missing, empty, truncated, damaged, or not of ``torch.save``.
    """
    with told_of(path):
        return load_mapped(MappedFile.open(path))


def load_mapped(file: MappedFile) -> Any:
    """The object in a mapped file, or in a part of one."""
    with told_of(file.path):
        return _load_zip(file) if file.data[:4] == _ZIP_MAGIC else _load_legacy(file)


def load_pickle_file(path: Path) -> Any:
    """The object in a file of ``pickle.dump``. Executes nothing.

    Raises:
        CheckpointError: The file is missing, empty or damaged.
    """
    with told_of(path):
        return load_pickle(_reader(MappedFile.open(path)), _storage_id)


def zip_root(path: Path) -> str | None:
    """The top folder of a zip file of ``torch.save``; None for a legacy file.

    ``torch.save(obj, path)`` names it after the file, without the last suffix (torch ``serialization.py``,
    ``_open_zipfile_writer_file``; C++ ``PyTorchStreamWriter``), which reveals renamed files. It is ``'archive'`` if
    torch was given an open file or a path that is not ASCII.
    """
    with told_of(path), path.open('rb') as file:
        head = file.read(_LOCAL.size)
        if head[:4] != _ZIP_MAGIC:
            return None
        return file.read(_LOCAL.unpack(head)[0]).partition(b'/')[0].decode(errors='replace')


@contextmanager
def told_of(path: Path) -> Iterator[None]:
    """Turns errors in the content of a file into a CheckpointError with its path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f'{path}: cannot be read ({reason}); check its name and permissions') from error
    except _DAMAGE as error:
        raise CheckpointError(f'{path}: damaged or unsafe, not of torch.save: {error}; {COPY_HINT}') from error


def _load_zip(file: MappedFile) -> Any:
    with zipfile.ZipFile(_reader(file)) as archive:
        parts = {part.filename.partition('/')[2]: part for part in archive.infolist()}
        if 'data.pkl' not in parts or 'constants.pkl' in parts:
            raise CheckpointError(
                f'{file.path}: a zip file, but not of torch.save (without data.pkl, or TorchScript); give a checkpoint'
            )
        if 'byteorder' in parts and archive.read(parts['byteorder']) != b'little':
            raise CheckpointError(f'{file.path}: was written on a big-endian machine; save it on another')
        pickled = archive.read(parts['data.pkl'])  # compares its checksum
    found: dict[str, torch.UntypedStorage] = {}

    def storage_of(pid: Any) -> Storage:
        dtype, key, numel = _storage_id(pid)
        part = parts.get(f'data/{key}')
        nbytes = numel * dtype.itemsize
        if part is None or part.compress_type != zipfile.ZIP_STORED or part.file_size != nbytes:
            raise UnsafePickle(f'storage {key[:80]!a} is missing, is compressed, or has not {nbytes} bytes')
        if key not in found:
            start = part.header_offset + _LOCAL.size + sum(_LOCAL.unpack_from(file.data, part.header_offset))
            found[key] = file.storage(start, part.file_size)
        return Storage(found[key], dtype)

    return load_pickle(io.BytesIO(pickled), storage_of)


def _load_legacy(file: MappedFile) -> Any:
    """A file of ``torch.save(..., _use_new_zipfile_serialization=False)``.

    The list of storages follows the object, so the object is read twice: for their sizes, then with their places.
    """
    reader = _reader(file)
    sizes: dict[str, int] = {}
    places: dict[str, int] = {}

    def storage_of(pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == 'module':
            return pid[1]
        dtype, key, numel = _storage_id(pid)
        sizes[key] = numel * dtype.itemsize
        return Storage(file.storage(places.get(key, 0), sizes[key]), dtype)

    try:
        magic = load_pickle(reader, storage_of)
    except UnsafePickle:
        magic = None
    if magic != _LEGACY_MAGIC:
        raise CheckpointError(f'{file.path}: not a file of torch.save; give a .pth file or the folder of a checkpoint')
    load_pickle(reader, storage_of)  # the format's version, always 1001
    system = load_pickle(reader, storage_of)
    if isinstance(system, dict) and system.get('little_endian') is False:
        raise CheckpointError(f'{file.path}: was written on a big-endian machine; save it on another')
    begin = reader.tell()
    load_pickle(reader, storage_of)
    position = 0
    for key in load_pickle(reader, storage_of):
        position = (position or reader.tell()) + 8
        places[key] = position
        position += sizes.get(key, 0)
    if places.keys() != sizes.keys() or position > len(file.data):
        raise CheckpointError(f'{file.path}: truncated, or its list of storages is not of its tensors; {COPY_HINT}')
    reader.seek(begin)
    return load_pickle(reader, storage_of)


def _storage_id(pid: Any) -> tuple[torch.dtype, str, int]:
    """Dtype, key and number of elements of a storage's persistent id."""
    match pid:
        case ('storage', torch.dtype() as dtype, str() as key, _, int() as numel, *_) if numel >= 0:
            return dtype, key, numel
    raise UnsafePickle('a persistent id is not that of a storage with a dtype, a key and a size')


def _reader(file: MappedFile) -> io.BufferedReader:
    return io.BufferedReader(_Bytes(file.data))


class _Bytes(io.RawIOBase):
    """Bytes in memory as a file, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        if self._at < 0:
            raise OSError(f'a position before the start: {self._at}')
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._data[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
