"""The base model: its files, in its folder or in the local hub cache, and whether its code is custom. Never online.

The process may change its working folder (hydra, reward code), which breaks a relative base path, and the base may be
gone by the next save (a cache that is cleaned). So the files that were found of a base are remembered: a
:class:`LocatedBase`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json
from xhf_hooks.format.loaded_files import (
    CONFIG,
    CONFIGS,
    PROCESSOR_FILES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    WEIGHT_SUFFIXES,
    is_loaded_text,
)
from xhf_hooks.format.text import error_text
from xhf_hooks.model import model_class, modules_in

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

#: Files whose field ``auto_map`` may name code.
_WITH_CODE = (CONFIG, TOKENIZER_CONFIG, *PROCESSOR_FILES)
#: Endings of files that code does not read from its own folder: they are not copied with it, even if it names them.
_NOT_READ_BY_CODE = (*WEIGHT_SUFFIXES, '.md', CONFIG)


@dataclass(eq=False)
class LocatedBase:
    """A base model: its name, as the user gave it, and what was found under it.

    Attributes:
        name: A path, or the id of a repository on the Hub; '' if it is unknown.
        folder: The absolute path of its folder, in the hub cache if the name is a Hub id; None if none was found.
        is_path: False if the name is a Hub id that was found in the cache. True for a path, and for any name that was
            not found, since nothing tells a path from the Hub id of a base that is not in the cache.
        n_tokens: The number of tokens of its tokenizer; None before the first question.
        written_tokenizers: By tokenizer or processor: the files of its own ``save_pretrained``, the files that were
            written for it, and warnings.
    """

    name: str = ''
    folder: Path | None = None
    is_path: bool = False
    n_tokens: int | None = None
    written_tokenizers: WeakKeyDictionary[Any, tuple[dict[str, bytes], dict[str, bytes], list[str]]] = field(
        default_factory=WeakKeyDictionary, repr=False
    )
    #: Files that were read: by name, the bytes, and whether the file lies in the base's folder or hub cache.
    _contents: dict[str, tuple[bytes, bool]] = field(default_factory=dict, repr=False)
    #: Results of :meth:`read_code`, by the modules that were asked for.
    _code: dict[frozenset[str], tuple[dict[str, bytes], list[str]]] = field(default_factory=dict, repr=False)

    @classmethod
    def locate(cls, name: str) -> LocatedBase:
        """Look for the folder of a base.

        A relative path is looked for in the working folder, then in those above it and in the one in which the process
        was started: the model may have been loaded before the run went elsewhere.
        """
        folder = find_base_folder(name)
        is_path = bool(name) and (folder is None or Path(name).is_dir())
        if folder is None and is_path:
            elsewhere = (one for one in _elsewhere(name) if any((one / config).is_file() for config in CONFIGS))
            folder = next(elsewhere, None)
        return cls(name, None if folder is None else folder.absolute(), is_path)

    def loadable_name(self) -> str:
        """Its name; or its absolute folder, if the name is a relative path and the process has changed its folder."""
        if not self.is_path or self.folder is None:
            return self.name
        with suppress(OSError):
            if os.path.samefile(self.name, self.folder):
                return self.name
        return str(self.folder)

    def find_file(self, name: str) -> Path | None:
        """One of its files; None if it has none of this name."""
        return self.folder / name if self.folder is not None and (self.folder / name).is_file() else None

    def has_file(self, name: str) -> bool:
        """Whether it has a file of this name, or had one when it was read earlier."""
        return self.find_file(name) is not None or name in self._contents

    def names_below(self, path: str) -> list[str]:
        """The files in a folder of the base, or those of it that were read before the base was gone."""
        found = [] if self.folder is None else sorted(one for one in self.folder.glob(f'{path}/*') if one.is_file())
        was_read = (name for name in self._contents if name.startswith(f'{path}/'))
        return [f'{path}/{one.name}' for one in found] or [*was_read]

    def read_file(self, name: str) -> bytes | None:
        """The content of a file, as it was read earlier if the file is gone; None if there was no such file."""
        return self._read(name)[0]

    def read_json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file; {} if there is none of this name."""
        where = f'{self.folder}/{name}'
        try:
            data = self.read_file(name)
        except OSError as error:
            raise DamagedError(f'{where}: cannot be read ({error_text(error)})') from None
        return {} if data is None else strict_json.parse(data, where)

    def read_files(self, names: Iterable[str]) -> dict[str, bytes]:
        """Those of the files that the base has: in its folder, or linked from a snapshot to the blobs of the hub cache.

        Args:
            names: Paths in the base. Files of the base may name them, so those that lead out of it are left out.
        """
        found = {}
        for name in names:
            if not Path(name).is_absolute() and '..' not in Path(name).parts:
                content, is_inside = self._read(name)
                if content is not None and is_inside:
                    found[name] = content
        return found

    def read_code(self, settings: Mapping[str, bytes]) -> tuple[dict[str, bytes], list[str]]:
        """The Python files that settings name, with the files that these import and name; and missing ones.

        Nothing is executed. Code of another repository (``org/name--module.Class``) is left out.

        Args:
            settings: Files, of which those like config.json may name code in their field ``auto_map``.
        """
        from transformers.dynamic_module_utils import get_relative_imports

        folder, wanted = self.folder, modules_named_by(settings)
        asked_for = frozenset(wanted)
        if asked_for in self._code and not all(self.find_file(name) for name in self._code[asked_for][0]):
            return self._code[asked_for]  # the base is gone
        found: dict[str, bytes] = {}
        missing = set()
        while wanted:
            name = wanted.pop()
            code = self.read_files((name,))
            if folder is None or not code:
                missing.add(name)
                continue
            found.update(code)
            imported = {f'{module}.py' for module in get_relative_imports(folder / name)}
            wanted |= imported - found.keys() - missing
            names = [path.name for path in folder.iterdir() if not path.name.endswith(_NOT_READ_BY_CODE)]
            found.update(self.read_files(each for each in names if each.encode() in code[name]))
        self._code[asked_for] = found, sorted(missing)
        return self._code[asked_for]

    def _read(self, name: str) -> tuple[bytes | None, bool]:
        """The content of a file, and whether it lies in the base's folder, or is linked to the hub cache."""
        path = self.find_file(name)
        if path is not None:
            home = path.parent.resolve()
            home = home.parent.parent if home.parent.name == 'snapshots' else home
            with suppress(FileNotFoundError):  # the base is being removed
                self._contents[name] = path.read_bytes(), path.resolve().is_relative_to(home)
        return self._contents.get(name, (None, False))


