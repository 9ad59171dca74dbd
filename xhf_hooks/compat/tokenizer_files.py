"""The tokenizer of a save, and its files, so that transformers 4, vLLM and llama.cpp read them as well.

transformers 5 saves another class, other fields and fewer files than transformers 4 can read. Where training did not
change the tokenizer, the files that it was loaded from are copied. Where it did, the fields that changed are written
into the base's tokenizer_config.json. Either is taken only if the installed transformers loads the same tokenizer from
it: one that saves the same files, byte for byte but for how it was loaded.

A call such as ``tokenizer(texts, truncation=True, max_length=512)`` leaves its truncation and padding in the tokenizer,
and ``save_pretrained`` writes them. They are not part of the tokenizer: what is written has those of the base.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from xhf_hooks.base_model.files import (
    PROCESSOR_FILES,
    VOCABULARY_FILES,
    LocatedBase,
    base_of,
)
from xhf_hooks.base_model.tokenizer import CopiedFiles, PartAndTokenizer, load_tokenizer
from xhf_hooks.system.files import errors_naming

CONFIG = 'tokenizer_config.json'
JSON = 'tokenizer.json'
JINJA = 'chat_template.jinja'
_OTHERS = (CONFIG, JSON, JINJA, 'added_tokens.json', 'special_tokens_map.json')
_EXTRA = 'extra_special_tokens'
_ADDITIONAL = 'additional_special_tokens'
_DECODER = 'added_tokens_decoder'
_OF_PROCESSOR = (*PROCESSOR_FILES, 'chat_template.json', JINJA)
#: The file that transformers 5 writes of a processor, and the parts in it of which transformers 4 reads other files.
PROCESSOR = 'processor_config.json'
_PARTS = {
    'preprocessor_config.json': ('image_processor', 'feature_extractor'),
    'video_preprocessor_config.json': ('video_processor',),
}
#: Fields that say how the tokenizer was loaded, which transformers 5 saves with it.
_OF_LOADING = ('is_local', 'local_files_only')

#: The truncation and padding in what tokenizers' ``Tokenizer.save`` writes; tokens, millions of them, come after it.
_OF_CALLS = re.compile(
    rb'(?<=\n  "truncation": )(?:null|\{.*?\n  \})(,\n  "padding": )(?:null|\{.*?\n  \})(?=,\n)', re.DOTALL
)

#: A full disk or quota, a disk that fails, no more open files.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)

#: Content by name.
_Files = dict[str, bytes]
#: What was last written of each tokenizer and processor, and warnings, by what itself saves and where its base is:
#: proving it takes seconds with large vocabularies, and each save writes it.
_WRITTEN: WeakKeyDictionary[Any, tuple[Any, tuple[_Files, list[str]]]] = WeakKeyDictionary()


def write_tokenizer(folder: Path, tokenizer: Any, base_model: LocatedBase) -> list[str]:
    """Write the tokenizer or processor, beside config.json if there is one, and return warnings. Runs on: rank 0.

    Args:
        base_model: The base of the model, used if the tokenizer does not know where it came from.
    """
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, CopiedFiles):
        tokenizer.save_pretrained(folder)
        return []
    if isinstance(tokenizer, PartAndTokenizer):
        tokenizer.part.save_pretrained(folder)
        return write_tokenizer(folder, tokenizer.tokenizer, base_model)
    own = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else getattr(tokenizer, 'tokenizer', None)
    if not isinstance(own, PreTrainedTokenizerBase) or _is_custom(tokenizer) or _is_custom(own):
        files = _with_truncation_of_base(_saved(tokenizer, folder), _base_of(own, base_model))
        _put(_with_older_files(files, {}, base_model), folder)  # an image processor, or custom code
        return []
    key = base_model.name, _saved(tokenizer, folder)
    known, written = _WRITTEN.get(tokenizer, (None, ({}, [])))
    if known != key:
        saved = _saved(own, folder)
        beside = {path.name: path.read_bytes() for path in folder.glob('config.json')}
        files, warnings = _chosen(own, saved, base_model, beside, folder)
        if own is not tokenizer:
            files = {**files, **_of_processor(own, _besides(key[1], saved), base_model, folder)}
        written = files, warnings
        _WRITTEN[tokenizer] = key, written
    files, warnings = written
    _put(files, folder)
    return warnings


def _chosen(
    tokenizer: Any, saved: _Files, base_model: LocatedBase, beside: _Files, folder: Path
) -> tuple[_Files, list[str]]:
    """The first form from which the same tokenizer is loaded, and warnings.

    Args:
        saved: The files that the tokenizer itself saves.
        beside: The config.json of the model: AutoTokenizer also reads the model's type.
        folder: A folder for temporary files.
    """
    import transformers

    def is_proven(form: _Files) -> bool:
        with _temporary(folder) as temporary:
            _put({**form, **beside}, temporary)
            return _same(_saved_again(LocatedBase.locate(str(temporary)), folder), saved)

    base_model = _base_of(tokenizer, base_model)
    base = _saved_again(base_model, folder)
    if base is not None and _same(base, saved):
        copied = base_model.read_files((*base, *_OTHERS, *_vocabularies(tokenizer)))
        if is_proven(copied):
            return copied, []
    as_saved = _with_truncation_of_base(saved, base_model)
    if not hasattr(transformers, 'TokenizersBackend'):  # transformers 4 writes what it reads
        return as_saved, []
    forms = [_in_words_of_base(tokenizer, saved, {}, LocatedBase())]
    if base is not None:
        forms.insert(0, _in_words_of_base(tokenizer, saved, base, base_model))
    for form in (_with_truncation_of_base(form, base_model) for form in forms):
        if form == as_saved or is_proven(form):
            return form, []
    needed = json.loads(saved[CONFIG])['tokenizer_class']
    return as_saved, [f'transformers 4 may not read the tokenizer: it needs the class {needed}']


def _of_processor(tokenizer: Any, files: _Files, base_model: LocatedBase, folder: Path) -> _Files:
    """A processor's files besides its tokenizer's: those of its base, if it was not changed.

    Where it was, and the base has the files that transformers 4 reads and 5 no longer writes, they get what changed.
    """
    from transformers import AutoProcessor

    home = base_of(tokenizer, tokenizer.name_or_path)
    base_model = home if any(home.has_file(name) for name in _OF_PROCESSOR) else base_model
    base = None
    with contextlib.suppress(Exception):  # any failure counts as another processor
        base = AutoProcessor.from_pretrained(base_model.loadable_name(), local_files_only=True)
    if base is None or _is_custom(base):
        return _with_older_files(files, {}, base_model)
    saved, own = (_saved_if_it_can(one, folder) for one in (base, getattr(base, 'tokenizer', None)))
    before = _besides(saved, own) if saved is not None and own is not None else {}
    return base_model.read_files(_OF_PROCESSOR) if before == files else _with_older_files(files, before, base_model)


def _with_older_files(files: _Files, before: _Files, base_model: LocatedBase) -> _Files:
    """The files of a processor, with its parts in files of their own where its base has these, as transformers 4 has.

    They are the base's with the fields that changed. transformers 4.48 cannot read them in processor_config.json.

    Args:
        before: The files that the base's processor saves; fields that they lack count as changed.
    """
    now, then = (json.loads(each.get(PROCESSOR, b'{}')) for each in (files, before))
    older = {}
    for name, parts in _PARTS.items():
        part = next((part for part in parts if part in now), None)
        found = base_model.read_files((name,)) if name not in files else {}
        if part is None or not found:
            continue
        known, fields = then.get(part, {}), now.pop(part)
        changed = {field: value for field, value in fields.items() if field not in known or known[field] != value}
        removed = [field for field in known if field not in fields]
        older[name] = _json_bytes(_without(json.loads(found[name]), *removed) | changed)
    return {**files, **older, PROCESSOR: _json_bytes(now)} if older else files


def _json_bytes(fields: Mapping[str, Any]) -> bytes:
    """A JSON file as transformers writes it."""
    return (json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + '\n').encode()


def _besides(of_processor: _Files, of_tokenizer: _Files) -> _Files:
    """The chat template is the processor's, too."""
    return {name: data for name, data in of_processor.items() if name not in of_tokenizer or name == JINJA}


