"""Files of ``torch.save``: parses the pickle as data and locates the storages, without reading them.

Zip files (torch ``serialization.py``, ``_open_zipfile_writer``, ``_load``): one folder with ``data.pkl``, uncompressed
``data/<key>``, and ``byteorder``. Legacy files (``_legacy_load``): five pickles, then each storage as its number of
elements (8 bytes) and its bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.sources.checkpoint.file_bytes import COPY_HINT, FileBytes
from xhf_hooks.sources.checkpoint.limits import Budget, UnsafePickle
from xhf_hooks.sources.checkpoint.safe_pickle import load_pickle
from xhf_hooks.sources.checkpoint.tensors import Storage, make_storage
from xhf_hooks.sources.checkpoint.zip_directory import BadZip, content_start, first_folder, read_directory

#: The pickle of a checkpoint of 100,000 tensors takes about 40 MB.
MAX_PICKLE_NBYTES = 256 * 10**6
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_HEAD_NBYTES = 20_000  # memory of the small pickles at the start of a legacy file


def load_torch_file(path: Path, window: tuple[int, int] | None = None) -> Any:
    """The object in a file of ``torch.save``, with :class:`LazyTensor` for tensors. Executes nothing.

    Args:
        window: Offset and size of a zip archive within the file; None: the file itself.

    Raises:
        CheckpointError: The file is missing, empty, truncated, damaged, or not of ``torch.save``.
    """
    data = FileBytes(path) if window is None else FileBytes(path, *window)
    with _refusals(path), data.opened():
        if window is not None or first_folder(data) is not None:
            return _ZipFile(path, data, window[0] if window else 0).load()
        return _load_legacy(path, data)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Turn errors in the content into a CheckpointError with the path."""
    try:
        yield
    except BadZip as error:
        raise CheckpointError(f'{path}: not a valid zip file of torch.save: {error}; {COPY_HINT}') from error
    except UnsafePickle as error:
        raise CheckpointError(f'{path}: invalid or unsafe pickle: {error}; {COPY_HINT}') from error


def load_pickle_file(path: Path) -> Any:
    """The object in a file of ``pickle.dump``. Executes nothing.

    Raises:
        CheckpointError: The file is missing, empty, too large, damaged, or refers to storages.
    """
    data = FileBytes(path)
    if len(data) > MAX_PICKLE_NBYTES:
        raise CheckpointError(f'{path}: has {len(data)} bytes; expected at most {MAX_PICKLE_NBYTES}')

    def persistent(pid: Any) -> Any:
        raise UnsafePickle('a persistent id, which only files of torch.save have')

    with _refusals(path):
        return load_pickle(data[:], persistent)[0]


def zip_root(path: Path) -> str | None:
    """The top folder of a zip file of ``torch.save``; None for a legacy file.

    ``torch.save(obj, path)`` names it after the file, without the last suffix (torch ``serialization.py``,
    ``_open_zipfile_writer_file``; C++ ``PyTorchStreamWriter``), which reveals renamed files. It is ``'archive'`` if
    torch was given an open file or a path that is not ASCII.

    Raises:
        CheckpointError: The file can no longer be read.
    """
    return first_folder(FileBytes(path))


