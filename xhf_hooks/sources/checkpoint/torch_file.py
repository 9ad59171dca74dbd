"""Files of ``torch.save``: the pickle inside as data, and the places of the storages, none of them read.

Zip files are laid out as in torch ``serialization.py`` (``_open_zipfile_writer``, ``_load``): one folder with
``data.pkl``, ``data/<key>`` stored without compression, and ``byteorder``. The older files are five pickles, then for
each storage its number of elements (8 bytes) and its bytes (``_legacy_load``).
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

#: A pickle of a 100 000-tensor checkpoint has some 40 MB.
MAX_PICKLE_NBYTES = 256 * 10**6
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_HEAD_NBYTES = 20_000  # of objects in the few values at the front of an older file


def load_torch_file(path: Path, window: tuple[int, int] | None = None) -> Any:
    """The object in a file of ``torch.save``, with :class:`LazyTensor` for tensors. Executes nothing.

    Args:
        window: Where in the file a zip file of ``torch.save`` begins, and how many bytes it has; None: it is the file.

    Raises:
        CheckpointError: The file is missing, empty, truncated, damaged, or of another kind.
    """
    data = FileBytes(path) if window is None else FileBytes(path, *window)
    with _refusals(path), data.opened():
        if window is not None or first_folder(data) is not None:
            return _ZipFile(path, data, window[0] if window else 0).load()
        return _load_legacy(path, data)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Tell what is wrong with the content of a file."""
    try:
        yield
    except BadZip as error:
        raise CheckpointError(f'{path}: not a zip file as torch.save writes it: {error}; {COPY_HINT}') from error
    except UnsafePickle as error:
        raise CheckpointError(f'{path}: not a checkpoint that can be trusted: {error}; {COPY_HINT}') from error


def load_pickle_file(path: Path) -> Any:
    """The object in a plain file of ``pickle.dump``. Executes nothing.

    Raises:
        CheckpointError: The file is missing, empty, too large, damaged, or refers to storages.
    """
    data = FileBytes(path)
    if len(data) > MAX_PICKLE_NBYTES:
        raise CheckpointError(f'{path}: has {len(data)} bytes, more than the {MAX_PICKLE_NBYTES} allowed')

    def persistent(pid: Any) -> Any:
        raise UnsafePickle('a persistent id, which only files of torch.save have')

    with _refusals(path):
        return load_pickle(data[:], persistent)[0]


def zip_root(path: Path) -> str | None:
    """The folder inside a zip file that :func:`load_torch_file` has read; None for a file of the older format.

    ``torch.save(obj, path)`` names it after the file, without folder and last suffix (torch ``serialization.py``,
    ``_open_zipfile_writer_file``; C++ ``PyTorchStreamWriter``). It is ``'archive'`` when torch was given an open
    file, or a path that is not ASCII. It therefore tells a file that was renamed later, unless it is ``'archive'``.

    Raises:
        CheckpointError: The file cannot be read any more.
    """
    return first_folder(FileBytes(path))


class _ZipFile:
    """Args: ``data`` is the zip file, which begins at byte ``start`` of the file ``path``."""

    def __init__(self, path: Path, data: FileBytes, start: int = 0) -> None:
        self._path, self._data, self._start = path, data, start
        self._folder, self._parts = read_directory(data)
        if 'data.pkl' not in self._parts:
            raise CheckpointError(f'{path}: a zip file, but not of torch.save (no data.pkl); give a checkpoint')
        if 'constants.pkl' in self._parts:
            raise CheckpointError(f'{path}: a TorchScript program, not a checkpoint; give a checkpoint')
        self._storages: dict[str, Storage] = {}

    def load(self) -> Any:
        order = self._content('byteorder')[:9] if 'byteorder' in self._parts else b'little'
        if order != b'little':
            raise CheckpointError(f'{self._path}: was written on a {order!r}-endian machine; save it on another')
        part = self._parts['data.pkl']
        if part.nbytes > MAX_PICKLE_NBYTES:
            raise CheckpointError(
                f'{self._path}: its data.pkl has {part.nbytes} bytes, more than the {MAX_PICKLE_NBYTES} allowed'
            )
        pickled = self._content('data.pkl')
        if zlib.crc32(pickled) != part.crc:
            raise CheckpointError(f'{self._path}: data.pkl has another checksum than recorded; {COPY_HINT}')
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
            raise UnsafePickle(f'storage {key[:80]!a} has {part.nbytes} bytes, {storage.nbytes} are recorded')
        self._storages[key] = storage
        return storage


def _load_legacy(path: Path, data: FileBytes) -> Any:
    """A file of ``torch.save(..., _use_new_zipfile_serialization=False)``."""
    view = data[:MAX_PICKLE_NBYTES]
    offsets: dict[str, int] = {}  # known when the whole file has been walked
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
        raise UnsafePickle('unknown version of the format')
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
        raise UnsafePickle('its list of storages is not that of its tensors')
    for key in keys:
        storage = storages[key]
        if storage.dtype is None:
            raise UnsafePickle(f'a storage of unknown type, behind which nothing can be found ({storage.key[:80]!a})')
        header = data[position : position + 8]
        numel = storage.nbytes // DTYPE_NBYTES[storage.dtype]
        if len(header) < 8 or position + 8 + storage.nbytes > len(data):
            raise CheckpointError(f'{path}: is truncated at storage {storage.key[:80]!a}; {COPY_HINT}')
        if struct.unpack('<q', header)[0] != numel:
            raise UnsafePickle(f'storage {storage.key[:80]!a} has another size than recorded')
        offsets[storage.key] = position + 8
        position += 8 + storage.nbytes
