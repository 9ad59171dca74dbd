"""A folder against its manifest; also what the hook asks before it commits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from xhf_hooks.concurrency.thread_pool import WorkerThreads, default_workers
from xhf_hooks.errors import IncompleteError
from xhf_hooks.format import checksum
from xhf_hooks.format.safetensors import Header
from xhf_hooks.format.text import some
from xhf_hooks.integrity.checksums import FileSums, FileToRead, sum_files
from xhf_hooks.integrity.findings import Findings
from xhf_hooks.integrity.folder_scan import (
    READ_BY_LOADERS,
    WEIGHTS_SUFFIX,
    FolderContent,
    WeightFolder,
    check_kinds,
    read_headers,
    scan,
)
from xhf_hooks.integrity.manifest import MANIFEST_NAME, Manifest, parse_manifest


def check_folder(
    path: Path,
    manifest: Mapping[str, Any],
    level: str,
    *,
    only: Collection[str] | None = None,
    threads: WorkerThreads | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Does a folder hold what its manifest says? Runs on: any rank, on its own, all or some of the files.

    Args:
        path: The folder; the manifest need not be in it yet.
        manifest: Content of ``xhf_manifest.json``.
        level: ``'sizes'``: the files are there, have their sizes, and the headers describe the tensors of the
            manifest. ``'full'``: also, every byte is read back, from the disk as far as it has been flushed, and
            has the checksums of the manifest.
        only: Files to look at, as the manifest names them; None takes all. Ranks may share them out.
        threads: They read; None starts one for each core.

    Raises:
        IncompleteError: Something is not as it says; each fault on a line.
        DamagedError: The manifest itself is not well formed.
        ValueError: Another ``level``.
    """
    if level not in ('sizes', 'full'):
        raise ValueError(f"level: expected 'sizes' or 'full', found {level!r}")
    checked, findings, content = parse_manifest(manifest, f'{path}: manifest'), Findings(), scan(path)
    check_kinds(content, findings)
    compare_files(content, checked, findings, only)
    folders = read_headers(content, findings, only)
    compare_headers(folders, checked, findings)
    if level == 'full' and not findings.has_problem():
        names = [name for name in checked.files if only is None or name in only]
        with nullcontext(threads) if threads is not None else WorkerThreads(default_workers()) as readers:
            sums = read_files(content, folders, names, readers, drop_cache=True, progress=on_progress)
        compare_sums(content, checked, sums, findings)
    if findings.has_problem():
        problems = findings.texts('problem')
        raise IncompleteError(f'{path}: not what was saved: ' + '\n'.join(problems[:20]))


def compare_files(
    content: FolderContent, manifest: Manifest, findings: Findings, only: Collection[str] | None = None
) -> None:
    """Files and sizes."""
    before = len(findings.found)
    for name, record in manifest.files.items():
        if only is not None and name not in only:
            continue
        found = content.files.get(name)
        if found is None and name not in content.special:
            findings.problem('files', f'{name[:200]} is missing')
        elif found is not None and found >= 0 and found != record.nbytes:
            findings.problem('files', f'{name[:200]}: expected {record.nbytes} bytes, found {found}')
    if only is None and manifest.has_checksums:
        _look_for_others(content, manifest, findings)
    if len(findings.found) == before:
        findings.ok('files', f'{len(manifest.files)} files have the sizes of {MANIFEST_NAME} ({manifest.label})')


def _look_for_others(content: FolderContent, manifest: Manifest, findings: Findings) -> None:
    others = [name for name in content.files if name not in manifest.files and name != MANIFEST_NAME]
    for name in others:
        if name.endswith(READ_BY_LOADERS):
            findings.problem('files', f'{name[:200]} was not there when the model was saved, and loaders may read it')
        else:
            findings.note('files', f'{name[:200]} was not there when the model was saved')


def compare_headers(folders: Collection[WeightFolder], manifest: Manifest, findings: Findings) -> None:
    """Names, shapes and dtypes of the tensors."""
    before = len(findings.found)
    for folder in folders:
        for file, header in folder.headers.items():
            name = folder.prefix + file
            record = manifest.files.get(name)
            if record is not None and record.tensors is not None:
                _compare_header(name, header, {n: (t.shape, t.dtype) for n, t in record.tensors.items()}, findings)
    if manifest.has_checksums and len(findings.found) == before:
        findings.ok('headers', f'tensors have the names, shapes and dtypes of {MANIFEST_NAME}')


def _compare_header(name: str, header: Header, expected: dict[str, tuple[Any, str]], findings: Findings) -> None:
    found = {entry.name: (entry.shape, entry.dtype) for entry in header.entries}
    missing = [tensor for tensor in expected if tensor not in found]
    extra = [tensor for tensor in found if tensor not in expected]
    if missing:
        findings.problem('headers', f'{name}: tensors are missing: {some(missing)}')
    if extra:
        findings.problem('headers', f'{name}: tensors that were not saved: {some(extra)}')
    for tensor in expected.keys() & found.keys():
        if found[tensor] != expected[tensor]:
            findings.problem('headers', f'{name}: {tensor[:200]}: expected {expected[tensor]}, found {found[tensor]}')


def read_files(
    content: FolderContent,
    folders: Collection[WeightFolder],
    names: Collection[str],
    threads: WorkerThreads,
    *,
    drop_cache: bool = False,
    count_non_finite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, FileSums]:
    """Read and sum up the files ``names`` that are there."""
    headers = {folder.prefix + name: h for folder in folders for name, h in folder.headers.items()}
    names = [name for name in names if content.files.get(name, -1) >= 0]
    files = [
        FileToRead(content.path / name, content.files[name], headers.get(name), count_non_finite) for name in names
    ]
    return dict(zip(names, sum_files(files, threads, drop_cache=drop_cache, on_progress=progress), strict=True))


def compare_sums(content: FolderContent, manifest: Manifest, sums: Mapping[str, FileSums], findings: Findings) -> None:
    """Checksums of files, and which tensors differ where a file's does."""
    n_files, n_tensors = 0, 0
    for name, found in sums.items():
        record = manifest.files.get(name)
        if found.error is not None:
            findings.problem('checksums', f'{name[:200]}: cannot be read ({found.error})')
        if found.error is not None or record is None or record.crc32 is None:
            continue
        tensors = record.tensors or {}
        changed = [
            tensor for tensor, crc in found.tensors.items() if tensor in tensors and tensors[tensor].crc32 != crc
        ]
        if changed:
            findings.problem('checksums', f'{name}: {len(changed)} tensors have other bytes: {some(changed)}')
        elif found.crc32 != record.crc32 and content.files[name] == record.nbytes:
            is_weights = name.endswith(WEIGHTS_SUFFIX)
            where = ' outside of its tensors' if is_weights and found.tensors else ''
            expected = checksum.to_hex(record.crc32)
            findings.problem(
                'checksums',
                f'{name[:200]}: has other bytes{where}: CRC-32 {checksum.to_hex(found.crc32)}, not {expected}',
            )
        n_files, n_tensors = n_files + 1, n_tensors + len(tensors)
    if manifest.has_checksums and not findings.has_problem('checksums'):
        findings.ok('checksums', f'{n_files} files and {n_tensors} tensors have the bytes that were saved')
