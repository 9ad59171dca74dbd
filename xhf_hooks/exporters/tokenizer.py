"""The tokenizer of a save, and its files, so that transformers 4, vLLM and llama.cpp read them as well.

transformers 5 saves another class, other fields and fewer files than transformers 4 can read. Where training did not
change the tokenizer, the files that it was loaded from are copied. Where it did, the fields that changed are written
into the base's tokenizer_config.json. Either is taken only if the installed transformers loads the same tokenizer from
it: one that saves the same files, byte for byte but for how it was loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from xhf_hooks.errors import OptionError
from xhf_hooks.exporters import Exporter
from xhf_hooks.registry import build_from_config
from xhf_hooks.system import MemoryFolder

TOKENIZER_FILES = ('tokenizer_config.json', 'tokenizer.json', 'tokenizer.model', 'vocab.json', 'vocab.txt')


def base_file(base_dir: str, name: str) -> Path | None:
    """A file of the base model, from its folder or the local hub cache. Offline."""
    if not base_dir:
        return None
    if Path(base_dir).is_dir():
        path = Path(base_dir) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(base_dir, name)
    except HFValidationError:  # not a valid hub name
        return None
    return Path(cached) if isinstance(cached, str) else None


def load_tokenizer(base_dir: str, *, trust_remote_code: bool) -> Any | None:
    """The base model's tokenizer; None if it has none. Runs on: rank 0."""
    if not any(base_file(base_dir, name) for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_dir, trust_remote_code=trust_remote_code, local_files_only=True)


CONFIG, JSON, JINJA = 'tokenizer_config.json', 'tokenizer.json', 'chat_template.jinja'
#: Files of vocabularies, beside those that the class names. transformers 5 often reads only tokenizer.json.
_VOCABULARIES = (
    *('tokenizer.model', 'vocab.json', 'merges.txt', 'vocab.txt', 'spiece.model', 'sentencepiece.bpe.model'),
    'tekken.json',
)
_OTHERS = (CONFIG, JSON, JINJA, 'added_tokens.json', 'special_tokens_map.json')
_CLASSES = {'TokenizersBackend': 'PreTrainedTokenizerFast'}  # since transformers 5
_EXTRA, _ADDITIONAL, _DECODER = 'extra_special_tokens', 'additional_special_tokens', 'added_tokens_decoder'
#: Files of a processor that are not its tokenizer's. transformers 5 saves them as one, which 4.48 cannot read.
_OF_PROCESSOR = (
    *('processor_config.json', 'preprocessor_config.json', 'video_preprocessor_config.json'),
    *('chat_template.json', JINJA),
)
#: Fields that say how the tokenizer was loaded, which transformers 5 saves with it.
_OF_LOADING = ('is_local', 'local_files_only')


@dataclass(frozen=True)
class _Written:
    """What was written of a tokenizer.

    Attributes:
        made_from: Digest of what the tokenizer itself saves, and of where its base is.
        files: Content by name.
    """

    made_from: str
    files: Mapping[str, bytes]
    warnings: tuple[str, ...]


#: What was last written of each tokenizer: proving it takes seconds with large vocabularies, and each save writes it.
_WRITTEN: WeakKeyDictionary[Any, _Written] = WeakKeyDictionary()


def write_tokenizer(folder: Path, tokenizer: Any, base_dir: str) -> list[str]:
    """Write the tokenizer or processor, beside the model's config.json if there is one. Runs on: rank 0.

    Args:
        base_dir: Folder or hub name of the base model, used if the tokenizer does not know where it came from.

    Returns:
        Warnings for the log.
    """
    from transformers import PreTrainedTokenizerBase

    own = getattr(tokenizer, 'tokenizer', None)
    if isinstance(own, PreTrainedTokenizerBase) and not _is_custom(tokenizer) and not _is_custom(own):
        warnings, names = _write_plain(folder, own, base_dir)
        _write_processor(folder, tokenizer, base_dir, names)
        return warnings
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or _is_custom(tokenizer):
        tokenizer.save_pretrained(folder)  # an image processor, or custom code
        return []
    return _write_plain(folder, tokenizer, base_dir)[0]


