"""The check of a folder, before a commit and by xhf-verify: files, headers, index, checksums, values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError, IncompleteError
from xhf_hooks.files.checksums import sum_file
from xhf_hooks.files.manifest import FileRecord, Manifest
from xhf_hooks.format import checksum
from xhf_hooks.format.index import INDEX_SUFFIX, MANIFEST_NAME, SHARD_NAME, WEIGHTS_NAME, WEIGHTS_SUFFIX, read_index
from xhf_hooks.format.loaded_files import is_read_by_loaders
from xhf_hooks.format.safetensors import Header, read_header
from xhf_hooks.format.text import counted, size_text, some
from xhf_hooks.system.threads import WorkerThreads, default_workers

#: Kinds of findings, in the order of the report: problems last, where a terminal shows them.
OK = 'ok'
NOTE = 'note'
UNCHECKED = 'unchecked'
PROBLEM = 'problem'
_ORDER = [OK, NOTE, UNCHECKED, PROBLEM]


def check_folder(path: Path, manifest: Manifest, workers: int | None = None) -> None:
    """Check that a folder matches its manifest: files, headers, index, and all bytes, read back from the disk.

    Args:
        manifest: Need not be written yet.
        workers: Number of threads that read; None: see :func:`.default_workers`.

    Raises:
        IncompleteError: The folder differs from the manifest; one fault per line.
    """
    check = FolderCheck(path, manifest, list_files(path), is_just_written=True)
    check.check_structure()
    if check.is_good:
        check.read(workers, from_disk=True)
    if differences := check.problems():
        raise IncompleteError(f'{path}: differs from what was saved: ' + '\n'.join(differences[:20]))


def list_files(folder: Path) -> dict[str, int]:
    """Sizes in bytes of all files below a folder, without hidden ones, by relative path with slashes.

    Links to files are followed, as in the cache of huggingface_hub.
    """
    paths = {path.relative_to(folder): path for path in sorted(folder.rglob('*')) if path.is_file()}
    shown = {name: path for name, path in paths.items() if not any(part.startswith('.') for part in name.parts)}
    return {name.as_posix(): path.stat().st_size for name, path in shown.items()}


@dataclass(frozen=True)
class Finding:
    """One line of a report: its kind, such as :data:`PROBLEM`, and what was looked at."""

    kind: str
    check: str
    text: str


class FolderCheck:
    """The check of one folder, step by step, and what it found.

    Args:
        path: The folder.
        manifest: What is to be in it; None if that is unknown.
        files: Sizes by relative path; see :func:`list_files`.
        is_just_written: Whether nobody can have changed a file yet. Later, a change of a file that no loader reads,
            such as README.md, is a note.

    Attributes:
        headers: Headers of the undamaged weight files, by relative path.
    """

    def __init__(
        self, path: Path, manifest: Manifest | None, files: dict[str, int], *, is_just_written: bool = False
    ) -> None:
        self.path, self.manifest, self.files = path, manifest, files
        self._is_just_written = is_just_written
        self.headers: dict[str, Header] = {}
        self.findings: list[Finding] = []
        self.read_nbytes = 0
        self.seconds = 0.0
        self._started = time.perf_counter()

    def add(self, kind: str, check: str, text: str) -> None:
        """Add a finding. A problem does not stop the checks."""
        self.findings.append(Finding(kind, check, text))

    def problems(self, check: str | None = None) -> list[str]:
        """The texts of all problems, or of those that one check found."""
        return [found.text for found in self.findings if found.kind == PROBLEM and check in (None, found.check)]

    @property
    def is_good(self) -> bool:
        return not self.problems()

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(self.files.values())

    @property
    def n_tensors(self) -> int:
        return sum(len(header.entries) for header in self.headers.values())

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            'path': str(self.path),
            'good': self.is_good,
            'findings': [vars(finding) for finding in self.findings],
            'n_files': len(self.files),
            'n_tensors': self.n_tensors,
            'nbytes': self.nbytes,
            'read_nbytes': self.read_nbytes,
            'seconds': self.seconds,
        }

    def lines(self) -> list[str]:
        """The report as text."""
        ordered = sorted(self.findings, key=lambda found: _ORDER.index(found.kind))
        verdict = 'good' if self.is_good else 'DAMAGED OR CHANGED'
        rate = f', {self.read_nbytes / self.seconds / 1e9:.2f} GB/s' if self.read_nbytes else ''
        counts = f'{counted(len(self.files), "file")}, {counted(self.n_tensors, "tensor")}'
        size = f'{size_text(self.nbytes)} in {self.seconds:.1f} s'
        lines = [f'{found.kind:<10} {found.check:<11} {found.text}' for found in ordered]
        return [*lines, f'{self.path}: {verdict} ({counts}, {size}{rate})']

    def check_structure(self) -> None:
        """Check all that needs no tensor to be read."""
        if self.manifest is not None:
            self._compare_files(self.manifest)
        self._read_headers()
        weights = {name.rpartition('/')[0] for name in self.files if name.endswith((WEIGHTS_SUFFIX, INDEX_SUFFIX))}
        for folder in sorted(weights):
            self._check_indexes(f'{folder}/' if folder else '')
        self.seconds = time.perf_counter() - self._started

    def read(
        self,
        workers: int | None = None,
        *,
        from_disk: bool = False,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Read every byte once: compare checksums with the manifest, count infinite and NaN values.

        Args:
            from_disk: See :func:`.sum_file`. Values are not counted then.
        """
        if self.manifest is None:
            names = [name for name in self.files if name.endswith(WEIGHTS_SUFFIX)]
        else:
            names = [name for name in self.manifest.files if name in self.files]
        total = sum(self.files[name] for name in names)
        sums: dict[str, FileRecord] = {}

        def report(nbytes: int) -> None:
            self.read_nbytes += nbytes
            on_progress(self.read_nbytes, total)

        with WorkerThreads(workers or default_workers()) as threads:
            for name in names:
                try:
                    header = self.headers.get(name)
                    sums[name] = sum_file(self.path / name, header, threads, from_disk=from_disk, on_read=report)
                except OSError as error:
                    self.add(PROBLEM, 'checksums', f'{name}: cannot be read ({error.strerror or error})')
        if self.manifest is not None:
            self._compare_sums(sums, self.manifest.files)
        tensors = [named for file in sums.values() for named in file.tensors.items()]
        self._tell_values(len(tensors), {name: tensor.non_finite for name, tensor in tensors if tensor.non_finite})
        self.seconds = time.perf_counter() - self._started

    def _compare_files(self, manifest: Manifest) -> None:
        """Names and sizes."""
        for name, record in manifest.files.items():
            found = self.files.get(name)
            if found != record.nbytes and self._may_change(name):
                how = 'is missing' if found is None else 'was changed after the save'
                self.add(NOTE, 'files', f'{name} {how}; no loader reads it')
            elif found is None:
                self.add(PROBLEM, 'files', f'{name} is missing')
            elif found != record.nbytes:
                self.add(PROBLEM, 'files', f'{name}: expected {record.nbytes} bytes, found {found}')
        foreign = self.files.keys() - manifest.files.keys() - {MANIFEST_NAME}
        for name in sorted(foreign):
            if self._is_read(name):
                self.add(PROBLEM, 'files', f'{name} was added after the save, and loaders may read it')
            else:
                self.add(NOTE, 'files', f'{name} was added after the save')
        if not self.problems('files'):
            n_files = counted(len(manifest.files), 'file')
            self.add(OK, 'files', f'{n_files} with the sizes in {MANIFEST_NAME} ({manifest.step.label})')

    def _may_change(self, name: str) -> bool:
        return not self._is_just_written and not self._is_read(name)

    def _is_read(self, name: str) -> bool:
        saved = () if self.manifest is None else self.manifest.files
        return is_read_by_loaders(name, {saved_name.rpartition('/')[0] for saved_name in saved})

    def _read_headers(self) -> None:
        for name in self.files:
            if name.endswith(WEIGHTS_SUFFIX):
                try:
                    self.headers[name] = read_header(self.path / name)
                except DamagedError as error:
                    self.add(PROBLEM, 'headers', str(error))
        if not self.problems('headers'):
            counts = f'{counted(self.n_tensors, "tensor")} in {counted(len(self.headers), "file")}'
            self.add(OK, 'headers', f'{counts}, without gaps')

    def _check_indexes(self, prefix: str) -> None:
        """Check the indexes of one folder against its shards, and shards against their index."""
        inside = {name.removeprefix(prefix) for name in self.files if name.startswith(prefix)}
        files = {name for name in inside if '/' not in name}
        indexed: set[str] = set()
        for name in sorted(files):
            if name.endswith(INDEX_SUFFIX):
                try:
                    indexed |= self._check_index(prefix, name, files)
                except DamagedError as error:
                    self.add(PROBLEM, 'index', str(error))
        shards = {name for name in files if SHARD_NAME.fullmatch(name)}
        self._tell_names('shards that no index names', [prefix + name for name in shards - indexed])
        if indexed and WEIGHTS_NAME in files - indexed:
            self.add(PROBLEM, 'index', f'{prefix}model.safetensors beside shards; loaders read only one of them')

    def _check_index(self, prefix: str, name: str, files: set[str]) -> set[str]:
        """Check one index; returns the files that it names."""
        where, n_before = f'{prefix}{name}', len(self.problems())
        weight_map, metadata = read_index(self.path / where)
        named = set(weight_map.values())
        self._tell_names(f'{where}: files are missing', named - files)
        headers = {file: self.headers[prefix + file] for file in named & files if prefix + file in self.headers}
        listed = {(tensor, file) for tensor, file in weight_map.items() if file in headers}
        found = {(entry.name, file) for file, header in headers.items() for entry in header.entries}
        self._tell_names(f'{where}: tensors are not in their files', [tensor for tensor, _ in listed - found])
        self._tell_names(f'{where}: tensors are not in the index', [tensor for tensor, _ in found - listed])
        nbytes = sum(entry.end - entry.start for header in headers.values() for entry in header.entries)
        total = metadata.get('total_size')
        if total is None:
            self.add(NOTE, 'index', f'{where}: no total_size')
        elif total != nbytes and headers.keys() == named:
            self.add(PROBLEM, 'index', f'{where}: total_size is {str(total)[:40]}, the tensors have {nbytes} bytes')
        if len(self.problems()) == n_before:
            self.add(OK, 'index', f'{name}: {counted(len(listed), "tensor")}, all in their files')
        return named

    def _compare_sums(self, sums: Mapping[str, FileRecord], known: Mapping[str, FileRecord]) -> None:
        n_files = n_tensors = 0
        not_compared = sorted(name for name in known.keys() - sums.keys() if not self._may_change(name))
        for name, found in sums.items():
            is_other = found.crc32 != known[name].crc32
            if is_other and self._may_change(name):
                if found.nbytes == known[name].nbytes:  # else that is told already
                    self.add(NOTE, 'files', f'{name} was changed after the save; no loader reads it')
                continue
            tensors = known[name].tensors
            compared = [n for n in found.tensors if n in tensors]
            changed = [n for n in compared if tensors[n].crc32 != found.tensors[n].crc32]
            if changed:
                self.add(PROBLEM, 'checksums', f'{name}: {counted(len(changed), "tensor")} changed: {some(changed)}')
            elif found.nbytes != known[name].nbytes:
                not_compared.append(name)
            elif is_other:
                where = ' outside of its tensors' if found.tensors else ''
                crcs = f'expected CRC-32 {checksum.to_hex(known[name].crc32)}, found {checksum.to_hex(found.crc32)}'
                self.add(PROBLEM, 'checksums', f'{name}: has changed{where}: {crcs}')
            else:
                n_files += 1
            n_tensors += len(compared)
        if not_compared:
            text = f'not compared, since missing, unreadable or of another size: {some(not_compared)}'
            self.add(UNCHECKED, 'checksums', text)
        if not self.problems('checksums'):
            counts = f'{counted(n_files, "file")} and {counted(n_tensors, "tensor")}'
            self.add(OK, 'checksums', f'{counts}, all unchanged')

    def _tell_values(self, n_tensors: int, non_finite: Mapping[str, int]) -> None:
        worst = sorted(non_finite, key=non_finite.__getitem__, reverse=True)
        if not worst:
            self.add(OK, 'values', f'no infinite or NaN values in {counted(n_tensors, "tensor")}')
            return
        shown = some([f'{name} ({non_finite[name]})' for name in worst])
        self.add(PROBLEM, 'values', f'{counted(len(worst), "tensor")} with infinite or NaN values: {shown}')

    def _tell_names(self, what: str, names: Iterable[str]) -> None:
        listed = sorted(names)
        if listed:
            self.add(PROBLEM, 'index', f'{what}: {some(listed)}')
