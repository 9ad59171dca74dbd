"""``xhf_manifest.json``: files, tensors and checksums of a saved folder. Written last, it marks the folder complete.

:func:`read_manifest` treats it as untrusted input.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json
from xhf_hooks.format.checksum import combine, crc32, from_hex, to_hex
from xhf_hooks.planning.types import SavePlan, Step, WrittenTensor

MANIFEST_NAME = 'xhf_manifest.json'
#: 2: checksums of all files and tensors. 1: sizes of the weight files only.
FORMAT_VERSION = _CHECKSUM_VERSION = 2


def describe_folder(
    folder: Path, plan: SavePlan, tensors: Sequence[WrittenTensor], step: Step, facts: dict[str, Any]
) -> dict[str, Any]:
    """Make the manifest of a complete staging folder. Runs on: rank 0.

    Weights are not read: their checksums were computed in memory before the write.
    """
    return {
        'format_version': FORMAT_VERSION,
        'step': {'unit': step.unit, 'number': step.number},
        'iteration': step.iteration,
        **facts,
        'files': {**_describe_weights(plan, tensors), **_describe_others(folder, {f.name for f in plan.files})},
    }


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest and flush it to disk. Runs on: rank 0."""
    with (folder / MANIFEST_NAME).open('w', encoding='utf-8') as file:
        file.write(manifest_text(content))
        file.flush()
        os.fsync(file.fileno())


def manifest_text(content: dict[str, Any]) -> str:
    """The manifest's text, as written to the file."""
    return json.dumps(content, indent=1) + '\n'


def _describe_weights(plan: SavePlan, tensors: Sequence[WrittenTensor]) -> dict[str, Any]:
    crcs = {file.name: crc32(file.header) for file in plan.files}
    of_file: dict[str, dict[str, Any]] = {file.name: {} for file in plan.files}
    for tensor in sorted(tensors, key=lambda tensor: tensor.placement.offset):
        place = tensor.placement
        crcs[place.file] = combine(crcs[place.file], tensor.crc32, place.nbytes)
        of_file[place.file][place.hf_name] = {
            'shape': list(place.shape),
            'dtype': place.dtype,
            'crc32': to_hex(tensor.crc32),
            'non_finite': tensor.non_finite,
        }
    return {
        file.name: {'nbytes': file.nbytes, 'crc32': to_hex(crcs[file.name]), 'tensors': of_file[file.name]}
        for file in plan.files
    }


def _describe_others(folder: Path, weights: set[str]) -> dict[str, Any]:
    found = {}
    for path in sorted(folder.rglob('*')):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in weights and name != MANIFEST_NAME:
            data = path.read_bytes()
            found[name] = {'nbytes': len(data), 'crc32': to_hex(crc32(data))}
    return found


@dataclass(frozen=True, order=True)
class Commit:
    """The commit that made a folder. Ordered by time.

    Attributes:
        number: Counts commits under one final name, over all runs; 0 if the manifest does not have it.
        step: The saved step.
        files: The committed files; None if the manifest does not list all of them.
    """

    number: int
    iteration: int
    step: Step = field(compare=False)
    files: frozenset[str] | None = field(compare=False, repr=False)


def read_commit(folder: Path) -> Commit | None:
    """The commit in a folder's manifest; None without a readable manifest."""
    try:
        return parse_commit((folder / MANIFEST_NAME).read_text(encoding='utf-8'))
    except OSError:
        return None


def parse_commit(manifest: str | bytes) -> Commit | None:
    """The commit that a manifest records; None if the manifest is not one of ours."""
    try:
        content = json.loads(manifest)
        step = Step(content['step']['unit'], int(content['step']['number']), int(content['iteration']))
        number = int(content['commit']['number']) if 'commit' in content else 0
        has_all = content['format_version'] >= _CHECKSUM_VERSION
        return Commit(number, step.iteration, step, frozenset([*content['files'], MANIFEST_NAME]) if has_all else None)
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class TensorRecord:
    """A tensor as it was in memory before the write."""

    shape: tuple[int, ...]
    dtype: str
    crc32: int
    non_finite: int


@dataclass(frozen=True)
class FileRecord:
    """A file as committed; ``crc32`` and ``tensors`` are None if the manifest has none."""

    nbytes: int
    crc32: int | None = None
    tensors: dict[str, TensorRecord] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Manifest:
    """A validated manifest.

    Attributes:
        files: By relative path, with slashes.
        facts: All other fields.
    """

    version: int
    files: dict[str, FileRecord]
    facts: dict[str, Any] = field(repr=False)

    @property
    def has_checksums(self) -> bool:
        return self.version >= _CHECKSUM_VERSION

    @property
    def label(self) -> str:
        """The saved step, for messages."""
        step = self.facts.get('step')
        return f'{step.get("unit")} {step.get("number")}'[:80] if isinstance(step, dict) else 'unknown step'


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None if there is none.

    Raises:
        DamagedError: It is malformed.
    """
    path = folder / MANIFEST_NAME
    if not path.exists() and not path.is_symlink():
        return None
    return parse_manifest(strict_json.read(path), str(path))


def parse_manifest(content: Mapping[str, Any], where: str) -> Manifest:
    """Validate the content of a manifest.

    Args:
        where: Its path, for messages.

    Raises:
        DamagedError: It is malformed, or of a newer format.
    """
    version, files = content.get('format_version'), content.get('files')
    if type(version) is not int or version < 1:
        raise DamagedError(f'{where}: format_version is {str(version)[:80]}, expected a positive integer')
    if version > FORMAT_VERSION:
        supported = f'this version supports 1 to {FORMAT_VERSION}; upgrade xhf_hooks'
        raise DamagedError(f'{where}: format_version is {version}, but {supported}')
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
        raise DamagedError(f'{where}: nbytes is not a non-negative integer')
    if version < _CHECKSUM_VERSION:
        return FileRecord(found['nbytes'])
    tensors = found.get('tensors')
    if tensors is not None and not isinstance(tensors, dict):
        raise DamagedError(f'{where}: tensors is not an object')
    if tensors is None and name.endswith('.safetensors'):
        raise DamagedError(f'{where}: tensors is missing')
    records = None if tensors is None else {n: _tensor(n, t, where) for n, t in tensors.items()}
    return FileRecord(found['nbytes'], _crc(found, where), records)


def _tensor(name: str, found: Any, where: str) -> TensorRecord:
    where = f'{where}, tensor {name[:200]!r}'
    if not isinstance(found, dict):
        raise DamagedError(f'{where}: not an object')
    shape, dtype, non_finite = found.get('shape'), found.get('dtype'), found.get('non_finite')
    if not isinstance(shape, list) or not all(map(strict_json.is_count, shape)):
        raise DamagedError(f'{where}: shape is {str(shape)[:80]}, expected a list of sizes')
    if not isinstance(dtype, str):
        raise DamagedError(f'{where}: dtype is {str(dtype)[:80]}, expected a string')
    if not strict_json.is_count(non_finite):
        raise DamagedError(f'{where}: non_finite is {str(non_finite)[:80]}, expected a count')
    return TensorRecord(tuple(shape), dtype, _crc(found, where), non_finite)


def _crc(found: Mapping[str, Any], where: str) -> int:
    text = found.get('crc32')
    if not isinstance(text, str):
        raise DamagedError(f'{where}: crc32 is not a string')
    try:
        return from_hex(text)
    except ValueError as error:
        raise DamagedError(f'{where}: {error}') from None