#: The base of each live model, part of a model and tokenizer, with the name that its config has for it. The files that
#: were found before training must still be known at the next call of ``save_hf``, and nothing but the model lives that
#: long. It is no attribute of the model, part or tokenizer: copies, pickles and config files would have it, too.
_BASES: WeakKeyDictionary[Any, tuple[str, LocatedBase]] = WeakKeyDictionary()


def base_of(owner: Any, name: str, find_name: Callable[[], str] | None = None) -> LocatedBase:
    """The base that ``owner`` was loaded from; located on the first call, cached after.

    Args:
        owner: The tokenizer, or a model that is not of transformers. For one of transformers or part of it, call
            :func:`base_of_model`, which knows the revision.
        name: The base's name in the owner's config.
        find_name: Gives the revision's folder to locate instead of ``name``.
    """
    known = _BASES.get(owner)
    if known is None or known[0] != name:
        known = _BASES[owner] = name, LocatedBase.locate(name if find_name is None else find_name())
    return known[1]


def _elsewhere(name: str) -> list[Path]:
    """Other places of a relative path that does not exist in the working folder."""
    started = [os.environ['PWD']] if 'PWD' in os.environ else []
    with suppress(OSError):  # the working folder was removed
        started = [*map(str, Path.cwd().parents), *started]
    return [Path(above, name) for above in started if not Path(name).is_absolute()]