def _write_plain(folder: Path, tokenizer: Any, base_dir: str) -> tuple[list[str], set[str]]:
    """Write a tokenizer; returns warnings, and the names of the files that it saves by itself."""
    with closing(MemoryFolder()) as temporary:
        place = temporary.path
        tokenizer.save_pretrained(place / 'saved')
        saved = _contents(place / 'saved')

        def choose() -> tuple[Mapping[str, bytes], tuple[str, ...]]:
            form, *warnings = _Writing(tokenizer, base_dir, place).chosen(folder)
            return _contents(form), tuple(warnings)

        return _write_remembered(folder, tokenizer, {'': base_dir.encode(), **saved}, choose), {*saved}


def _write_remembered(
    folder: Path,
    tokenizer: Any,
    saves: Mapping[str, bytes],
    choose: Callable[[], tuple[Mapping[str, bytes], tuple[str, ...]]],
) -> list[str]:
    """Write the files that ``choose`` returns, or did for what ``tokenizer`` saved when it was written before."""
    made_from, written = _digest(saves), _WRITTEN.get(tokenizer)
    if written is None or written.made_from != made_from:
        written = _WRITTEN[tokenizer] = _Written(made_from, *choose())
    for name, content in written.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return list(written.warnings)


def _write_processor(folder: Path, processor: Any, base_dir: str, of_tokenizer: set[str]) -> None:
    """Write a processor's files besides its tokenizer's: those of its base, if it was not changed."""
    from transformers import AutoProcessor

    own_dir = processor.tokenizer.name_or_path
    base_dir = own_dir if any(base_file(own_dir, name) for name in _OF_PROCESSOR) else base_dir

    def without(names: set[str], place: Path) -> dict[str, bytes]:
        kept = names - {JINJA}  # which is the processor's, too
        return {name: data for name, data in _contents(place).items() if name not in kept}

    with closing(MemoryFolder()) as temporary:
        place = temporary.path
        processor.save_pretrained(place / 'own')
        files = without(of_tokenizer, place / 'own')

        def choose() -> tuple[Mapping[str, bytes], tuple[str, ...]]:
            with contextlib.suppress(Exception):  # any failure counts as another processor
                base = AutoProcessor.from_pretrained(base_dir, local_files_only=True)
                base.save_pretrained(place / 'base')
                base.tokenizer.save_pretrained(place / 'tokenizer')
                if not _is_custom(base) and without({*_contents(place / 'tokenizer')}, place / 'base') == files:
                    paths = {name: base_file(base_dir, name) for name in _OF_PROCESSOR}
                    return {n: p.read_bytes() for n, p in paths.items() if p and _belongs_to(p, base_dir)}, ()
            return files, ()

        _write_remembered(folder, processor, {'': base_dir.encode(), **files}, choose)


