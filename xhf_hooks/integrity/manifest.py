"""``xhf_manifest.json``: what a folder of ours holds, with checksums; what makes it one. Written last."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xhf_hooks.files.regular_files import read_regular_text
from xhf_hooks.format.checksum import combine, crc32, to_hex
from xhf_hooks.planning.types import SavePlan, Step, WrittenTensor

MANIFEST_NAME = 'xhf_manifest.json'
#: 2: checksums of every file and tensor. 1 had the sizes of the files of weights.
FORMAT_VERSION = 2


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
        has_all = content['format_version'] >= 2
        return Commit(number, step.iteration, step, frozenset([*content['files'], MANIFEST_NAME]) if has_all else None)
    except (OSError, ValueError, KeyError, TypeError):
        return None
