"""Files of ``torch.save``: reads the pickle as data; its tensors are views of the mapped file.

Zip files (torch ``serialization.py``, ``_open_zipfile_writer``, ``_load``): one folder with ``data.pkl``, uncompressed
``data/<key>``, and ``byteorder``. Older files (before torch 1.6), which begin with a pickled number, are refused.

Not torch.load itself: it clips a storage beyond the end of a mapped file silently, does not map the chunks within a
.distcp file, and extracts tar files.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.safetensors import LFS_MAGIC, LFS_PROBLEM
from xhf_hooks.offline.checkpoint.unpickler import Storage, UnsafePickle, load_pickle
from xhf_hooks.sources.mapped_files import COPY_HINT, MappedFile

_OLD_MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
_ZIP_MAGIC = b'PK\x03\x04'
_UNPACK = 'unpack it, and give the checkpoint in it'
#: Files of other kinds: the offset and the bytes by which each is known, its kind, and the remedy.
_OTHER_FILES = (
    (0, b'\x1f\x8b', 'compressed by gzip', _UNPACK),
    (0, b'BZh', 'compressed by bzip2', _UNPACK),
    (0, b'\xfd7zXZ\x00', 'compressed by xz', _UNPACK),
    (0, b'\x28\xb5\x2f\xfd', 'compressed by zstd', _UNPACK),
    (0, b'7z\xbc\xaf\x27\x1c', 'an archive of 7-Zip', _UNPACK),
    (257, b'ustar', 'an archive of tar', _UNPACK),
    (0, b'GGUF', 'a GGUF file of llama.cpp', 'transformers loads it: from_pretrained(FOLDER, gguf_file=NAME)'),
    (0, b'\x89HDF', 'an HDF5 file', 'if it is of TensorFlow, load it with from_pretrained(FOLDER, from_tf=True)'),
    (0, b'\x80', 'a pickle, not of torch.save', 'if you trust it, load it, and save its tensors with torch.save'),
    (0, b'{', 'a JSON file', 'give the folder in which it is'),
)
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
        if file.data[: len(_OLD_MAGIC)] == _OLD_MAGIC:
            raise CheckpointError(
                f'{file.path}: in the format of torch before 1.6, which is not supported; if you trust it, load it '
                f'with torch.load(..., weights_only=False), and save it again with torch.save'
            )
        if file.data[: len(LFS_MAGIC)] == LFS_MAGIC:
            raise CheckpointError(f'{file.path}: {LFS_PROBLEM}')
        if file.data[:4] != _ZIP_MAGIC:
            start = bytes(file.data[:300])
            found = (f'{kind}; {remedy}' for at, magic, kind, remedy in _OTHER_FILES if start[at:].startswith(magic))
            problem = next(found, 'not a file of torch.save; give a .pth file or the folder of a checkpoint')
            raise CheckpointError(f'{file.path}: {problem}')
        return _load_zip(file)


def load_pickle_file(path: Path) -> Any:
    """The object in a file of ``pickle.dump``. Executes nothing.

    Raises:
        CheckpointError: The file is missing, empty or damaged.
    """
    with told_of(path):
        return load_pickle(io.BytesIO(path.read_bytes()), _storage_id)


def zip_root(path: Path) -> str:
    """The top folder of a file of ``torch.save``.

    ``torch.save(obj, path)`` names it after the file, without the last suffix (torch ``serialization.py``,
    ``_open_zipfile_writer_file``; C++ ``PyTorchStreamWriter``), which reveals renamed files. It is ``'archive'`` if
    torch was given an open file or a path that is not ASCII.
    """
    with told_of(path), path.open('rb') as file:
        name_length, _ = _LOCAL.unpack(file.read(_LOCAL.size))
        return file.read(name_length).partition(b'/')[0].decode(errors='replace')


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
    with zipfile.ZipFile(io.BufferedReader(_Bytes(file.data))) as archive:
        parts = {part.filename.partition('/')[2]: part for part in archive.infolist()}
        if 'data.pkl' not in parts or 'constants.pkl' in parts:
            raise CheckpointError(
                f'{file.path}: a zip file, but not of torch.save (without data.pkl, or TorchScript). If it is an '
                f'archive, {_UNPACK}; of TorchScript, save state_dict() of torch.jit.load with torch.save'
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


def _storage_id(pid: Any) -> tuple[torch.dtype, str, int]:
    """Dtype, key and number of elements of a storage's persistent id."""
    match pid:
        case ('storage', torch.dtype() as dtype, str() as key, _, int() as numel, *_) if numel >= 0:
            return dtype, key, numel
    raise UnsafePickle('a persistent id is not that of a storage with a dtype, a key and a size')


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
