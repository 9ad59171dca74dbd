"""Answers: what a save holds, in a form that is compared with those recorded in tests/golden.

An answer has the content of each file of a save. Of weights: name, dtype, shape and digest of each tensor, in
the order of the file. Of JSON: each field, or the digest of a longer one. Of another file: its digest.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import defaultdict
from itertools import takewhile
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parents[2] / 'golden' / 'answers.json'
#: In place of a case: the versions of other packages with which answers were recorded.
PACKAGES = 'packages'
#: Of files: they name versions.
_VERSIONS = ('transformers_version', 'peft_version')
#: Of adapter_config.json, those that every version of peft has.
_OF_ADAPTERS = ('alpha_pattern', 'auto_mapping', 'base_model_name_or_path', 'bias', 'fan_in_fan_out', 'inference_mode')
_OF_ADAPTERS += ('lora_alpha', 'modules_to_save', 'peft_type', 'r', 'rank_pattern', 'target_modules', 'task_type')
_OF_ADAPTERS += ('target_parameters', 'use_dora', 'use_rslora')
#: The exporter does not make it.
_NOT_COMPARED = ('xhf_manifest.json',)
#: Longer fields are recorded by their digests.
_LONGEST = 24

Content = Any
Answer = dict[str, Content]
Answers = dict[str, Answer]


def answer_of(folder: Path, *, replaced: Path, with_bytes: bool = True) -> Answer:
    """What a save holds.

    Args:
        replaced: A temporary folder, whose name in files does not matter.
        with_bytes: Whether the values of tensors are recorded.
    """
    files = (path for path in sorted(folder.rglob('*')) if path.is_file() and path.name not in _NOT_COMPARED)
    return {
        path.relative_to(folder).as_posix(): _content(path.name, path.read_bytes(), str(replaced), with_bytes)
        for path in files
    }


def _content(name: str, data: bytes, replaced: str, with_bytes: bool) -> Content:
    if name.endswith('.safetensors'):
        return _tensors(data, with_bytes)
    data = data.replace(replaced.encode(), b'TMP')
    if not name.endswith('.json'):
        return _digest(data)
    fields = json.loads(data)
    if not isinstance(fields, dict):
        return _short(fields)
    if name == 'adapter_config.json':
        fields = {key: fields.get(key) for key in _OF_ADAPTERS}
        for key, value in fields.items():  # sets in memory
            fields[key] = sorted(value) if isinstance(value, list) else value
    return {key: _short(value) for key, value in fields.items() if key not in _VERSIONS}


def _short(value: Any) -> Any:
    text = json.dumps(value)
    return value if len(text) <= _LONGEST and not isinstance(value, dict) else f'#{_digest(text.encode())}'


def _tensors(data: bytes, with_bytes: bool) -> list[str]:
    (length,) = struct.unpack('<Q', data[:8])
    header = json.loads(data[8 : 8 + length])
    told = [f'metadata {json.dumps(header.pop("__metadata__", None))}']
    end = 0
    for name, tensor in header.items():
        start, stop = tensor['data_offsets']
        assert start == end, f'{name} does not start where its predecessor ends'
        end = stop
        shape = 'x'.join(map(str, tensor['shape'])) or '-'
        digest = f' {_digest(data[8 + length + start : 8 + length + stop])}' if with_bytes else ''
        told.append(f'{name} {tensor["dtype"]} {shape}{digest}')
    return told


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def minor_version(version: str) -> str:
    """Such as 4.57, whose answers are those of 4.57.6."""
    return '.'.join(version.split('.')[:2])


def read_answers(path: Path = ANSWERS) -> dict[str, Answers]:
    """All recorded answers, by version of transformers and case."""
    answers: dict[str, Answers] = defaultdict(lambda: defaultdict(dict))
    if path.exists():
        for case, files in json.loads(path.read_text()).items():
            for file, contents in files.items():
                for versions, content in contents.items():
                    for version in versions.split():
                        answers[version][case][file] = _unpacked(content) if isinstance(content, list) else content
    return answers


def write_answers(answers: dict[str, Answers], path: Path = ANSWERS) -> None:
    """Write them with a line for each content: versions with the same content share it."""
    shared: dict[str, dict[str, dict[str, list[str]]]] = {}
    for version in sorted(answers, key=lambda version: [int(part) for part in version.split('.')]):
        for case, answer in answers[version].items():
            for file, content in answer.items():
                packed = _packed(content) if isinstance(content, list) else content
                line = json.dumps(packed, ensure_ascii=False, separators=(',', ':'))
                shared.setdefault(case, {}).setdefault(file, {}).setdefault(line, []).append(version)
    lines = ['{']
    for case in sorted(shared):
        lines.append(f'{json.dumps(case)}: {{')
        for file in sorted(shared[case]):
            lines.append(f' {json.dumps(file)}: {{')
            lines += [f'  "{" ".join(versions)}": {line},' for line, versions in shared[case][file].items()]
            lines[-1] = lines[-1].removesuffix(',')
            lines.append(' },')
        lines[-1] = ' }'
        lines.append('},')
    lines[-1] = '}'
    path.write_text('\n'.join([*lines, '}', '']))


def _packed(lines: list[str]) -> list[str]:
    """Names without the parts that they begin with like their predecessor, as ``^4.weight``: half of the size."""
    packed, before = [], ['']
    for line in lines:
        name, space, rest = line.partition(' ')
        parts = name.split('.')
        n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, parts[:-1], strict=False)))
        packed.append('.'.join([f'^{n_same}', *parts[n_same:]] if n_same else parts) + space + rest)
        before = parts
    return packed


def _unpacked(packed: list[str]) -> list[str]:
    lines, before = [], ['']
    for line in packed:
        name, space, rest = line.partition(' ')
        parts = name.split('.')
        if parts[0].startswith('^'):
            parts = [*before[: int(parts[0][1:])], *parts[1:]]
        lines.append('.'.join(parts) + space + rest)
        before = parts
    return lines


def differences(found: Answer, expected: Answer) -> list[str]:
    """Each difference of a save from its recorded answer in a line, by file and tensor or field."""
    lines = []
    for file in sorted(found.keys() | expected.keys()):
        if file not in found or file not in expected:
            lines.append(f'{file}: {"not written" if file in expected else "not recorded"}')
        elif found[file] != expected[file]:
            lines += [f'{file}: {line}' for line in _of_content(found[file], expected[file])]
    return lines


def _of_content(found: Content, expected: Content) -> list[str]:
    if isinstance(found, list) and isinstance(expected, list):
        old, new = (dict(line.partition(' ')[::2] for line in one) for one in (expected, found))
        if old == new:
            moved = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
            return [f'another order, from {found[moved].split(" ")[0]} on, where {expected[moved].split(" ")[0]} was']
    elif isinstance(found, dict) and isinstance(expected, dict):
        old, new = expected, found
        if old == new:
            return ['another order of fields']
    else:
        return [f'{found}, recorded is {expected}']
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key) or (key in old) != (key in new):
            lines.append(f'{key}: {new.get(key, "missing")}, recorded is {old.get(key, "nothing")}')
    return lines
