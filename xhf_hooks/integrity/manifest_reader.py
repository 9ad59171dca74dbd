"""``xhf_manifest.json`` as a reader sees it: anyone's text until it is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import checksum, strict_json
from xhf_hooks.integrity.manifest import MANIFEST_NAME

CHECKSUM_VERSION = 2  # the first format version with checksums
KNOWN_VERSIONS = (1, 2)


@dataclass(frozen=True)
class TensorRecord:
    """What a tensor was in memory, before it was written."""

    shape: tuple[int, ...]
    dtype: str
    crc32: int
    non_finite: int


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was committed; ``crc32`` and ``tensors`` are None where the manifest has none."""

    nbytes: int
    crc32: int | None = None
    tensors: dict[str, TensorRecord] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Manifest:
    """A checked manifest: files by path relative to the folder, with slashes.

    Attributes:
        facts: Everything else that it says.
    """

    version: int
    files: dict[str, FileRecord]
    facts: dict[str, Any] = field(repr=False)

    @property
    def has_checksums(self) -> bool:
        return self.version >= CHECKSUM_VERSION

    @property
    def label(self) -> str:
        """Which save this is, for people."""
        step = self.facts.get('step')
        return f'{step.get("unit")} {step.get("number")}'[:80] if isinstance(step, dict) else 'unknown step'


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None when there is none.

    Raises:
        DamagedError: There is one that is not well formed.
    """
    path = folder / MANIFEST_NAME
    if not path.exists() and not path.is_symlink():
        return None
    return parse_manifest(strict_json.read(path), str(path))


def parse_manifest(content: Mapping[str, Any], where: str) -> Manifest:
    """Check the content of a manifest.

    Args:
        where: For messages.

    Raises:
        DamagedError: It is not well formed, or of a newer format than this program knows.
    """
    version, files = content.get('format_version'), content.get('files')
    if type(version) is not int or version < 1:
        raise DamagedError(f'{where}: format_version {str(version)[:80]} is no version')
    if version not in KNOWN_VERSIONS:
        raise DamagedError(f'{where}: format_version {version}; this program knows {KNOWN_VERSIONS}: use a newer one')
    if not isinstance(files, dict):
        raise DamagedError(f'{where}: files is not an object')
    records = {name: _file(name, found, version, where) for name, found in files.items()}
    return Manifest(version, records, {key: value for key, value in content.items() if key != 'files'})


def _file(name: str, found: Any, version: int, where: str) -> FileRecord:
    where = f'{where}: file {name[:200]!r}'
    path = PurePosixPath(name)
    if not name or '\0' in name or path.is_absolute() or '..' in path.parts or str(path) != name or name == '.':
        raise DamagedError(f'{where}: not a path inside the folder')
    if not isinstance(found, dict) or not strict_json.is_count(found.get('nbytes')):
        raise DamagedError(f'{where}: nbytes is not a size')
    if version < CHECKSUM_VERSION:
        return FileRecord(found['nbytes'])
    tensors = found.get('tensors')
    if tensors is not None and not isinstance(tensors, dict):
        raise DamagedError(f'{where}: tensors is not an object')
    if tensors is None and name.endswith('.safetensors'):
        raise DamagedError(f'{where}: its tensors are not described')
    records = None if tensors is None else {n: _tensor(n, t, where) for n, t in tensors.items()}
    return FileRecord(found['nbytes'], _crc(found, where), records)


def _tensor(name: str, found: Any, where: str) -> TensorRecord:
    where = f'{where}, tensor {name[:200]!r}'
    if not isinstance(found, dict):
        raise DamagedError(f'{where}: not an object')
    shape, dtype, non_finite = found.get('shape'), found.get('dtype'), found.get('non_finite')
    if not isinstance(shape, list) or not all(map(strict_json.is_count, shape)):
        raise DamagedError(f'{where}: {str(shape)[:80]} is no shape')
    if not isinstance(dtype, str):
        raise DamagedError(f'{where}: {str(dtype)[:80]} is no dtype')
    if not strict_json.is_count(non_finite):
        raise DamagedError(f'{where}: non_finite {str(non_finite)[:80]} is no count')
    return TensorRecord(tuple(shape), dtype, _crc(found, where), non_finite)


def _crc(found: Mapping[str, Any], where: str) -> int:
    text = found.get('crc32')
    if not isinstance(text, str):
        raise DamagedError(f'{where}: crc32 is not a text')
    try:
        return checksum.from_hex(text)
    except ValueError as error:
        raise DamagedError(f'{where}: {error}') from None
