"""What lies in a model folder: its files, the headers of its weights, its indexes, each against the others."""

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
from xhf_hooks.format.text import some
from xhf_hooks.integrity.findings import Findings

WEIGHTS_SUFFIX = '.safetensors'
INDEX_SUFFIX = '.safetensors.index.json'
#: What loaders read. Such a file that was put there later may change what is loaded; any other is harmless.
READ_BY_LOADERS: tuple[str, ...] = (
    '.json',
    '.safetensors',
    '.bin',
    '.pt',
    '.pth',
    '.h5',
    '.msgpack',
    '.gguf',
    '.py',
    '.model',
)
READ_BY_LOADERS += ('.jinja', '.txt')
#: A checkpoint of DeepSpeed is a folder iter_500.pth.
_NEVER_A_FOLDER = ('.json', '.safetensors', '.model', '.jinja', '.txt')
_SHARD = re.compile(r'(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors')
_MOST_FILES, _MOST_DEPTH = 100_000, 4


@dataclass
class WeightFolder:
    """The weights that lie in one folder, which one loader reads together.

    Attributes:
        name: Relative to the checkpoint, with slashes; ``''`` is the checkpoint itself.
        path: Where it is.
        files: All that are right in it: name to size in bytes.
        headers: Of the weights that are whole, by name in this folder.
    """

    name: str
    path: Path
    files: dict[str, int]
    headers: dict[str, Header] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """For people."""
        return self.name or '.'

    @property
    def prefix(self) -> str:
        """What comes before the names of its files in the checkpoint."""
        return f'{self.name}/' if self.name else ''

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file; None where it is not there, or damaged, which is told with the other texts."""
        if name not in self.files:
            return None
        try:
            return strict_json.read(self.path / name)
        except DamagedError:
            return None

    def loaded(self) -> dict[str, Header]:
        """The files that ``from_pretrained`` reads: one file, or the shards, or all that there is."""
        for stem in ('model', 'adapter_model'):
            if f'{stem}{WEIGHTS_SUFFIX}' in self.headers:
                return {f'{stem}{WEIGHTS_SUFFIX}': self.headers[f'{stem}{WEIGHTS_SUFFIX}']}
        shards = {n: h for n, h in self.headers.items() if (m := _SHARD.fullmatch(n)) and m['stem'] == 'model'}
        return shards or self.headers

    def tensors(self) -> dict[str, HeaderEntry]:
        """The tensors of those files by name."""
        return {entry.name: entry for header in self.loaded().values() for entry in header.entries}


@dataclass
class FolderContent:
    """The files of a checkpoint: path relative to it, with slashes, to size in bytes; hidden ones are left out.

    Attributes:
        files: A link to nothing has size -1.
        special: What is no file, though its name is one's: path to what it is. None of these is ever opened.
    """

    path: Path
    files: dict[str, int]
    special: dict[str, str] = field(default_factory=dict)

    def weight_files(self) -> list[str]:
        return [name for name in self.files if name.endswith(WEIGHTS_SUFFIX)]

    def by_folder(self) -> dict[str, dict[str, int]]:
        """Folder, relative to the checkpoint, to the files right in it."""
        found: dict[str, dict[str, int]] = {}
        for path, nbytes in self.files.items():
            parent, _, name = path.rpartition('/')
            found.setdefault(parent, {})[name] = nbytes
        return found


def scan(folder: Path) -> FolderContent:
    """List a folder and those in it. Links to files are followed, as in the cache of huggingface_hub.

    Raises:
        CheckpointError: It cannot be listed, or holds more than any model does.
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
            if path.is_symlink():  # to nothing, or in a circle
                content.files[name] = -1
            elif not isinstance(error, FileNotFoundError):  # that one has just gone
                raise
            continue
        if stat.S_ISREG(found.st_mode):
            content.files[name] = found.st_size
        elif not stat.S_ISDIR(found.st_mode):
            content.special[name] = special_kind(found.st_mode) or 'no file'
        elif path.name.endswith(_NEVER_A_FOLDER):
            content.special[name] = 'a folder'
        elif not path.is_symlink() and name.count('/') < _MOST_DEPTH:
            _scan(path, f'{name}/', content)
        if len(content.files) + len(content.special) > _MOST_FILES:
            raise CheckpointError(f'{folder}: more than {_MOST_FILES} files; give a model folder')


def check_kinds(content: FolderContent, findings: Findings) -> None:
    """What has the name of a file is one."""
    for name, kind in content.special.items():
        findings.problem('files', f'{name[:200]} is {kind}, not a regular file')
    lost = [name for name, nbytes in content.files.items() if nbytes < 0]
    if lost:
        findings.problem('files', f'{len(lost)} are links to nothing: {some(lost)}')


