"""``xhf_manifest.json``: what a folder of ours holds, with checksums; what makes it one. Written last.

Who reads it to verify a folder takes it for anyone's text until it is checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.files.regular_files import read_regular_text
from xhf_hooks.format import strict_json
from xhf_hooks.format.checksum import combine, crc32, from_hex, to_hex
from xhf_hooks.planning.types import SavePlan, Step, WrittenTensor

MANIFEST_NAME = 'xhf_manifest.json'
#: 2: checksums of every file and tensor. 1 had the sizes of the files of weights.
FORMAT_VERSION = _CHECKSUM_VERSION = 2


def describe_folder(
    folder: Path, plan: SavePlan, tensors: Sequence[WrittenTensor], step: Step, facts: dict[str, Any]
) -> dict[str, Any]:
    """The manifest of a complete staged folder. Runs on: rank 0.

    Weights are not read for it: their checksums were taken from memory, before they were written.
    """
    return {
        'format_version': FORMAT_VERSION,
        'step': {'unit': step.unit, 'number': step.number},
        'iteration': step.iteration,
        **facts,
        'files': {**_describe_weights(plan, tensors), **_describe_others(folder, {f.name for f in plan.files})},
    }


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write it and flush it to disk. Runs on: rank 0."""
    with (folder / MANIFEST_NAME).open('w', encoding='utf-8') as file:
        json.dump(content, file, indent=1)
        file.write('\n')
        file.flush()
        os.fsync(file.fileno())


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
    """Which commit a folder is the outcome of. The larger of two is the later.

    Attributes:
        number: Counts the commits under one final name, over all runs; 0 where no manifest says it.
        step: What was saved.
        files: The files that the commit put there; None where the manifest names only some of them.
    """

    number: int
    iteration: int
    step: Step = field(compare=False)
    files: frozenset[str] | None = field(compare=False, repr=False)


def read_commit(folder: Path) -> Commit | None:
    """What a whole folder of ours is; None when it is not one."""
    try:
        content = json.loads(read_regular_text(folder / MANIFEST_NAME))
        step = Step(content['step']['unit'], int(content['step']['number']), int(content['iteration']))
        number = int(content['commit']['number']) if 'commit' in content else 0
        has_all = content['format_version'] >= _CHECKSUM_VERSION
        return Commit(number, step.iteration, step, frozenset([*content['files'], MANIFEST_NAME]) if has_all else None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
        return self.version >= _CHECKSUM_VERSION

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
    if version > FORMAT_VERSION:
        known = f'this program knows 1 to {FORMAT_VERSION}: use a newer one'
        raise DamagedError(f'{where}: format_version {version}; {known}')
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
    if version < _CHECKSUM_VERSION:
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
        return from_hex(text)
    except ValueError as error:
        raise DamagedError(f'{where}: {error}') from None
