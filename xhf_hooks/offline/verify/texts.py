"""Compares what loaders read besides weights: configs, tokenizers, adapter settings, code."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json
from xhf_hooks.format.loaded_files import ADAPTER_CONFIG, CONFIG, CONFIGS
from xhf_hooks.system.library_settings import quiet

#: Fields that say where a model comes from, or which version wrote it; they change nothing that is loaded.
_OF_ORIGIN = {'_name_or_path', 'name_or_path', '_commit_hash', 'transformers_version', 'peft_version'}
#: Fields that change how a model is run, and not what it computes. Training sets them.
_WITHOUT_EFFECT = {'use_cache', 'inference_mode'}
_DTYPES = {'dtype', 'torch_dtype'}
#: The base of an adapter, which may lie in another folder on each machine.
_PLACE = 'base_model_name_or_path'
#: Sets of peft, which are written as lists in any order (peft ``tuners/lora/config.py``).
_SETS = {'target_modules', 'modules_to_save', 'exclude_modules'}
_LONGEST_VALUE = 60  # characters that are shown
_MOST_FIELDS = 5
_ABSENT = object()


def differing_texts(
    a: Mapping[str, Path], b: Mapping[str, Path], *, have_same_dtypes: bool
) -> tuple[list[str], list[str]]:
    """What makes two models of the same weights, and notes on other files that differ.

    The model is made by its config, the settings of its adapter and its code. Of a config that differs, each field is
    named, and its value in both.

    Args:
        a: The files of the first model by relative path; see :func:`.loaded_texts`.
        b: The same of the second one.
        have_same_dtypes: Whether the weights have the same dtypes. Otherwise those in the configs differ, too.

    Raises:
        OSError: A file cannot be read.
    """
    of_model: list[str] = []
    notes: list[str] = []
    for name in sorted(a.keys() | b.keys()):
        last = name.rpartition('/')[2]
        makes_model = last in CONFIGS or last.endswith('.py')
        if name not in b or name not in a:
            (of_model if makes_model else notes).append(f'{name} is only in {"B" if name in b else "A"}')
        elif a[name].read_bytes() != b[name].read_bytes():
            fields = _differing_fields(a[name], b[name], set() if have_same_dtypes else _DTYPES)
            if fields is None:
                (of_model if makes_model else notes).append(f'{name} differs')
            elif makes_model:
                where = '' if name == CONFIG else f'{name}: '
                of_model += [f'{where}{text}' for field, text in fields.items() if field != _PLACE]
                notes += [f'{name} differs: {text}' for field, text in fields.items() if field == _PLACE]
            elif fields:
                shown = [*fields.values()][:_MOST_FIELDS]
                more = f' and {len(fields) - _MOST_FIELDS} more' if len(fields) > _MOST_FIELDS else ''
                notes.append(f'{name} differs: {"; ".join(shown)}{more}')
    return of_model, notes


def _differing_fields(a: Path, b: Path, ignored: Collection[str]) -> dict[str, str] | None:
    """The fields whose values differ, with the values if they are short; None if the files are no JSON objects."""
    try:
        fields = [strict_json.read(path) for path in (a, b)]
    except DamagedError:
        return None
    as_read = [read for path in (a, b) if (read := _as_read(path)) is not None]
    one, other = (dict(_flat(content)) for content in (as_read if len(as_read) == 2 else fields))
    skipped = {*_OF_ORIGIN, *_WITHOUT_EFFECT, *ignored}
    differing = {}
    for path in sorted(one.keys() | other.keys()):
        here, there = one.get(path, _ABSENT), other.get(path, _ABSENT)
        if here != there and skipped.isdisjoint(path):
            values = ['not there' if value is _ABSENT else repr(value) for value in (here, there)]
            name = '.'.join(path)
            differing[name] = name if max(map(len, values)) > _LONGEST_VALUE else f'{name} {", ".join(values)}'
    return differing


def _as_read(path: Path) -> dict[str, Any] | None:
    """A config as the installed library reads it; None where it has no such class, or the class is custom code.

    So defaults, and what only other versions need (exporters/assets/older_readers.py), make no difference, at any
    depth.
    """
    read: Any
    try:
        with quiet():
            if path.name == CONFIG:
                from transformers import AutoConfig

                read = AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
            elif path.name == ADAPTER_CONFIG:
                from peft import PeftConfig

                read = PeftConfig.from_pretrained(str(path.parent))
            else:
                return None
        return dict(read.to_dict())
    except Exception:  # of any type, from the library's checks of fields
        return None


def _flat(fields: Mapping[str, Any], *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The fields, also those of parts of a config, by path; what peft has as a set in any order."""
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _flat({str(key): inner for key, inner in value.items()}, *above, name)
        elif name in _SETS and isinstance(value, (list, set)):
            yield (*above, name), sorted(value, key=str)
        else:
            yield (*above, name), value