def _in_words_of_base(tokenizer: Any, saved: _Files, base_saved: _Files, base_model: LocatedBase) -> _Files:
    """The base's tokenizer_config.json with the fields that changed, and its vocabulary if that did not change.

    Without a base, what the tokenizer saves, in words of transformers 4.
    """
    base = json.loads(base_model.read_files((CONFIG,)).get(CONFIG, b'{}'))
    now, before = json.loads(saved[CONFIG]), json.loads(base_saved.get(CONFIG, b'{}'))
    kept = {name: value for name, value in base.items() if name in now or name not in before}
    changed = {name: value for name, value in now.items() if name not in before or before[name] != value}
    special = {name: now[name] for name in tokenizer.special_tokens_map if name in now and name not in base}
    if any(name not in now and name in before for name in (_EXTRA, _ADDITIONAL)):  # all were removed
        kept = _without(kept, _EXTRA, _ADDITIONAL)
    if _EXTRA in changed:
        kept = _without(kept, _ADDITIONAL)
    if _json_part(saved, 'post_processor') != _json_part(base_saved, 'post_processor'):
        for name in ('add_bos_token', 'add_eos_token'):  # transformers 5 does not save them, 4 builds with them
            if name in base:
                kept[name] = getattr(tokenizer, name, base[name])
    if _DECODER in base:
        tokens = tokenizer.added_tokens_decoder.items()
        kept[_DECODER] = {str(token_id): token.__getstate__() for token_id, token in tokens}
    result = _without({**kept, **special, **changed}, 'chat_template') | _template(tokenizer, base, base_model)
    if result.get('tokenizer_class') == 'TokenizersBackend':  # its name since transformers 5
        result['tokenizer_class'] = 'PreTrainedTokenizerFast'
    if isinstance(result.get(_EXTRA), list):  # transformers 4 expects a dict, of names
        result[_ADDITIONAL] = result.pop(_EXTRA)
    form = {**saved, CONFIG: _json_bytes(result)}
    if _json_part(saved, 'model') == _json_part(base_saved, 'model'):
        form = {**base_model.read_files(_vocabularies(tokenizer)), **form}
    return form


