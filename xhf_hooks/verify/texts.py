"""Compares what loaders read besides weights: configs, tokenizers, adapter settings, code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json
from xhf_hooks.format.text import some

#: Keys that say where a model comes from, or which version wrote it; they change nothing that is loaded.
_OF_ORIGIN = {'_name_or_path', 'name_or_path', '_commit_hash', 'transformers_version', 'peft_version'}
#: What says again what rope_parameters says, for readers with transformers 4 (assets/older_readers.py).
_OLDER_ROPE = {'rope_theta', 'rope_scaling'}
#: Sets of peft, which are written as lists in any order (peft ``tuners/lora/config.py``).
_SETS = {'target_modules', 'modules_to_save', 'exclude_modules'}
_LONGEST_VALUE = 60  # characters that a note shows
_ABSENT = object()


def differing_texts(a: Mapping[str, Path], b: Mapping[str, Path]) -> list[str]:
    """A line for each file that differs, or that only one of two models has.

    Args:
        a: The files of the first model by relative path; see :func:`.loaded_texts`.
        b: The same of the second one.

    Raises:
        OSError: A file cannot be read.
    """
    lines = []
    for name in sorted(a.keys() | b.keys()):
        if name not in b or name not in a:
            lines.append(f'{name} is only in {"B" if name in b else "A"}')
        elif a[name].read_bytes() != b[name].read_bytes():
            found = _differing_keys(a[name], b[name])
            if found is None:
                lines.append(f'{name} differs')
            elif found:
                lines.append(f'{name} differs: {some(found)}')
    return lines


def _differing_keys(a: Path, b: Path) -> list[str] | None:
    """The keys whose values differ, and the values if they are short; None if the files are no JSON objects."""
    try:
        one, other = strict_json.read(a), strict_json.read(b)
    except DamagedError:
        return None
    keys = sorted((one.keys() | other.keys()) - _OF_ORIGIN)
    if 'rope_parameters' in one and 'rope_parameters' in other:
        keys = [key for key in keys if key not in _OLDER_ROPE]
    values = {key: [_plain(key, content.get(key, _ABSENT)) for content in (one, other)] for key in keys}
    return [_told(key, one, other) for key, (here, there) in values.items() if here != there]


def _plain(key: str, value: Any) -> Any:
    """The value of a key without keys of origin, also in parts of a config; what peft has as a set in any order."""
    if isinstance(value, dict):
        return {name: _plain(name, inner) for name, inner in value.items() if name not in _OF_ORIGIN}
    return sorted(value, key=str) if key in _SETS and isinstance(value, list) else value


def _told(key: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    values = ['not there' if key not in content else repr(content[key]) for content in (one, other)]
    return key if max(map(len, values)) > _LONGEST_VALUE else f'{key} ({" and ".join(values)})'
