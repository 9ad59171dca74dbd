"""Lists a model folder and checks its files, headers and indexes against each other."""

from __future__ import annotations

import re
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.files.regular_files import special_kind
from xhf_hooks.format import strict_json
from xhf_hooks.format.safetensors import Header, HeaderEntry, read_header
from xhf_hooks.format.text import counted, some
from xhf_hooks.integrity.findings import Findings

WEIGHTS_SUFFIX = '.safetensors'
INDEX_SUFFIX = '.safetensors.index.json'
#: Never folders, unlike DeepSpeed's iter_500.pth.
_ALWAYS_FILES = ('.json', '.safetensors', '.model', '.jinja', '.txt')
#: Files that loaders may read: one that was added after the save may change what is loaded.
READ_BY_LOADERS = (*_ALWAYS_FILES, '.bin', '.pt', '.pth', '.h5', '.msgpack', '.gguf', '.py')
_SHARD = re.compile(r'(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors')
_MOST_FILES, _MOST_DEPTH = 100_000, 4


@dataclass
class WeightFolder:
    """The weights in one folder, which are loaded together.

    Attributes:
        name: Path relative to the checkpoint, with slashes; ``''`` is the checkpoint itself.
        path: The folder.
        files: Sizes in bytes of the files directly in it, by name.
        headers: Headers of its undamaged weight files, by file name.
    """

    name: str
    path: Path
    files: dict[str, int]
    headers: dict[str, Header] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The name in messages."""
        return self.name or '.'

    @property
    def prefix(self) -> str:
        """The prefix of its files in the manifest."""
        return f'{self.name}/' if self.name else ''

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file; None if it is missing or damaged (``check_texts`` reports that)."""
        if name not in self.files:
            return None
        try:
            return strict_json.read(self.path / name)
        except DamagedError:
            return None

    def loaded(self) -> dict[str, Header]:
        """The files that ``from_pretrained`` reads: the single file, else the shards, else all."""
        for stem in ('model', 'adapter_model'):
            if f'{stem}{WEIGHTS_SUFFIX}' in self.headers:
                return {f'{stem}{WEIGHTS_SUFFIX}': self.headers[f'{stem}{WEIGHTS_SUFFIX}']}
        shards = {n: h for n, h in self.headers.items() if (m := _SHARD.fullmatch(n)) and m['stem'] == 'model'}
        return shards or self.headers

    def tensors(self) -> dict[str, HeaderEntry]:
        """The tensors of :meth:`loaded` by name."""
        return {entry.name: entry for header in self.loaded().values() for entry in header.entries}


@dataclass
class FolderContent:
    """The files of a checkpoint, without hidden ones.

    Attributes:
        files: Sizes in bytes by relative path, with slashes; -1 for a broken link.
        special: Kinds of special files (devices, pipes and the like) and of folders named like files, by relative
            path. These are never opened.
    """

    path: Path
    files: dict[str, int]
    special: dict[str, str] = field(default_factory=dict)

    def weight_files(self) -> list[str]:
        return [name for name in self.files if name.endswith(WEIGHTS_SUFFIX)]

    def by_folder(self) -> dict[str, dict[str, int]]:
        """The sizes of the files directly in each folder: by the folder's relative path, then by name."""
        found: dict[str, dict[str, int]] = {}
        for path, nbytes in self.files.items():
            parent, _, name = path.rpartition('/')
            found.setdefault(parent, {})[name] = nbytes
        return found


def scan(folder: Path) -> FolderContent:
    """List a folder and its subfolders. Links to files are followed, as in the cache of huggingface_hub.

    Raises:
        CheckpointError: It cannot be listed, or holds more than :data:`_MOST_FILES` files.
    """
    content = FolderContent(folder, {})
    try:
        _scan(folder, '', content)
    except OSError as error:
        raise CheckpointError(f'{folder}: cannot be listed ({error.strerror}); give a model folder') from None
    return FolderContent(folder, dict(sorted(content.files.items())), content.special)


def _scan(folder: Path, prefix: str, content: FolderContent) -> None:
    for path in sorted(folder.iterdir()):
        if path.name.startswith('.'):
            continue
        name = prefix + path.name
        try:
            found = path.stat()
        except OSError as error:
            if path.is_symlink():  # broken, or a loop
                content.files[name] = -1
            elif not isinstance(error, FileNotFoundError):  # deleted meanwhile
                raise
            continue
        if stat.S_ISREG(found.st_mode):
            content.files[name] = found.st_size
        elif not stat.S_ISDIR(found.st_mode):
            content.special[name] = special_kind(found.st_mode) or 'no file'
        elif path.name.endswith(_ALWAYS_FILES):
            content.special[name] = 'a folder'
        elif not path.is_symlink() and name.count('/') < _MOST_DEPTH:
            _scan(path, f'{name}/', content)
        if len(content.files) + len(content.special) > _MOST_FILES:
            raise CheckpointError(f'{folder}: more than {_MOST_FILES} files; give a model folder')


def check_kinds(content: FolderContent, findings: Findings) -> None:
    """Report special files and broken links."""
    for name, kind in content.special.items():
        findings.problem('files', f'{name[:200]} is {kind}, not a regular file')
    lost = [name for name, nbytes in content.files.items() if nbytes < 0]
    if lost:
        findings.problem('files', f'{len(lost)} broken links: {some(lost)}')


