"""The base model: its files, in its folder or in the local hub cache, and whether its code is custom. Never online."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.format import strict_json
from xhf_hooks.format.text import error_text
from xhf_hooks.model import model_class

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

#: Files of vocabularies, beside those that a tokenizer's class names. transformers 5 often reads only tokenizer.json.
VOCABULARY_FILES = (
    'tokenizer.model',
    'vocab.json',
    'merges.txt',
    'vocab.txt',
    'spiece.model',
    'sentencepiece.bpe.model',
    'tekken.json',
)
#: Files of a tokenizer. A folder has one if it has one of these.
TOKENIZER_FILES = ('tokenizer_config.json', 'tokenizer.json', *VOCABULARY_FILES)
#: Files of a processor that are not its tokenizer's. transformers 5 saves them as one, which 4.48 cannot read.
PROCESSOR_FILES = ('processor_config.json', 'preprocessor_config.json', 'video_preprocessor_config.json')
#: Files of a tokenizer that make none by themselves.
MORE_TOKENIZER_FILES = ('added_tokens.json', 'special_tokens_map.json', 'chat_template.jinja', 'chat_template.json')
#: Files whose field ``auto_map`` may name code.
_WITH_CODE = ('config.json', 'tokenizer_config.json', *PROCESSOR_FILES)
#: Names that code mentions without reading the file from its own folder.
_NOT_READ_BY_CODE = ('.safetensors', '.bin', '.pt', '.pth', '.gguf', '.md', 'config.json', '.index.json')


def base_dir_of(model: PreTrainedModel) -> str:
    """Folder or hub name that the model was loaded from; '' if unknown.

    The cache may have several revisions of a hub name, and transformers 5 does not say which one was loaded; then the
    name is good only if no file of theirs differs.
    """
    name = getattr(model.config, '_name_or_path', '') or ''
    main, snapshots = base_folder(name), _snapshots(name)
    loaded = snapshots.get(getattr(model.config, '_commit_hash', None) or '')
    if loaded is None and len(snapshots) == 1:
        (loaded,) = snapshots.values()
    if loaded is None and _differ(snapshots.values()):
        return ''
    return name if loaded in (None, main) else str(loaded)


def warn_of_revisions(model: PreTrainedModel) -> list[str]:
    """A warning if the model's base has a name, but its revision cannot be told."""
    name = getattr(model.config, '_name_or_path', '') or ''
    if not name or base_dir_of(model):
        return []
    return [
        f'the cache has several revisions of {name}, whose files differ, and transformers does not tell which one the '
        f'model was loaded from: nothing is copied from it; load it from a folder, or set the option tokenizer'
    ]


def _snapshots(name: str) -> dict[str, Path]:
    """The revisions of a hub name in the local cache, by commit."""
    from huggingface_hub import constants

    if not name or Path(name).is_dir():
        return {}
    repository = Path(constants.HF_HUB_CACHE, f'models--{name.replace("/", "--")}')
    return {path.name: path for path in sorted(repository.glob('snapshots/*')) if path.is_dir()}


def _differ(folders: Iterable[Path]) -> bool:
    """Whether a small file is in several of the folders with another content."""
    names = ('config.json', 'generation_config.json', *TOKENIZER_FILES, *MORE_TOKENIZER_FILES, *PROCESSOR_FILES)
    for name in names:
        contents = {path.read_bytes() for folder in folders if (path := folder / name).is_file()}
        if len(contents) > 1:
            return True
    return False


def base_dirs_of(model: nn.Module) -> list[str]:
    """Folders or hub names that the model and its parts were loaded from."""
    configs = [getattr(module, 'config', None) for module in model.modules()]
    names = {getattr(config, '_name_or_path', None) for config in configs}
    return sorted(name for name in names if isinstance(name, str) and name)


def is_remote_code(model: PreTrainedModel) -> bool:
    """Whether the model's class is custom code of the base model (``trust_remote_code``)."""
    return model._auto_class is not None or model_class(model).__module__.startswith('transformers_modules.')


def base_folder(base_dir: str) -> Path | None:
    """The folder of a base model, given as a folder or as its name in the local hub cache; None if there is none."""
    if not base_dir:
        return None
    if Path(base_dir).is_dir():
        return Path(base_dir)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    for name in ('config.json', 'adapter_config.json', *TOKENIZER_FILES, *PROCESSOR_FILES):
        try:
            cached = try_to_load_from_cache(base_dir, name)
        except HFValidationError:  # not a valid hub name
            return None
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def base_file(base_dir: str, name: str) -> Path | None:
    """A file of the base model; None if it has none of this name."""
    folder = base_folder(base_dir)
    return folder / name if folder is not None and (folder / name).is_file() else None


def base_json(base_dir: str, name: str) -> dict[str, Any]:
    """The content of a JSON file of the base model; {} if it has none of this name."""
    path = base_file(base_dir, name)
    return {} if path is None else strict_json.read(path)


