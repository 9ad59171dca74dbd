"""The files of a tokenizer or processor, as they are written.

Where training did not change it, the files that it was loaded from are copied. Where it did, it saves itself, and the
step for older readers (:mod:`.older_readers`) puts what changed into the base's files. Either is taken only if the
installed transformers loads the same tokenizer from it: one that saves the same files, byte for byte but for how it was
loaded.

A call such as ``tokenizer(texts, truncation=True, max_length=512)`` leaves its truncation and padding in the tokenizer,
and ``save_pretrained`` writes them. They are not part of the tokenizer: what is written has those of the base.
"""

from __future__ import annotations

import errno
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from xhf_hooks.exporters.assets.base_files import LocatedBase, base_of
from xhf_hooks.exporters.assets.load_tokenizer import (
    CopiedFiles,
    PartAndTokenizer,
    load_processor,
    load_tokenizer,
    tokenizer_in,
    vocabulary_files,
)
from xhf_hooks.exporters.assets.older_readers import Files, older_tokenizer_files, with_older_processor_files, without
from xhf_hooks.format.loaded_files import (
    CHAT_TEMPLATE,
    MORE_TOKENIZER_FILES,
    PROCESSOR_FILES,
    PROCESSOR_TEMPLATE,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    TRANSFORMERS_TOKENIZER_FILES,
)
from xhf_hooks.system.files import errors_naming, write_missing

_OF_PROCESSOR = (*PROCESSOR_FILES, PROCESSOR_TEMPLATE, CHAT_TEMPLATE)
#: Fields that say how the tokenizer was loaded, which transformers 5 saves with it.
_OF_LOADING = ('is_local', 'local_files_only')

#: The truncation and padding in what tokenizers' ``Tokenizer.save`` writes; tokens, millions of them, come after it.
_OF_CALLS = re.compile(
    rb'(?<=\n  "truncation": )(?:null|\{.*?\n  \})(,\n  "padding": )(?:null|\{.*?\n  \})(?=,\n)', re.DOTALL
)

#: A full disk or quota, a disk that fails, no more open files.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)


def write_tokenizer(folder: Path, tokenizer: Any, base_model: LocatedBase) -> list[str]:
    """Write the tokenizer or processor, beside config.json if there is one, and return warnings. Runs on: rank 0.

    Args:
        base_model: The base of the model, used if the tokenizer does not know where it came from.
    """
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, PartAndTokenizer):
        write_tokenizer(folder, tokenizer.part, base_model)
        return write_tokenizer(folder, tokenizer.tokenizer, base_model)
    if isinstance(tokenizer, CopiedFiles):
        tokenizer.save_pretrained(folder)
        return []
    own = tokenizer_in(tokenizer)
    base_of_own = _base_of(own, base_model)
    saved = _saved(tokenizer, folder)
    if not isinstance(own, PreTrainedTokenizerBase) or _is_custom(tokenizer) or _is_custom(own):
        files = _with_truncation_of_base(saved, base_of_own)
        _put(with_older_processor_files(files, {}, base_model), folder)  # an image processor, or custom code
        return []
    known, files, warnings = base_model.written_tokenizers.get(tokenizer, (None, {}, []))
    if known != saved:
        saved_by_own = saved if own is tokenizer else _saved(own, folder)
        files, warnings = _tokenizer_files(own, saved_by_own, base_of_own, folder)
        if own is not tokenizer:
            files = {**files, **_processor_files(own, _besides(saved, saved_by_own), base_model, folder)}
        # Kept for the next save, since proving that the files give the same tokenizer takes seconds
        base_model.written_tokenizers[tokenizer] = saved, files, warnings
    _put(files, folder)
    return warnings


def copy_processor(folder: Path, tokenizer: Any | None, base_model: LocatedBase) -> None:
    """Copy the files of the base's processor that are not in the folder. Runs on: rank 0.

    Args:
        tokenizer: The tokenizer or processor that was written there, if any.
    """
    names = [name for name in PROCESSOR_FILES if base_model.has_file(name)]
    if names and getattr(tokenizer, 'chat_template', None) in (None, _chat_template(base_model)):
        names.append(PROCESSOR_TEMPLATE)  # it would override one that was replaced
    found = {name: base_model.read_file(name) for name in names}
    write_missing(folder, {name: content for name, content in found.items() if content is not None})


def _chat_template(base_model: LocatedBase) -> str | dict[str, str] | None:
    if (jinja := base_model.read_file(CHAT_TEMPLATE)) is not None:
        return jinja.decode()
    template = base_model.read_json(TOKENIZER_CONFIG).get('chat_template')
    return {one['name']: one['template'] for one in template} if isinstance(template, list) else template