def tell_links(content: FolderContent, findings: Findings) -> None:
    """Links that lead out of the folder are no fault, and worth knowing for whoever copies it."""
    root = content.path.resolve()
    out = [name for name, nbytes in content.files.items() if nbytes >= 0 and _leads_out(content.path / name, root)]
    if out:
        findings.note(
            'files', f'{len(out)} are links out of the folder, as in the cache of huggingface_hub: {some(out)}'
        )


def _leads_out(path: Path, root: Path) -> bool:
    return path.is_symlink() and not path.resolve().is_relative_to(root)


def read_headers(content: FolderContent, findings: Findings, only: Collection[str] | None = None) -> list[WeightFolder]:
    """The headers of all weights; those that are damaged are reported and left out."""
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
        findings.note('headers', f'{len(misaligned)} tensors are not aligned in their file: {some(misaligned)}')
    if not findings.has_problem('headers'):
        n_files = sum(len(folder.headers) for folder in folders.values())
        findings.ok('headers', f'{n_tensors} tensors lie in {n_files} files without a gap')
    return list(folders.values())


def check_indexes(folder: WeightFolder, findings: Findings) -> None:
    """Each index against the files that it names, and shards against their index."""
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
            findings.problem('index', f'{folder.path / name}: a shard, and there is no {match["stem"]}{INDEX_SUFFIX}')
        elif match and name not in indexed:
            findings.problem('index', f'{folder.path / name}: a shard that the index does not name')
    single = [name for name in weights if not _SHARD.fullmatch(name)]
    if indexed and 'model.safetensors' in single and 'model.safetensors' not in indexed:
        findings.problem('index', f'{folder.path}: model.safetensors lies beside shards; loaders read only one of them')


def _check_index(folder: WeightFolder, path: Path, names: Collection[str], findings: Findings) -> set[str]:
    """Returns the files that it names."""
    content = strict_json.read(path)
    weight_map, metadata = content.get('weight_map'), content.get('metadata', {})
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise DamagedError(f'{path}: weight_map does not give a file for each tensor')
    if not isinstance(metadata, dict):
        raise DamagedError(f'{path}: metadata is not an object')
    files = set(weight_map.values())
    before = len(findings.found)
    stem = path.name.removesuffix(INDEX_SUFFIX)
    stems = {match['stem'] for match in map(_SHARD.fullmatch, files) if match}
    if stems and stem not in stems and stem.partition('.')[0] != 'model':
        findings.problem('index', f'{path}: loaders look for {some([f"{s}{INDEX_SUFFIX}" for s in sorted(stems)])}')
    for file in sorted(files):
        if '/' in file or file not in names:
            findings.problem('index', f'{path}: names {file[:200]!r}, which is not there')
    _compare_names(folder, path, weight_map, findings)
    if files <= set(folder.headers):
        _check_total(folder, path, metadata, files, findings)
    if len(findings.found) == before:
        findings.ok('index', f'{path.name}: {len(weight_map)} tensors, each in the file that it names')
    return files


def _compare_names(folder: WeightFolder, path: Path, weight_map: dict[str, str], findings: Findings) -> None:
    files = set(weight_map.values()) & set(folder.headers)
    place = {entry.name: file for file in files for entry in folder.headers[file].entries}
    missing = [n for n, file in weight_map.items() if file in folder.headers and place.get(n) != file]
    extra = [name for name in place if name not in weight_map]
    if missing:
        findings.problem('index', f'{path}: not in the file that it names: {some(missing)}')
    if extra:
        findings.problem('index', f'{path}: does not name {some(extra)}')


def _check_total(
    folder: WeightFolder, path: Path, metadata: dict[str, Any], files: set[str], findings: Findings
) -> None:
    total = metadata.get('total_size')
    found = sum(entry.end - entry.start for file in files for entry in folder.headers[file].entries)
    if total is None:
        findings.note('index', f'{path}: has no total_size')
    elif isinstance(total, bool) or not isinstance(total, (int, float)) or total != found:
        findings.problem('index', f'{path}: total_size {str(total)[:40]}; the tensors take {found} bytes')


def find_duplicates(folder: WeightFolder, findings: Findings) -> None:
    """A tensor in two shards: loaders take either."""
    place: dict[tuple[str, str], str] = {}
    for file, header in folder.headers.items():
        match = _SHARD.fullmatch(file)
        for entry in header.entries if match else ():
            key = (match['stem'], entry.name)
            if key in place:
                findings.problem('headers', f'{folder.path}: {entry.name[:200]} is in both {place[key]} and {file}')
            place[key] = file
