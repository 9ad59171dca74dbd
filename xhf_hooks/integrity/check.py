"""The check of a folder, before a commit and by xhf-verify: files, headers, index, checksums, values."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path

from xhf_hooks.errors import DamagedError, IncompleteError
from xhf_hooks.format import checksum, strict_json
from xhf_hooks.format.safetensors import Header, read_header
from xhf_hooks.format.text import counted, some
from xhf_hooks.integrity.checksums import FileSums, sum_file
from xhf_hooks.integrity.manifest import MANIFEST_NAME, Manifest
from xhf_hooks.integrity.report import NOTE, OK, PROBLEM, Report
from xhf_hooks.threads import WorkerThreads, default_workers

WEIGHTS_SUFFIX = '.safetensors'
INDEX_SUFFIX = '.safetensors.index.json'
#: Files that loaders may read: one that was added after the save may change what is loaded.
_READ_BY_LOADERS = (
    *('.json', '.safetensors', '.model', '.jinja', '.txt', '.bin', '.pt', '.pth', '.h5', '.msgpack', '.gguf', '.py'),
)
_SHARD = re.compile(r'.+-\d{5}-of-\d{5}\.safetensors')


def check_folder(path: Path, manifest: Manifest, threads: WorkerThreads | None = None) -> None:
    """Check that a folder matches its manifest: files, headers, index, and all bytes, read back from the disk.

    Args:
        manifest: Need not be written yet.
        threads: Threads to read with; None: starts some.

    Raises:
        IncompleteError: The folder differs from the manifest; one fault per line.
    """
    check = FolderCheck(path, manifest)
    check.check_structure()
    if check.report.is_good:
        with nullcontext(threads) if threads is not None else WorkerThreads(default_workers()) as readers:
            check.read(readers, from_disk=True)
    # Infinite and NaN values are no difference: a diverged run is saved as it is
    differences = [found.text for found in check.report.findings if found.kind == PROBLEM and found.check != 'values']
    if differences:
        raise IncompleteError(f'{path}: differs from what was saved: ' + '\n'.join(differences[:20]))


def list_files(folder: Path) -> dict[str, int]:
    """Sizes in bytes of all files below a folder, without hidden ones, by relative path with slashes.

    Links to files are followed, as in the cache of huggingface_hub.
    """
    paths = {path.relative_to(folder): path for path in sorted(folder.rglob('*')) if path.is_file()}
    shown = {name: path for name, path in paths.items() if not any(part.startswith('.') for part in name.parts)}
    return {name.as_posix(): path.stat().st_size for name, path in shown.items()}


class FolderCheck:
    """The check of one folder, step by step.

    Attributes:
        files: Sizes by relative path; see :func:`list_files`.
        headers: Headers of the undamaged weight files, by relative path.
        report: What was found so far.
    """

    def __init__(self, path: Path, manifest: Manifest | None) -> None:
        self.path, self.manifest, self.report = path, manifest, Report(path)
        self.files, self.headers = list_files(path), dict[str, Header]()
        self._started = time.perf_counter()

    def check_structure(self) -> None:
        """Check all that needs no tensor to be read."""
        if self.manifest is not None:
            self._compare_files(self.manifest)
        self._read_headers()
        weights = {name.rpartition('/')[0] for name in self.files if name.endswith((WEIGHTS_SUFFIX, INDEX_SUFFIX))}
        for folder in sorted(weights):
            self._check_indexes(f'{folder}/' if folder else '')
        self._count()

    def read(
        self,
        threads: WorkerThreads,
        *,
        from_disk: bool = False,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Read every byte once: compare checksums with the manifest, or count infinite and NaN values without one."""
        known = None if self.manifest is None else self.manifest.files
        names = known if known is not None else [name for name in self.files if name.endswith(WEIGHTS_SUFFIX)]
        names = [name for name in names if name in self.files]
        total, sums = sum(self.files[name] for name in names), dict[str, FileSums]()

        def tell(nbytes: int) -> None:
            self.report.read_nbytes += nbytes
            on_progress(self.report.read_nbytes, total)

        for name in names:
            try:
                header = self.headers.get(name)
                sums[name] = sum_file(
                    self.path / name, header, threads, count=known is None, from_disk=from_disk, on_read=tell
                )
            except OSError as error:
                self.report.add(PROBLEM, 'checksums', f'{name}: cannot be read ({error.strerror or error})')
        if known is None:
            self._tell_values({tensor: count for found in sums.values() for tensor, count in found.non_finite.items()})
        else:
            self._compare_sums(sums)
            tensors = {name: tensor for file in known.values() for name, tensor in file.tensors.items()}
            self._tell_values({name: tensor.non_finite for name, tensor in tensors.items() if tensor.non_finite})
        self._count()

    def _count(self) -> None:
        report = self.report
        report.n_files, report.nbytes = len(self.files), sum(self.files.values())
        report.n_tensors = sum(len(header.entries) for header in self.headers.values())
        report.seconds = time.perf_counter() - self._started

    def _compare_files(self, manifest: Manifest) -> None:
        """Names and sizes."""
        for name, record in manifest.files.items():
            found = self.files.get(name)
            if found is None:
                self.report.add(PROBLEM, 'files', f'{name} is missing')
            elif found != record.nbytes:
                self.report.add(PROBLEM, 'files', f'{name}: expected {record.nbytes} bytes, found {found}')
        others = self.files.keys() - manifest.files.keys() - {MANIFEST_NAME}
        for name in sorted(others):
            if name.endswith(_READ_BY_LOADERS):
                self.report.add(PROBLEM, 'files', f'{name} was added after the save, and loaders may read it')
            else:
                self.report.add(NOTE, 'files', f'{name} was added after the save')
        if not self.report.problems('files'):
            n_files = counted(len(manifest.files), 'file')
            self.report.add(OK, 'files', f'{n_files} with the sizes in {MANIFEST_NAME} ({manifest.step.label})')

    def _read_headers(self) -> None:
        for name in self.files:
            if name.endswith(WEIGHTS_SUFFIX):
                try:
                    self.headers[name] = read_header(self.path / name)
                except DamagedError as error:
                    self.report.add(PROBLEM, 'headers', str(error))
        if not self.report.problems('headers'):
            n_tensors = sum(len(header.entries) for header in self.headers.values())
            counts = f'{counted(n_tensors, "tensor")} in {counted(len(self.headers), "file")}'
            self.report.add(OK, 'headers', f'{counts}, without gaps')

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
                    self.report.add(PROBLEM, 'index', str(error))
        shards = {name for name in files if _SHARD.fullmatch(name)}
        self._tell_names('index', 'shards that no index names', [prefix + name for name in shards - indexed])
        if indexed and 'model.safetensors' in files - indexed:
            text = f'{prefix}model.safetensors beside shards; loaders read only one of them'
            self.report.add(PROBLEM, 'index', text)

    def _check_index(self, prefix: str, name: str, files: set[str]) -> set[str]:
        """Check one index; returns the files that it names.

        Raises:
            DamagedError: It is malformed.
        """
        where, n_before = f'{prefix}{name}', len(self.report.problems())
        content = strict_json.read(self.path / where)
        weight_map, metadata = content.get('weight_map'), content.get('metadata', {})
        is_map = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
        if not is_map or not isinstance(metadata, dict):
            raise DamagedError(f'{where}: expected a weight_map of file names, and metadata')
        named = set(weight_map.values())
        self._tell_names('index', f'{where}: files are missing', named - files)
        headers = {file: self.headers[prefix + file] for file in named & files if prefix + file in self.headers}
        listed = {(tensor, file) for tensor, file in weight_map.items() if file in headers}
        found = {(entry.name, file) for file, header in headers.items() for entry in header.entries}
        self._tell_names('index', f'{where}: tensors are not in their files', [tensor for tensor, _ in listed - found])
        self._tell_names('index', f'{where}: tensors are not in the index', [tensor for tensor, _ in found - listed])
        nbytes = sum(entry.end - entry.start for header in headers.values() for entry in header.entries)
        total = metadata.get('total_size')
        if total is None:
            self.report.add(NOTE, 'index', f'{where}: no total_size')
        elif total != nbytes and headers.keys() == named:
            text = f'{where}: total_size is {str(total)[:40]}, but the tensors have {nbytes} bytes'
            self.report.add(PROBLEM, 'index', text)
        if len(self.report.problems()) == n_before:
            self.report.add(OK, 'index', f'{name}: {len(weight_map)} tensors, all in their files')
        return named

    def _compare_sums(self, sums: Mapping[str, FileSums]) -> None:
        n_tensors = 0
        for name, found in sums.items():
            record = self.manifest.files[name]
            tensors = record.tensors
            changed = [n for n, crc in found.tensors.items() if n in tensors and tensors[n].crc32 != crc]
            if changed:
                text = f'{name}: {counted(len(changed), "tensor")} changed: {some(changed)}'
                self.report.add(PROBLEM, 'checksums', text)
            elif found.crc32 != record.crc32 and self.files[name] == record.nbytes:
                where = ' outside of its tensors' if found.tensors else ''
                crcs = f'expected CRC-32 {checksum.to_hex(record.crc32)}, found {checksum.to_hex(found.crc32)}'
                self.report.add(PROBLEM, 'checksums', f'{name}: has changed{where}: {crcs}')
            n_tensors += len(tensors)
        if not self.report.problems('checksums'):
            counts = f'{counted(len(sums), "file")} and {counted(n_tensors, "tensor")}'
            self.report.add(OK, 'checksums', f'{counts}, all unchanged')

    def _tell_values(self, non_finite: Mapping[str, int]) -> None:
        worst = sorted(non_finite, key=non_finite.__getitem__, reverse=True)
        if not worst:
            self.report.add(OK, 'values', 'no infinite or NaN values')
            return
        shown = some([f'{name} ({non_finite[name]})' for name in worst])
        text = f'{counted(len(worst), "tensor")} with infinite or NaN values: {shown}'
        self.report.add(PROBLEM, 'values', text)

    def _tell_names(self, check: str, what: str, names: Iterable[str]) -> None:
        listed = sorted(names)
        if listed:
            self.report.add(PROBLEM, check, f'{what}: {some(listed)}')