def base_of_model(model: nn.Module) -> LocatedBase:
    """The base that the model, or part of one, was loaded from; an empty name if it is unknown.

    The cache may have several revisions of a Hub id, and transformers 5 does not record which one was loaded; then the
    base is known only if the small files of all revisions are equal.
    """
    name = getattr(model.config, '_name_or_path', '') or ''
    return base_of(model, name, lambda: _revision(model, name))


def _revision(model: nn.Module, name: str) -> str:
    """The name, or the folder of the revision in the cache that was loaded; '' if the revision is unknown."""
    main, snapshots = find_base_folder(name), _snapshots(name)
    loaded = snapshots.get(getattr(model.config, '_commit_hash', None) or '')
    if loaded is None and len(snapshots) == 1:
        (loaded,) = snapshots.values()
    if loaded is None and _differ(snapshots.values()):
        return ''
    return name if loaded in (None, main) else str(loaded)


def warn_of_revisions(model: PreTrainedModel) -> list[str]:
    """A warning if the model's base has a name, but the revision is unknown."""
    name = getattr(model.config, '_name_or_path', '') or ''
    if not name or base_of_model(model).name:
        return []
    return [
        f'the cache has several revisions of {name}, whose files differ, and transformers does not say which one the '
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
    folders = [*folders]
    for name in {path.name for folder in folders for path in folder.iterdir() if is_loaded_text(path.name)}:
        contents = {path.read_bytes() for folder in folders if (path := folder / name).is_file()}
        if len(contents) > 1:
            return True
    return False


def base_dirs_of(model: nn.Module) -> list[str]:
    """Folders that the model and its parts were loaded from, or their names where there is no folder."""
    named: dict[str, nn.Module] = {}
    for module in modules_in(model):
        name = getattr(vars(module).get('config'), '_name_or_path', None)
        if isinstance(name, str) and name:
            named.setdefault(name, module)
    return sorted(str(base_of_model(module).folder or name) for name, module in named.items())


def has_auto_class(model: PreTrainedModel) -> bool:
    """Whether the model's class was loaded by, or registered for, an auto class: then it is custom code."""
    return model._auto_class is not None


def is_remote_code(model: PreTrainedModel) -> bool:
    """Whether the model's class is custom code of the base model (``trust_remote_code``)."""
    return has_auto_class(model) or model_class(model).__module__.startswith('transformers_modules.')


def find_base_folder(name: str) -> Path | None:
    """The folder of a base model, given as a folder or as its name in the local hub cache; None if there is none."""
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    for file in (*CONFIGS, *TOKENIZER_FILES, *PROCESSOR_FILES):
        try:
            cached = try_to_load_from_cache(name, file)
        except HFValidationError:  # not a valid hub name
            return None
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def find_base_file(name: str, file: str) -> Path | None:
    """A file of a base model, given as for :func:`find_base_folder`; None if it has none of this name."""
    folder = find_base_folder(name)
    return folder / file if folder is not None and (folder / file).is_file() else None


def modules_named_by(settings: Mapping[str, bytes]) -> set[str]:
    """The Python files of the classes that settings name in ``auto_map``.

    ``auto_map`` maps kind to class name, or to a (slow, fast) pair for tokenizers; old tokenizer configs hold only that
    pair.
    """
    names: list[Any] = []
    for file in _WITH_CODE:
        try:
            auto_map = json.loads(settings.get(file, b'{}'))['auto_map']
        except (ValueError, TypeError, KeyError):  # whoever needs this file reports the damage
            continue
        for each in auto_map.values() if isinstance(auto_map, dict) else [auto_map]:
            names += each if isinstance(each, list) else [each]
    return {f'{name.rpartition(".")[0]}.py' for name in names if isinstance(name, str) and '--' not in name}
