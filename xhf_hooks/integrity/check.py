"""The check of a folder, before a commit and by xhf-verify: files, headers, index, checksums, values."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError, DamagedError, IncompleteError
from xhf_hooks.format import checksum, strict_json
from xhf_hooks.format.safetensors import Header, read_header
from xhf_hooks.format.text import counted, some
from xhf_hooks.integrity.checksums import FileSums, sum_file
from xhf_hooks.integrity.manifest import MANIFEST_NAME, Manifest, parse_manifest
from xhf_hooks.integrity.report import NOTE, OK, PROBLEM, Report
from xhf_hooks.threads import WorkerThreads, default_workers

WEIGHTS_SUFFIX = '.safetensors'
INDEX_SUFFIX = '.safetensors.index.json'
#: Files that loaders may read: one that was added after the save may change what is loaded.
_READ_BY_LOADERS = (
    *('.json', '.safetensors', '.model', '.jinja', '.txt', '.bin', '.pt', '.pth', '.h5', '.msgpack', '.gguf', '.py'),
)
_SHARD = re.compile(r'(?P<stem>.+)-\d{5}-of-\d{5}\.safetensors')


def check_folder(path: Path, manifest: Mapping[str, Any], level: str, *, threads: WorkerThreads | None = None) -> None:
    """Check that a folder matches its manifest. Runs on: any rank, alone.

    Args:
        manifest: The content of ``xhf_manifest.json``, which need not be written yet.
        level: ``'sizes'``: files and their sizes, the tensors in their headers, and the index. ``'full'``: also the
            checksums of all bytes, read back from the disk where they were flushed.
        threads: Threads to read with; None: starts some.

    Raises:
        IncompleteError: The folder differs from the manifest; one fault per line.
        DamagedError: The manifest is malformed.
        ValueError: Unknown ``level``.
    """
    if level not in ('sizes', 'full'):
        raise ValueError(f"level: expected 'sizes' or 'full', found {level!r}")
    check = FolderCheck(path, parse_manifest(manifest, f'{path}: manifest'))
    check.check_structure()
    if level == 'full' and check.report.is_good:
        with nullcontext(threads) if threads is not None else WorkerThreads(default_workers()) as readers:
            check.read(readers, from_disk=True)
    # Infinite and NaN values are no difference: a diverged run is saved as it is
    differences = [found.text for found in check.report.findings if found.kind == PROBLEM and found.check != 'values']
    if differences:
        raise IncompleteError(f'{path}: differs from what was saved: ' + '\n'.join(differences[:20]))


def list_files(folder: Path) -> dict[str, int]:
    """Sizes in bytes of all files below a folder, without hidden ones, by relative path with slashes.

    Links to files are followed, as in the cache of huggingface_hub. Broken links and what is no file have -1.

    Raises:
        CheckpointError: It cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise CheckpointError(f'{folder}: cannot be listed ({error.strerror}); give a model folder') from None

    found = {}
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith('.')]
        for path in (Path(parent, name) for name in names if not name.startswith('.')):
            try:
                status = path.stat()
            except OSError:
                status = None
            is_file = status is not None and stat.S_ISREG(status.st_mode)
            found[path.relative_to(folder).as_posix()] = status.st_size if is_file else -1
    return dict(sorted(found.items()))


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
        lost = [name for name, nbytes in self.files.items() if nbytes < 0]
        if lost:
            self.report.add(PROBLEM, 'files', f'{len(lost)} broken links or special files: {some(lost)}')
        if self.manifest is not None:
            self._compare_files(self.manifest)
        self._read_headers()
        if self.manifest is not None:
            self._compare_headers(self.manifest)
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
        known = self.manifest.files if self.manifest is not None and self.manifest.has_checksums else None
        names = known if known is not None else [name for name in self.files if name.endswith(WEIGHTS_SUFFIX)]
        names = [name for name in names if self.files.get(name, -1) >= 0]
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
            tensors = {name: tensor for file in known.values() for name, tensor in (file.tensors or {}).items()}
            self._tell_values({name: tensor.non_finite for name, tensor in tensors.items() if tensor.non_finite})
        self._count()

    def _count(self) -> None:
        report = self.report
        report.n_files, report.nbytes = len(self.files), sum(nbytes for nbytes in self.files.values() if nbytes > 0)
        report.n_tensors = sum(len(header.entries) for header in self.headers.values())
        report.seconds = time.perf_counter() - self._started

    def _compare_files(self, manifest: Manifest) -> None:
        """Names and sizes."""
        for name, record in manifest.files.items():
            found = self.files.get(name)
            if found is None:
                self.report.add(PROBLEM, 'files', f'{name} is missing')
            elif found >= 0 and found != record.nbytes:
                self.report.add(PROBLEM, 'files', f'{name}: expected {record.nbytes} bytes, found {found}')
        others = self.files.keys() - manifest.files.keys() - {MANIFEST_NAME} if manifest.has_checksums else ()
        for name in sorted(others):
            if name.endswith(_READ_BY_LOADERS):
                self.report.add(PROBLEM, 'files', f'{name} was added after the save, and loaders may read it')
            else:
                self.report.add(NOTE, 'files', f'{name} was added after the save')
        if not self.report.problems('files'):
            n_files = counted(len(manifest.files), 'file')
            self.report.add(OK, 'files', f'{n_files} with the sizes in {MANIFEST_NAME} ({manifest.label})')

    def _read_headers(self) -> None:
        for name in self.files:
            if name.endswith(WEIGHTS_SUFFIX) and self.files[name] >= 0:
                try:
                    self.headers[name] = read_header(self.path / name)
                except DamagedError as error:
                    self.report.add(PROBLEM, 'headers', str(error))
        misaligned = [name for header in self.headers.values() for name in header.misaligned]
        if misaligned:
            text = f'{counted(len(misaligned), "tensor")} misaligned in the file: {some(misaligned)}'
            self.report.add(NOTE, 'headers', text)
        if not self.report.problems('headers'):
            n_tensors = sum(len(header.entries) for header in self.headers.values())
            counts = f'{counted(n_tensors, "tensor")} in {counted(len(self.headers), "file")}'
            self.report.add(OK, 'headers', f'{counts}, without gaps')

    def _compare_headers(self, manifest: Manifest) -> None:
        """Names, shapes and dtypes of the tensors."""
        for name, header in self.headers.items():
            record = manifest.files.get(name)
            if record is None or record.tensors is None:
                continue
            expected = {tensor: (known.shape, known.dtype) for tensor, known in record.tensors.items()}
            found = {entry.name: (entry.shape, entry.dtype) for entry in header.entries}
            self._tell_names('headers', f'{name}: tensors are missing', expected.keys() - found.keys())
            self._tell_names('headers', f'{name}: tensors that were not saved', found.keys() - expected.keys())
            for tensor in sorted(expected.keys() & found.keys()):
                if found[tensor] != expected[tensor]:
                    text = f'{name}: {tensor}: expected {expected[tensor]}, found {found[tensor]}'
                    self.report.add(PROBLEM, 'headers', text)
        if manifest.has_checksums and not self.report.problems('headers'):
            self.report.add(OK, 'headers', f'names, shapes and dtypes of all tensors match {MANIFEST_NAME}')

    def _check_indexes(self, prefix: str) -> None:
        """Check the indexes of one folder against its shards, and shards against their index."""
        files = {name.removeprefix(prefix) for name in self.files if name.startswith(prefix)}
        indexed: set[str] = set()
        for name in sorted(files):
            if name.endswith(INDEX_SUFFIX) and '/' not in name:
                try:
                    indexed |= self._check_index(prefix, name, files)
                except DamagedError as error:
                    self.report.add(PROBLEM, 'index', str(error))
        place: dict[tuple[str, str], str] = {}
        for file in sorted(files):
            match = _SHARD.fullmatch(file) if '/' not in file else None
            if match and file not in indexed:
                index = f'{match["stem"]}{INDEX_SUFFIX}'
                text = 'a shard that is not in the index' if index in files else f'a shard, but there is no {index}'
                self.report.add(PROBLEM, 'index', f'{prefix}{file}: {text}')
            header = self.headers.get(prefix + file) if match else None
            for entry in header.entries if header is not None else ():
                other = place.setdefault((match['stem'], entry.name), file)
                if other != file:
                    self.report.add(PROBLEM, 'headers', f'{prefix}{entry.name} is in both {other} and {file}')
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
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise DamagedError(f'{where}: weight_map is not an object of file names')
        if not isinstance(metadata, dict):
            raise DamagedError(f'{where}: metadata is not an object')
        named = set(weight_map.values())
        stem = name.removesuffix(INDEX_SUFFIX)
        stems = {match['stem'] for match in map(_SHARD.fullmatch, named) if match}
        if stems and stem not in stems and stem.partition('.')[0] != 'model':
            expected = some([f'{stem}{INDEX_SUFFIX}' for stem in sorted(stems)])
            self.report.add(PROBLEM, 'index', f'{where}: loaders expect {expected}')
        for file in sorted(named):
            if '/' in file or file not in files:  # a name with a slash could leave the folder
                self.report.add(PROBLEM, 'index', f'{where}: {file!r} is missing')
        headers = {file: self.headers[prefix + file] for file in named if prefix + file in self.headers}
        place = {entry.name: file for file, header in headers.items() for entry in header.entries}
        lost = [tensor for tensor, file in weight_map.items() if file in headers and place.get(tensor) != file]
        self._tell_names('index', f'{where}: tensors are not in their files', lost)
        self._tell_names('index', f'{where}: tensors are not in the index', place.keys() - weight_map.keys())
        if headers.keys() == named:
            total = metadata.get('total_size')
            found = sum(entry.end - entry.start for header in headers.values() for entry in header.entries)
            if total is None:
                self.report.add(NOTE, 'index', f'{where}: no total_size')
            elif total != found or isinstance(total, bool):
                text = f'{where}: total_size is {str(total)[:40]}, but the tensors have {found} bytes'
                self.report.add(PROBLEM, 'index', text)
        if len(self.report.problems()) == n_before:
            self.report.add(OK, 'index', f'{name}: {len(weight_map)} tensors, all in their files')
        return named

    def _compare_sums(self, sums: Mapping[str, FileSums]) -> None:
        n_tensors = 0
        for name, found in sums.items():
            record = self.manifest.files[name]
            tensors = record.tensors or {}
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