class _ZipFile:
    """The zip archive ``data``, at byte ``start`` of the file ``path``."""

    def __init__(self, path: Path, data: FileBytes, start: int = 0) -> None:
        self._path, self._data, self._start = path, data, start
        self._folder, self._parts = read_directory(data)
        if 'data.pkl' not in self._parts:
            raise CheckpointError(f'{path}: a zip file, but not of torch.save (no data.pkl); give a checkpoint')
        if 'constants.pkl' in self._parts:
            raise CheckpointError(f'{path}: a TorchScript program; give a checkpoint')
        self._storages: dict[str, Storage] = {}

    def load(self) -> Any:
        order = self._content('byteorder')[:9] if 'byteorder' in self._parts else b'little'
        if order != b'little':
            raise CheckpointError(f'{self._path}: was written on a {order!r}-endian machine; save it on another')
        part = self._parts['data.pkl']
        if part.nbytes > MAX_PICKLE_NBYTES:
            raise CheckpointError(
                f'{self._path}: data.pkl has {part.nbytes} bytes; expected at most {MAX_PICKLE_NBYTES}'
            )
        pickled = self._content('data.pkl')
        if zlib.crc32(pickled) != part.crc:
            raise CheckpointError(f'{self._path}: data.pkl does not match its checksum; {COPY_HINT}')
        return load_pickle(pickled, self._persistent)[0]

    def locate(self, key: str) -> int:
        name = f'data/{key}'
        with _refusals(self._path):
            return self._start + content_start(self._data, self._parts[name], f'{self._folder}/{name}')

    def _content(self, name: str) -> bytes:
        part = self._parts[name]
        start = content_start(self._data, part, f'{self._folder}/{name}')
        return self._data[start : start + part.nbytes]

    def _persistent(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != 'storage':
            raise UnsafePickle('a persistent id is not that of a storage')
        _, typename, key, _, numel = pid
        known = self._storages.get(key) if type(key) is str else None
        storage = make_storage(typename, key, numel, self._path, self.locate)
        if known is not None and known.dtype == storage.dtype and known.nbytes == storage.nbytes:
            return known
        part = self._parts.get(f'data/{key}')
        if part is None:
            raise UnsafePickle(f'storage {key[:80]!a} is not in the file')
        if storage.dtype is not None and part.nbytes != storage.nbytes:
            raise UnsafePickle(f'storage {key[:80]!a} has {part.nbytes} bytes, expected {storage.nbytes}')
        self._storages[key] = storage
        return storage


def _load_legacy(path: Path, data: FileBytes) -> Any:
    """A file of ``torch.save(..., _use_new_zipfile_serialization=False)``."""
    view = data[:MAX_PICKLE_NBYTES]
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
        magic, position = load_pickle(view, persistent, budget=Budget(_HEAD_NBYTES))
    except UnsafePickle:
        magic, position = None, 0
    if magic != _LEGACY_MAGIC:
        raise CheckpointError(f'{path}: not a file of torch.save; give a .pth file or the folder of a checkpoint')
    version, position = load_pickle(view, persistent, position, Budget(_HEAD_NBYTES))
    if version != _LEGACY_PROTOCOL:
        raise UnsafePickle('unknown format version')
    system, position = load_pickle(view, persistent, position, Budget(_HEAD_NBYTES))
    if isinstance(system, dict) and system.get('little_endian') is False:
        raise CheckpointError(f'{path}: was written on a big-endian machine; save it on another')
    budget = Budget()
    found, position = load_pickle(view, persistent, position, budget)
    keys, position = load_pickle(view, persistent, position, budget)
    _place_storages(path, data, position, keys, storages, offsets)
    return found


def _place_storages(
    path: Path, data: FileBytes, position: int, keys: Any, storages: dict[str, Storage], offsets: dict[str, int]
) -> None:
    if not isinstance(keys, list) or not all(type(key) is str for key in keys) or set(keys) != set(storages):
        raise UnsafePickle('its list of storages does not match its tensors')
    for key in keys:
        storage = storages[key]
        if storage.dtype is None:
            raise UnsafePickle(f'storage {storage.key[:80]!a} has an unknown dtype and therefore an unknown size')
        header = data[position : position + 8]
        numel = storage.nbytes // DTYPE_NBYTES[storage.dtype]
        if len(header) < 8 or position + 8 + storage.nbytes > len(data):
            raise CheckpointError(f'{path}: truncated at storage {storage.key[:80]!a}; {COPY_HINT}')
        if struct.unpack('<q', header)[0] != numel:
            raise UnsafePickle(f'storage {storage.key[:80]!a} has another size than recorded')
        offsets[storage.key] = position + 8
        position += 8 + storage.nbytes