def read_base_files(base_dir: str, names: Iterable[str]) -> dict[str, bytes]:
    """Those of the files that the base has: in its folder, or linked from a snapshot to the blobs of the hub cache.

    Args:
        names: Paths in the base. Files of the base may name them, so those that lead out of it are left out.
    """
    found = {}
    for name in names:
        path = base_file(base_dir, name)
        if path is not None and not Path(name).is_absolute() and '..' not in Path(name).parts:
            home = path.parent.resolve()
            home = home.parent.parent if home.parent.name == 'snapshots' else home
            if path.resolve().is_relative_to(home):
                found[name] = path.read_bytes()
    return found


def read_base_code(base_dir: str, settings: Mapping[str, bytes]) -> tuple[dict[str, bytes], list[str]]:
    """The Python files of the base that settings name, with what these import and name; and those that it lacks.

    Nothing is executed. Code of another repository (``org/name--module.Class``) is not meant.

    Args:
        settings: Files, of which those like config.json may name code in their field ``auto_map``.
    """
    from transformers.dynamic_module_utils import get_relative_imports

    folder = base_folder(base_dir)
    wanted = modules_named_by(settings)
    found: dict[str, bytes] = {}
    missing = set()
    while wanted:
        name = wanted.pop()
        code = read_base_files(base_dir, (name,))
        if folder is None or not code:
            missing.add(name)
            continue
        found.update(code)
        imported = {f'{module}.py' for module in get_relative_imports(folder / name)}
        wanted |= imported - found.keys() - missing
        others = [path.name for path in folder.iterdir() if not path.name.endswith(_NOT_READ_BY_CODE)]
        found.update(read_base_files(base_dir, (other for other in others if other.encode() in code[name])))
    return found, sorted(missing)


def modules_named_by(settings: Mapping[str, bytes]) -> set[str]:
    """The Python files of the classes in ``auto_map``: names by kind, for tokenizers a pair, or that alone."""
    names: list[Any] = []
    for file in _WITH_CODE:
        try:
            auto_map = json.loads(settings.get(file, b'{}'))['auto_map']
        except (ValueError, TypeError, KeyError):  # damaged files are told by who needs what they hold
            continue
        for each in auto_map.values() if isinstance(auto_map, dict) else [auto_map]:
            names += each if isinstance(each, list) else [each]
    return {f'{name.rpartition(".")[0]}.py' for name in names if isinstance(name, str) and '--' not in name}


class CopiedTokenizer:
    """A tokenizer or processor whose files are copied: it has code that must not run, or cannot be loaded here.

    Args:
        reason: Why, for the log.
    """

    def __init__(self, folder: str, reason: str) -> None:
        self._folder = folder
        self.reason = reason

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files, and the code that they name."""
        files = read_base_files(self._folder, (*TOKENIZER_FILES, *MORE_TOKENIZER_FILES, *PROCESSOR_FILES))
        code, _ = read_base_code(self._folder, files)
        for name, content in {**code, **files}.items():
            Path(folder, name).write_bytes(content)


@dataclass(eq=False)
class PartAndTokenizer:
    """An image processor or the like of the run, and the tokenizer that is saved with it.

    Attributes:
        part: Written first.
    """

    part: Any
    tokenizer: Any


def load_tokenizer(base_dir: str, *, trust_remote_code: bool, **options: Any) -> Any | None:
    """The base model's tokenizer, by ``from_pretrained``; None if it has none. Runs on: rank 0."""
    if not any(base_file(base_dir, name) for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    options = {**options, 'trust_remote_code': trust_remote_code, 'local_files_only': True}
    return AutoTokenizer.from_pretrained(base_dir, **options)


def load_or_copy_tokenizer(base_dir: str, *, trust_remote_code: bool, **options: Any) -> Any | None:
    """As :func:`load_tokenizer`; a tokenizer with code that is not trusted is a :class:`CopiedTokenizer`."""
    try:
        return load_tokenizer(base_dir, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # the files may be of any kind
        settings = read_base_files(base_dir, ('tokenizer_config.json',))
        if not trust_remote_code and modules_named_by(settings):
            return CopiedTokenizer(base_dir, 'it has code of its own, which is not run')
        if any(base_file(base_dir, name) for name in TOKENIZER_FILES[:2]):
            raise
        return CopiedTokenizer(base_dir, f'it cannot be loaded here: {error_text(error)}')


def load_processor(base_dir: str, *, trust_remote_code: bool) -> Any | None:
    """The base's processor, or its image processor or the like; None if it has none or it cannot be loaded here."""
    if not any(base_file(base_dir, name) for name in PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor

    options = {'trust_remote_code': trust_remote_code, 'local_files_only': True}
    try:
        return AutoProcessor.from_pretrained(base_dir, **options)
    except Exception:  # code that is not trusted, or a package that is missing here
        return None