class _Writing:
    """One tokenizer, saved in ``place`` as it is, and as a new one from its base would be."""

    def __init__(self, tokenizer: Any, base_dir: str, place: Path) -> None:
        import transformers

        self._tokenizer, self._place = tokenizer, place
        own = getattr(tokenizer, 'name_or_path', None)
        self._base_dir = own if isinstance(own, str) and base_file(own, CONFIG) else base_dir
        self._saved, self._base_saved = place / 'saved', place / 'base'
        self._has_base = self._save(lambda: load_tokenizer(self._base_dir, trust_remote_code=False), self._base_saved)
        self._saves_otherwise = hasattr(transformers, 'TokenizersBackend')

    def chosen(self, folder: Path) -> tuple[Any, ...]:
        """The first form that is proven beside the config.json in ``folder``, and warnings."""
        unchanged = self._has_base and _comparable(self._saved) == _comparable(self._base_saved)
        if unchanged and self._is_proven(self._copied(), folder):
            return (self._place / 'copied',)
        if self._saves_otherwise and self._has_base and self._is_proven(self._in_words_of_base(), folder):
            return (self._place / 'words',)
        config = json.loads((self._saved / CONFIG).read_text(encoding='utf-8'))
        older = _in_older_words({**config, **self._template(config)})
        if not self._saves_otherwise or older == config:
            return (self._saved,)
        if self._is_proven(self._with_config('older', older), folder):
            return (self._place / 'older',)
        kind = config['tokenizer_class']
        return self._saved, f'transformers 4 may not read the tokenizer: transformers 5 needs the class {kind}'

    def _save(self, load: Callable[[], Any], place: Path) -> bool:
        """Whether a tokenizer can be loaded and saved. It is only compared: any failure counts as another tokenizer."""
        try:
            loaded = load()
            if _is_custom(loaded):
                return False
            loaded.save_pretrained(place)
        except Exception:  # AttributeError if there is none; files of others fail with any error
            return False
        return True

    def _is_proven(self, form: Path, folder: Path) -> bool:
        """Whether the tokenizer that is loaded from ``form``, beside the model's config, is the one to write."""
        beside, again = self._place / f'{form.name}_beside', self._place / f'{form.name}_again'
        shutil.copytree(form, beside)
        if (folder / 'config.json').exists():  # AutoTokenizer also reads the model's type
            shutil.copyfile(folder / 'config.json', beside / 'config.json')
        loaded = self._save(lambda: load_tokenizer(str(beside), trust_remote_code=False), again)
        return loaded and _comparable(again) == _comparable(self._saved)

    def _copied(self) -> Path:
        form = self._place / 'copied'
        form.mkdir()
        names = [path.relative_to(self._base_saved).as_posix() for path in _files(self._base_saved)]
        self._copy((*names, *_OTHERS, *self._vocabularies()), form)
        return form

    def _vocabularies(self) -> tuple[str, ...]:
        return (*_VOCABULARIES, *(name for name in self._tokenizer.vocab_files_names.values() if name not in _OTHERS))

    def _copy(self, names: tuple[str, ...], form: Path) -> None:
        for name in dict.fromkeys(names):
            path = base_file(self._base_dir, name)
            if path is not None and not (form / name).exists() and _belongs_to(path, self._base_dir):
                (form / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, form / name)

    def _in_words_of_base(self) -> Path:
        """The base's tokenizer_config.json with the fields that changed, and its vocabulary if that did not change."""
        path = base_file(self._base_dir, CONFIG)
        base = {} if path is None else json.loads(path.read_text(encoding='utf-8'))
        now, before = (json.loads((at / CONFIG).read_text(encoding='utf-8')) for at in (self._saved, self._base_saved))
        kept = {name: value for name, value in base.items() if name in now or name not in before}
        changed = {name: value for name, value in now.items() if name not in before or before[name] != value}
        special = {name: now[name] for name in self._tokenizer.special_tokens_map if name in now and name not in base}
        for name in (_EXTRA, _ADDITIONAL):
            if name not in now and name in before:  # all were removed
                kept = {key: value for key, value in kept.items() if key not in (_EXTRA, _ADDITIONAL)}
        if _EXTRA in changed:
            kept.pop(_ADDITIONAL, None)
        if _json_part(self._saved, 'post_processor') != _json_part(self._base_saved, 'post_processor'):
            for name in ('add_bos_token', 'add_eos_token'):  # transformers 5 does not save them, 4 builds with them
                if name in base:
                    kept[name] = getattr(self._tokenizer, name, base[name])
        if _DECODER in base:
            tokens = self._tokenizer.added_tokens_decoder.items()
            kept[_DECODER] = {str(token_id): token.__getstate__() for token_id, token in tokens}
        result = {**kept, **special, **changed}
        template = self._template(base)
        result = _in_older_words({**result, **template} if template else _without(result, 'chat_template'))
        form = self._with_config('words', result)
        if _json_part(self._saved, 'model') == _json_part(self._base_saved, 'model'):
            self._copy(self._vocabularies(), form)
        return form

    def _template(self, beside: Mapping[str, Any]) -> dict[str, Any]:
        """The field ``chat_template``, unless the base has the template only in a file of its own."""
        template = self._tokenizer.chat_template
        if not template or ('chat_template' not in beside and base_file(self._base_dir, JINJA)):
            return {}
        several = isinstance(template, dict)
        return {'chat_template': [{'name': n, 'template': t} for n, t in template.items()] if several else template}

    def _with_config(self, name: str, config: Mapping[str, Any]) -> Path:
        form = self._place / name
        shutil.copytree(self._saved, form)
        text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + '\n'  # as transformers does
        (form / CONFIG).write_text(text, encoding='utf-8')
        return form