def tell_links(content: FolderContent, findings: Findings) -> None:
    """Note links that lead out of the folder: a copy of it may lack their targets."""
    root = content.path.resolve()
    out = [name for name, nbytes in content.files.items() if nbytes >= 0 and _leads_out(content.path / name, root)]
    if out:
        findings.note(
            'files', f'{len(out)} links lead out of the folder, as in the cache of huggingface_hub: {some(out)}'
        )


def _leads_out(path: Path, root: Path) -> bool:
    return path.is_symlink() and not path.resolve().is_relative_to(root)


def read_headers(content: FolderContent, findings: Findings, only: Collection[str] | None = None) -> list[WeightFolder]:
    """Read the headers of all weight files; damaged ones are reported and skipped."""
    folders: dict[str, WeightFolder] = {}
    files = content.by_folder()
    n_tensors = 0
    misaligned: list[str] = []
    for name in content.weight_files():
        if only is not None and name not in only:
            continue
        parent, _, file = name.rpartition('/')
        folder = folders.setdefault(parent, WeightFolder(parent, content.path / parent, files[parent]))
        try:
            folder.headers[file] = read_header(content.path / name)
        except DamagedError as error:
            findings.problem('headers', str(error))
            continue
        n_tensors += len(folder.headers[file].entries)
        misaligned += folder.headers[file].misaligned
    if misaligned:
        findings.note('headers', f'{counted(len(misaligned), "tensor")} misaligned in the file: {some(misaligned)}')
    if not findings.has_problem('headers'):
        n_files = sum(len(folder.headers) for folder in folders.values())
        findings.ok('headers', f'{counted(n_tensors, "tensor")} in {counted(n_files, "file")}, without gaps')
    return list(folders.values())


def check_indexes(folder: WeightFolder, findings: Findings) -> None:
    """Check each index against its shards, and shards against their index."""
    names = folder.files
    indexed: set[str] = set()
    for name in names:
        if name.endswith(INDEX_SUFFIX):
            try:
                indexed |= _check_index(folder, folder.path / name, names, findings)
            except DamagedError as error:
                findings.problem('index', str(error))
    weights = [name for name in names if name.endswith(WEIGHTS_SUFFIX)]
    for name in weights:
        match = _SHARD.fullmatch(name)
        if match and name not in indexed and f'{match["stem"]}{INDEX_SUFFIX}' not in names:
            findings.problem('index', f'{folder.path / name}: a shard, but there is no {match["stem"]}{INDEX_SUFFIX}')
        elif match and name not in indexed:
            findings.problem('index', f'{folder.path / name}: a shard that is not in the index')
    single = [name for name in weights if not _SHARD.fullmatch(name)]
    if indexed and 'model.safetensors' in single and 'model.safetensors' not in indexed:
        findings.problem('index', f'{folder.path}: model.safetensors beside shards; loaders read only one of them')


def _check_index(folder: WeightFolder, path: Path, names: Collection[str], findings: Findings) -> set[str]:
    """Check one index; returns the files that it names."""
    content = strict_json.read(path)
    weight_map, metadata = content.get('weight_map'), content.get('metadata', {})
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise DamagedError(f'{path}: weight_map is not an object of file names')
    if not isinstance(metadata, dict):
        raise DamagedError(f'{path}: metadata is not an object')
    files = set(weight_map.values())
    before = len(findings.found)
    stem = path.name.removesuffix(INDEX_SUFFIX)
    stems = {match['stem'] for match in map(_SHARD.fullmatch, files) if match}
    if stems and stem not in stems and stem.partition('.')[0] != 'model':
        findings.problem('index', f'{path}: loaders expect {some([f"{s}{INDEX_SUFFIX}" for s in sorted(stems)])}')
    for file in sorted(files):
        if '/' in file or file not in names:
            findings.problem('index', f'{path}: {file[:200]!r} is missing')
    _compare_names(folder, path, weight_map, findings)
    if files <= set(folder.headers):
        _check_total(folder, path, metadata, files, findings)
    if len(findings.found) == before:
        findings.ok('index', f'{path.name}: {len(weight_map)} tensors, all in their files')
    return files


def _compare_names(folder: WeightFolder, path: Path, weight_map: dict[str, str], findings: Findings) -> None:
    files = set(weight_map.values()) & set(folder.headers)
    place = {entry.name: file for file in files for entry in folder.headers[file].entries}
    missing = [n for n, file in weight_map.items() if file in folder.headers and place.get(n) != file]
    extra = [name for name in place if name not in weight_map]
    if missing:
        findings.problem('index', f'{path}: tensors are not in their files: {some(missing)}')
    if extra:
        findings.problem('index', f'{path}: tensors are not in the index: {some(extra)}')


def _check_total(
    folder: WeightFolder, path: Path, metadata: dict[str, Any], files: set[str], findings: Findings
) -> None:
    total = metadata.get('total_size')
    found = sum(entry.end - entry.start for file in files for entry in folder.headers[file].entries)
    if total is None:
        findings.note('index', f'{path}: no total_size')
    elif isinstance(total, bool) or not isinstance(total, (int, float)) or total != found:
        findings.problem('index', f'{path}: total_size is {str(total)[:40]}, but the tensors have {found} bytes')


def find_duplicates(folder: WeightFolder, findings: Findings) -> None:
    """Report tensors that are in two shards: loaders may take either."""
    place: dict[tuple[str, str], str] = {}
    for file, header in folder.headers.items():
        match = _SHARD.fullmatch(file)
        for entry in header.entries if match else ():
            key = (match['stem'], entry.name)
            if key in place:
                findings.problem('headers', f'{folder.path}: {entry.name[:200]} is in both {place[key]} and {file}')
            place[key] = file