def _tokenizer_files(tokenizer: Any, saved: Files, base_model: LocatedBase, folder: Path) -> tuple[Files, list[str]]:
    """The first form from which the same tokenizer is loaded, and warnings.

    Args:
        saved: The files that the tokenizer itself saves.
        folder: Where they are written, perhaps beside the model's config.json: AutoTokenizer also reads its type.
    """
    beside = {path.name: path.read_bytes() for path in folder.glob('config.json')}

    def saved_by_tokenizer_of(base: LocatedBase) -> Files | None:
        return _saved_again(partial(load_tokenizer, base, trust_remote_code=False), folder)

    def is_proven(form: Files) -> bool:
        with _temporary(folder) as temporary:
            _put({**form, **beside}, temporary)
            return _same(saved_by_tokenizer_of(LocatedBase.locate(str(temporary))), saved)

    base = saved_by_tokenizer_of(base_model)
    if base is not None and _same(base, saved):
        names = (*base, *TRANSFORMERS_TOKENIZER_FILES, *MORE_TOKENIZER_FILES, *vocabulary_files(tokenizer))
        copied = base_model.read_files(names)
        if is_proven(copied):
            return copied, []
    as_saved = _with_truncation_of_base(saved, base_model)
    older, warnings = older_tokenizer_files(tokenizer, saved, base, base_model)
    for form in (_with_truncation_of_base(form, base_model) for form in older):
        if form == as_saved or is_proven(form):
            return form, []
    return as_saved, warnings


def _processor_files(tokenizer: Any, files: Files, base_model: LocatedBase, folder: Path) -> Files:
    """A processor's files besides its tokenizer's: those of its base, if it was not changed."""
    home = base_of(tokenizer, tokenizer.name_or_path)
    base_model = home if any(home.has_file(name) for name in _OF_PROCESSOR) else base_model
    base = load_processor(base_model, trust_remote_code=False)
    whole = _saved_again(lambda: base, folder)
    own = _saved_again(partial(getattr, base, 'tokenizer', None), folder)
    before = {} if own is None or whole is None else _besides(whole, own)
    if files and before == files:
        return base_model.read_files(_OF_PROCESSOR)
    return with_older_processor_files(files, before, base_model)


def _besides(of_processor: Files, of_tokenizer: Files) -> Files:
    """The chat template is the processor's, too."""
    return {name: data for name, data in of_processor.items() if name not in of_tokenizer or name == CHAT_TEMPLATE}


def _base_of(tokenizer: Any | None, base_model: LocatedBase) -> LocatedBase:
    """The base that the tokenizer was loaded from, if that has a tokenizer; else the base of the model."""
    name = getattr(tokenizer, 'name_or_path', None)
    own = base_of(tokenizer, name) if isinstance(name, str) else LocatedBase()
    return own if own.has_file(TOKENIZER_CONFIG) else base_model


def _with_truncation_of_base(saved: Files, base_model: LocatedBase) -> Files:
    """The files, as :func:`_saved` returns them, with the truncation and padding of the base's tokenizer.json."""
    base = json.loads(base_model.read_files((TOKENIZER_JSON,)).get(TOKENIZER_JSON, b'{}'))
    if TOKENIZER_JSON not in saved or not (base.get('truncation') or base.get('padding')):
        return saved
    truncation, padding = (
        json.dumps(base.get(name), indent=2, ensure_ascii=False).replace('\n', '\n  ').encode()
        for name in ('truncation', 'padding')
    )
    content = _OF_CALLS.sub(lambda found: truncation + found[1] + padding, saved[TOKENIZER_JSON], count=1)
    return {**saved, TOKENIZER_JSON: content}


def _is_custom(tokenizer: Any) -> bool:
    return type(tokenizer).__module__.startswith('transformers_modules.')


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A temporary folder where the save goes, which needs room there anyway: other places may be full."""
    with tempfile.TemporaryDirectory(prefix='.xhf_hooks_', dir=folder) as name, errors_naming(Path(name)):
        yield Path(name)


def _saved(tokenizer: Any, folder: Path) -> Files:
    """The files that the tokenizer saves, with null in place of truncation and padding."""
    with _temporary(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        paths = sorted(path for path in temporary.rglob('*') if path.is_file())
        files = {path.relative_to(temporary).as_posix(): path.read_bytes() for path in paths}
    if TOKENIZER_JSON in files:
        files[TOKENIZER_JSON] = _OF_CALLS.sub(rb'null\1null', files[TOKENIZER_JSON], count=1)
    return files


def _saved_again(load: Callable[[], Any | None], folder: Path) -> Files | None:
    """What a tokenizer or processor saves once it is loaded, for a comparison; None, as of another one, if it cannot.

    Unless the disk is the reason, which says nothing about it.
    """
    try:
        loaded = load()
        return None if loaded is None or _is_custom(loaded) else _saved(loaded, folder)
    except OSError as error:
        if error.errno in _OF_THE_DISK:
            raise
    except Exception:  # of any type, from a tokenizer library that reads damaged or unknown files
        pass
    return None


def _same(found: Files | None, saved: Files) -> bool:
    """Whether the contents are equal, but for what depends on how the tokenizer was loaded."""
    if found is None or found.keys() != saved.keys():
        return False
    configs = [without(json.loads(files.get(TOKENIZER_CONFIG, b'{}')), *_OF_LOADING) for files in (found, saved)]
    return configs[0] == configs[1] and all(found[name] == saved[name] for name in saved if name != TOKENIZER_CONFIG)


def _put(files: Files, folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