def _in_older_words(config: Mapping[str, Any]) -> dict[str, Any]:
    older = dict(config)
    older['tokenizer_class'] = _CLASSES.get(older.get('tokenizer_class', ''), older.get('tokenizer_class'))
    if isinstance(older.get(_EXTRA), list):  # transformers 4 expects a dict, of names
        older[_ADDITIONAL] = older.pop(_EXTRA)
    return older if older['tokenizer_class'] is not None else _without(older, 'tokenizer_class')


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _json_part(saved: Path, name: str) -> Any:
    """A part of tokenizer.json; None if there is no such file."""
    path = saved / JSON
    return json.loads(path.read_text(encoding='utf-8')).get(name) if path.exists() else None


def _belongs_to(path: Path, base_dir: str) -> bool:
    """Whether a file is the base's own: in its folder, or linked from a snapshot to the blobs of the hub cache."""
    real = path.resolve()
    home = path.parent.resolve() if not Path(base_dir).is_dir() else Path(base_dir).resolve()
    return real.is_relative_to(home) or (home.parent.name == 'snapshots' and real.is_relative_to(home.parent.parent))


def _is_custom(tokenizer: Any) -> bool:
    return type(tokenizer).__module__.startswith('transformers_modules.')


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob('*') if path.is_file())


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in _files(folder)}


def _comparable(folder: Path) -> dict[str, Any]:
    """The contents, without what depends on how the tokenizer was loaded."""
    found: dict[str, Any] = _contents(folder)
    if CONFIG in found:
        found[CONFIG] = {name: value for name, value in json.loads(found[CONFIG]).items() if name not in _OF_LOADING}
    return found


def _digest(contents: Mapping[str, bytes]) -> str:
    sha = hashlib.sha256()
    for name, content in contents.items():
        sha.update(f'{name}\0{len(content)}\0'.encode() + content)
    return sha.hexdigest()


def find_tokenizer(option: Any | None, of_the_run: Any | None, exporter: Exporter) -> tuple[Any | None, list[str]]:
    """The tokenizer of the option, else of the run, else of the base model.

    Returns:
        The tokenizer or None, and warnings.

    Raises:
        OptionError: The option names a folder without tokenizer files.
    """
    tokenizer = option if option is not None else of_the_run
    if isinstance(tokenizer, dict):
        return build_from_config(tokenizer), []
    if isinstance(tokenizer, (str, Path)):
        found = load_tokenizer(str(tokenizer), trust_remote_code=False)
        if found is None:
            raise OptionError('tokenizer', 'a folder with tokenizer files', str(tokenizer))
        return found, []
    if tokenizer is None:
        tokenizer = exporter.base_tokenizer()
    if tokenizer is not None:
        return tokenizer, []
    base = f'the base model {exporter.base_dir!r}' if exporter.base_dir else 'a base model'
    warning = f'no tokenizer will be saved: neither the run nor {base} has one; set the option tokenizer'
    return None, [warning]