def _template(tokenizer: Any, beside: Mapping[str, Any], base_model: LocatedBase) -> dict[str, Any]:
    """The field ``chat_template``, unless the base has the template only in a file of its own."""
    template = tokenizer.chat_template
    if not template or ('chat_template' not in beside and base_model.has_file(JINJA)):
        return {}
    several = isinstance(template, dict)
    return {'chat_template': [{'name': n, 'template': t} for n, t in template.items()] if several else template}


def _base_of(tokenizer: Any | None, base_model: LocatedBase) -> LocatedBase:
    """The base that the tokenizer was loaded from, if that has a tokenizer; else the base of the model."""
    name = getattr(tokenizer, 'name_or_path', None)
    own = base_of(tokenizer, name) if isinstance(name, str) else LocatedBase()
    return own if own.has_file(CONFIG) else base_model


def _without_truncation(tokenizer_json: bytes) -> bytes:
    """tokenizer.json, as ``save_pretrained`` writes it, with null in place of truncation and padding."""
    return _OF_CALLS.sub(rb'null\1null', tokenizer_json, count=1)


def _with_truncation_of_base(saved: _Files, base_model: LocatedBase) -> _Files:
    """The files, as :func:`_saved` returns them, with the truncation and padding of the base's tokenizer.json."""
    base = json.loads(base_model.read_files((JSON,)).get(JSON, b'{}'))
    if JSON not in saved or not (base.get('truncation') or base.get('padding')):
        return saved
    truncation, padding = (
        json.dumps(base.get(name), indent=2, ensure_ascii=False).replace('\n', '\n  ').encode()
        for name in ('truncation', 'padding')
    )
    return {**saved, JSON: _OF_CALLS.sub(lambda found: truncation + found[1] + padding, saved[JSON], count=1)}


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names}


def _json_part(saved: _Files, name: str) -> Any:
    """A part of tokenizer.json; None if there is no such file."""
    return json.loads(saved[JSON]).get(name) if JSON in saved else None


def _vocabularies(tokenizer: Any) -> tuple[str, ...]:
    return (*VOCABULARY_FILES, *(name for name in tokenizer.vocab_files_names.values() if name not in _OTHERS))


def _is_custom(tokenizer: Any) -> bool:
    return type(tokenizer).__module__.startswith('transformers_modules.')


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A temporary folder where the save goes, which needs room there anyway: other places may be full."""
    with tempfile.TemporaryDirectory(prefix='.xhf_hooks_', dir=folder) as name, errors_naming(Path(name)):
        yield Path(name)


def _saved(tokenizer: Any, folder: Path) -> _Files:
    """The files that the tokenizer saves, without truncation and padding."""
    with _temporary(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        paths = sorted(path for path in temporary.rglob('*') if path.is_file())
        files = {path.relative_to(temporary).as_posix(): path.read_bytes() for path in paths}
    if JSON in files:
        files[JSON] = _without_truncation(files[JSON])
    return files


def _saved_if_it_can(other: Any | None, folder: Path) -> _Files | None:
    """The files that the tokenizer saves; None if saving fails for any other reason than the disk."""
    if other is None:
        return None
    try:
        return _saved(other, folder)
    except OSError as error:
        if error.errno in _OF_THE_DISK:  # which says nothing about the tokenizer
            raise
    except Exception:  # of any type, from a tokenizer library that reads damaged or unknown files
        pass
    return None


def _saved_again(base_model: LocatedBase, folder: Path) -> _Files | None:
    """The files that the base's tokenizer saves, for a comparison: a failure counts as another tokenizer."""
    try:
        loaded = load_tokenizer(base_model, trust_remote_code=False)
    except Exception:  # of any type, from a tokenizer library that reads damaged or unknown files
        return None
    return None if loaded is None or _is_custom(loaded) else _saved_if_it_can(loaded, folder)


def _same(found: _Files | None, saved: _Files) -> bool:
    """Whether the contents are equal, but for what depends on how the tokenizer was loaded."""
    if found is None or found.keys() != saved.keys():
        return False
    configs = [_without(json.loads(files.get(CONFIG, b'{}')), *_OF_LOADING) for files in (found, saved)]
    return configs[0] == configs[1] and all(found[name] == saved[name] for name in saved if name != CONFIG)


def _put(files: _Files, folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
