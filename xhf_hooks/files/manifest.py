"""``xhf_manifest.json``: files, tensors and checksums of a saved folder. Written last, it marks the folder complete.

:func:`read_manifest` treats it as untrusted input.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json
from xhf_hooks.format.checksum import combine, crc32, from_hex, to_hex
from xhf_hooks.format.index import MANIFEST_NAME, WEIGHTS_SUFFIX
from xhf_hooks.format.json_text import json_text
from xhf_hooks.planning.plan import SavePlan, WrittenSave
from xhf_hooks.planning.types import Step, WrittenTensor
from xhf_hooks.system.versions import package_versions

FORMAT_VERSION = 2


class CommitRecord(NamedTuple):
    """What a manifest says of the commit, besides the files.

    Attributes:
        step: The step of the save.
        number: Counts commits under one final name, over all runs; 0 if the manifest does not have it.
        run: Identifies the training. A run that was resumed has that of the run before it; '' if the manifest does not
            have it.
        name: The final name under which it was committed; '' if the manifest does not have it.
        keep_every: The option ``keep_every`` of the run.
    """

    step: Step
    number: int = 0
    run: str = ''
    name: str = ''
    keep_every: int | None = None

    def is_later(self, other: CommitRecord) -> bool:
        """Whether this save was committed later than the other, under the same final name."""
        return (self.number, self.step.iteration) > (other.number, other.step.iteration)


def describe_folder(folder: Path, save: WrittenSave, commit: CommitRecord) -> bytes:
    """Complete a staging folder, which has all but indexes, and make its manifest. Runs on: rank 0.

    Weights are not read: their checksums were computed in memory before the write.
    """
    plan, step = save.plan, save.step
    for name, index in plan.indexes.items():  # the shard of each tensor; a save in a single file has none
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json_text(index, indent=2, depth=2, sort_keys=True) + '\n', encoding='utf-8')
    content = {
        'format_version': FORMAT_VERSION,
        'step': {'unit': step.unit, 'number': step.number},
        'iteration': step.iteration,
        'packages': package_versions(),
        **save.manifest_fields,
        'commit': {
            'number': commit.number,
            'run': commit.run,
            'name': commit.name,
            **({} if commit.keep_every is None else {'keep_every': commit.keep_every}),
        },
        'files': {**_describe_weights(plan, save.tensors), **_describe_others(folder, {f.name for f in plan.files})},
    }
    return (json_text(content, indent=1, depth=4) + '\n').encode()  # a line for each tensor


def describe_best(metric: str, score: float, greater_is_better: bool) -> dict[str, Any]:
    """The fields of the manifest of a best save about its score; NaN and infinity as text."""
    written = float(score) if math.isfinite(score) else str(float(score))
    return {'best': {'metric': metric, 'score': written, 'rule': 'greater' if greater_is_better else 'less'}}


def _describe_weights(plan: SavePlan, tensors: Sequence[WrittenTensor]) -> dict[str, Any]:
    copied = {(one.placement.file, one.placement.hf_name) for one in plan.copied}
    inside: dict[str, list[WrittenTensor]] = defaultdict(list)
    for tensor in sorted(tensors, key=lambda tensor: tensor.placement.offset):
        inside[tensor.placement.file].append(tensor)
    described = {}
    for file in plan.files:
        crc, tensors_in_file = crc32(file.header), {}
        for tensor in inside[file.name]:
            placement = tensor.placement
            crc = combine(crc, tensor.crc32, placement.nbytes)
            tensors_in_file[placement.hf_name] = {
                'shape': list(placement.shape),
                'dtype': placement.dtype,
                'crc32': to_hex(tensor.crc32),
                'non_finite': tensor.non_finite,
            }
            if (file.name, placement.hf_name) in copied:
                tensors_in_file[placement.hf_name]['copied_from_base'] = True
        described[file.name] = {'nbytes': file.nbytes, 'crc32': to_hex(crc), 'tensors': tensors_in_file}
    return described


def _describe_others(folder: Path, weights: set[str]) -> dict[str, Any]:
    found = {}
    for path in sorted(folder.rglob('*')):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in weights and name != MANIFEST_NAME:
            data = path.read_bytes()
            found[name] = {'nbytes': len(data), 'crc32': to_hex(crc32(data))}
    return found


class TensorRecord(NamedTuple):
    """A tensor as it was in memory before the write.

    Attributes:
        copied_from_base: Whether it was not the model's, but copied from the base, since the class does not load it.
    """

    crc32: int
    non_finite: int
    copied_from_base: bool = False


@dataclass(frozen=True)
class FileRecord:
    """A file as committed, and the tensors in it."""

    nbytes: int
    crc32: int
    tensors: dict[str, TensorRecord] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Manifest:
    """A validated manifest.

    Attributes:
        files: The files by relative path, with slashes. The manifest itself is not among them.
    """

    files: dict[str, FileRecord]
    commit: CommitRecord
    manifest_fields: dict[str, Any] = field(repr=False)

    @property
    def step(self) -> Step:
        """The step of the save."""
        return self.commit.step


def read_undamaged_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None if it is missing or damaged, so that the folder is no save of this package.

    Raises:
        OSError: It cannot be read.
    """
    try:
        return read_manifest(folder)
    except DamagedError:
        return None


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None if it is missing. Unlike :func:`read_undamaged_manifest`, raises if it is damaged.

    Raises:
        DamagedError: It is malformed.
        OSError: It cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):  # no other error means that there is none
        if path.is_symlink():
            raise DamagedError(f'{path}: a link to a file that does not exist') from None
        return None
    return parse_manifest(data, str(path))


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Validate a manifest.

    Raises:
        DamagedError: It is malformed, or of another format.
    """
    content = strict_json.parse(data, where)
    version = content.get('format_version')
    if version != FORMAT_VERSION:
        raise DamagedError(
            f'{where}: format_version is {str(version)[:80]}, expected {FORMAT_VERSION}; if it is newer, upgrade '
            f'xhf_hooks'
        )
    try:
        files = {name: _file(name, found) for name, found in content['files'].items()}
        step = Step(str(content['step']['unit']), _count(content['step']['number']), _count(content['iteration']))
        found = content.get('commit', {})
        keep_every = _count(found.get('keep_every', 0)) or None
        commit = CommitRecord(
            step, _count(found.get('number', 0)), str(found.get('run', '')), str(found.get('name', '')), keep_every
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f'{where}: malformed: {type(error).__name__}: {str(error)[:200]}') from None
    return Manifest(files, commit, {key: value for key, value in content.items() if key != 'files'})


def _file(name: str, found: Any) -> FileRecord:
    path = PurePosixPath(name)
    if not name or '\0' in name or path.is_absolute() or '..' in path.parts or str(path) != name or name == '.':
        raise ValueError(f'file {name!r}: not a path inside the folder')
    tensors = {}
    if name.endswith(WEIGHTS_SUFFIX):
        for tensor, known in found['tensors'].items():
            tensors[tensor] = TensorRecord(
                from_hex(known['crc32']), _count(known['non_finite']), known.get('copied_from_base') is True
            )
    return FileRecord(_count(found['nbytes']), from_hex(found['crc32']), tensors)


def _count(value: Any) -> int:
    if not strict_json.is_count(value):
        raise ValueError(f'expected a size or count, found {value!r}')
    return value
