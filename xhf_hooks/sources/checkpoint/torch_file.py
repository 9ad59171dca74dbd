"""Files of ``torch.save``: the pickle inside as data, and the places of the storages, none of them read.

Zip files are laid out as in torch ``serialization.py`` (``_open_zipfile_writer``, ``_load``): one folder with
``data.pkl``, ``data/<key>`` stored without compression, and ``byteorder``. The older files are five pickles, then for
each storage its number of elements (8 bytes) and its bytes (``_legacy_load``).
"""

from __future__ import annotations

import mmap
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.regular_files import open_regular
from xhf_hooks.safetensors_format import DTYPE_NBYTES
from xhf_hooks.sources.checkpoint.safe_pickle import UnsafePickle, load_pickle
from xhf_hooks.sources.checkpoint.tensors import BadTensor, Storage, make_storage

#: A pickle of a 100 000-tensor checkpoint has some 40 MB.
MAX_PICKLE_NBYTES = 256 * 10**6
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
_LOCAL_HEADER = struct.Struct('<4s5H3I2H')
_COPY_HINT = 'copy or download it again, or take another iteration'


def load_torch_file(path: Path) -> Any:
    """The object in a file of ``torch.save``, with :class:`LazyTensor` for tensors. Executes nothing.

    Raises:
        CheckpointError: The file is missing, empty, truncated, damaged, or of another kind.
    """
    try:
        with open_regular(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(
            f'{path}: cannot be read ({error.strerror or error}); check its name and rights'
        ) from error
    except ValueError as error:
        raise CheckpointError(f'{path}: is empty; {_COPY_HINT}') from error
    try:
        if data[:4] == b'PK\x03\x04':
            return _ZipFile(path, data).load()
        return _load_legacy(path, data)
    except (UnsafePickle, BadTensor) as error:
        raise CheckpointError(f'{path}: not a checkpoint that can be trusted: {error}; {_COPY_HINT}') from error


class _ZipFile:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        try:
            with open_regular(path) as file, zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        # All that zipfile raises on odd bytes, depending on which they are
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, EOFError, struct.error) as error:
            raise CheckpointError(f'{path}: is truncated or damaged ({error}); {_COPY_HINT}') from error
        self._entries = {info.filename: info for info in infos}
        if len(self._entries) != len(infos):
            raise CheckpointError(f'{path}: has two parts of one name, as no file of torch.save has; {_COPY_HINT}')
        self._folder = self._find_folder()
        self._storages: dict[str, Storage] = {}

    def load(self) -> Any:
        order = self._small('byteorder', b'little')
        if order != b'little':
            raise CheckpointError(f'{self._path}: was written on a {order[:9]!r}-endian machine; save it on another')
        info = self._entries[f'{self._folder}/data.pkl']
        if info.file_size > MAX_PICKLE_NBYTES:
            raise CheckpointError(
                f'{self._path}: its data.pkl has {info.file_size} bytes, more than the {MAX_PICKLE_NBYTES} allowed'
            )
        start = self._offset(info)
        pickled = memoryview(self._data)[start : start + info.file_size]
        if zlib.crc32(pickled) != info.CRC:
            raise CheckpointError(f'{self._path}: data.pkl has another checksum than recorded; {_COPY_HINT}')
        return load_pickle(pickled, self._persistent)[0]

    def locate(self, key: str) -> int:
        return self._offset(self._entries[f'{self._folder}/data/{key}'])

    def _find_folder(self) -> str:
        folders = [name[: -len('/data.pkl')] for name in self._entries if name.endswith('/data.pkl')]
        if len(folders) != 1:
            raise CheckpointError(f'{self._path}: a zip file, but not of torch.save (no data.pkl); give a checkpoint')
        if f'{folders[0]}/constants.pkl' in self._entries:
            raise CheckpointError(f'{self._path}: a TorchScript program, not a checkpoint; give a checkpoint')
        return folders[0]

    def _small(self, name: str, default: bytes) -> bytes:
        info = self._entries.get(f'{self._folder}/{name}')
        if info is None:
            return default
        start = self._offset(info)
        return self._data[start : start + min(info.file_size, 100)]

    def _offset(self, info: zipfile.ZipInfo) -> int:
        """Where the content of a part begins: behind its local header, whose padding aligns it."""
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise CheckpointError(f'{self._path}: {info.filename!r} is compressed, as torch.save never does')
        header = self._data[info.header_offset : info.header_offset + _LOCAL_HEADER.size]
        if len(header) < _LOCAL_HEADER.size or header[:4] != b'PK\x03\x04':
            raise CheckpointError(f'{self._path}: is truncated or damaged at {info.filename!r}; {_COPY_HINT}')
        *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        if start + info.file_size > len(self._data):
            raise CheckpointError(
                f'{self._path}: is truncated: {info.filename!r} ends at byte {start + info.file_size} of '
                f'{len(self._data)}; {_COPY_HINT}'
            )
        return start

    def _persistent(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != 'storage':
            raise BadTensor('a persistent id is not that of a storage')
        _, typename, key, _, numel = pid
        known = self._storages.get(key) if type(key) is str else None
        storage = make_storage(typename, key, numel, self._path, self.locate)
        if known is not None and known.dtype == storage.dtype and known.nbytes == storage.nbytes:
            return known
        info = self._entries.get(f'{self._folder}/data/{key}')
        if info is None:
            raise BadTensor(f'storage {key!r} is not in the file')
        if storage.dtype is not None and info.file_size != storage.nbytes:
            raise BadTensor(f'storage {key!r} has {info.file_size} bytes, {storage.nbytes} are recorded')
        self._storages[key] = storage
        return storage


def _load_legacy(path: Path, data: mmap.mmap) -> Any:
    """A file of ``torch.save(..., _use_new_zipfile_serialization=False)``."""
    view = memoryview(data)[:MAX_PICKLE_NBYTES]
    offsets: dict[str, int] = {}
    storages: dict[str, Storage] = {}
    locate = _Locator(offsets)

    def persistent(pid: Any) -> Any:
        if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == 'module':
            return pid[1]
        if not isinstance(pid, tuple) or len(pid) != 6 or pid[0] != 'storage' or pid[5] is not None:
            raise BadTensor('a persistent id is not that of a storage')
        storage = make_storage(pid[1], pid[2], pid[4], path, locate)
        return storages.setdefault(storage.key, storage)

    try:
        magic, position = load_pickle(view, persistent, limit=10)
    except UnsafePickle:
        magic, position = None, 0
    if magic != _LEGACY_MAGIC:
        raise CheckpointError(f'{path}: not a file of torch.save; give a .pth file or the folder of a checkpoint')
    version, position = load_pickle(view, persistent, position, limit=10)
    if version != _LEGACY_PROTOCOL:
        raise UnsafePickle('unknown version of the format')
    system, position = load_pickle(view, persistent, position, limit=1000)
    if isinstance(system, dict) and system.get('little_endian') is False:
        raise CheckpointError(f'{path}: was written on a big-endian machine; save it on another')
    found, position = load_pickle(view, persistent, position)
    keys, position = load_pickle(view, persistent, position)
    _place_storages(path, data, position, keys, storages, offsets)
    return found


class _Locator:
    """Where a storage begins; known when the whole file has been walked."""

    def __init__(self, offsets: dict[str, int]) -> None:
        self._offsets = offsets

    def __call__(self, key: str) -> int:
        return self._offsets[key]


def _place_storages(
    path: Path, data: mmap.mmap, position: int, keys: Any, storages: dict[str, Storage], offsets: dict[str, int]
) -> None:
    if not isinstance(keys, list) or set(map(str, keys)) != set(storages):
        raise UnsafePickle('its list of storages is not that of its tensors')
    for key in keys:
        storage = storages[str(key)]
        if storage.dtype is None:
            raise UnsafePickle(f'a storage of unknown type, behind which nothing can be found ({storage.key!r})')
        header = data[position : position + 8]
        numel = storage.nbytes // DTYPE_NBYTES[storage.dtype]
        if len(header) < 8 or position + 8 + storage.nbytes > len(data):
            raise CheckpointError(f'{path}: is truncated at storage {storage.key!r}; {_COPY_HINT}')
        if struct.unpack('<q', header)[0] != numel:
            raise UnsafePickle(f'storage {storage.key!r} has another size than recorded')
        offsets[storage.key] = position + 8
        position += 8 + storage.nbytes
