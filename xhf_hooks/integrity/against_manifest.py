"""Compares a folder with its manifest, for xhf-verify and before a commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from xhf_hooks.concurrency.thread_pool import WorkerThreads, default_workers
from xhf_hooks.errors import IncompleteError
from xhf_hooks.format import checksum
from xhf_hooks.format.safetensors import Header
from xhf_hooks.format.text import counted, some
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
    """Check that a folder matches its manifest. Runs on: any rank, alone, for all or some of the files.

    Args:
        path: The folder; the manifest need not be written yet.
        manifest: The content of ``xhf_manifest.json``.
        level: ``'sizes'``: files and their sizes, and the tensors in their headers. ``'full'``: also the checksums
            of all bytes, read back from the disk where they were flushed.
        only: Names of the files to check, as in the manifest; None: all. Ranks may divide them among themselves.
        threads: Threads to read with; None: starts some.

    Raises:
        IncompleteError: The folder differs from the manifest; one fault per line.
        DamagedError: The manifest is malformed.
        ValueError: Unknown ``level``.
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
            sums = read_files(content, folders, names, readers, findings, drop_cache=True, progress=on_progress)
        compare_sums(content, checked, sums, findings)
    if findings.has_problem():
        problems = findings.texts('problem')
        raise IncompleteError(f'{path}: differs from what was saved: ' + '\n'.join(problems[:20]))


def compare_files(
    content: FolderContent, manifest: Manifest, findings: Findings, only: Collection[str] | None = None
) -> None:
    """Compare the files and their sizes."""
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
        n_files = counted(len(manifest.files), 'file')
        findings.ok('files', f'{n_files} with the sizes in {MANIFEST_NAME} ({manifest.label})')


def _look_for_others(content: FolderContent, manifest: Manifest, findings: Findings) -> None:
    others = [name for name in content.files if name not in manifest.files and name != MANIFEST_NAME]
    for name in others:
        if name.endswith(READ_BY_LOADERS):
            findings.problem('files', f'{name[:200]} was added after the save, and loaders may read it')
        else:
            findings.note('files', f'{name[:200]} was added after the save')


def compare_headers(folders: Collection[WeightFolder], manifest: Manifest, findings: Findings) -> None:
    """Compare the names, shapes and dtypes of the tensors."""
    before = len(findings.found)
    for folder in folders:
        for file, header in folder.headers.items():
            name = folder.prefix + file
            record = manifest.files.get(name)
            if record is not None and record.tensors is not None:
                _compare_header(name, header, {n: (t.shape, t.dtype) for n, t in record.tensors.items()}, findings)
    if manifest.has_checksums and len(findings.found) == before:
        findings.ok('headers', f'names, shapes and dtypes of all tensors match {MANIFEST_NAME}')


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
    findings: Findings,
    *,
    drop_cache: bool = False,
    count_non_finite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, FileSums]:
    """Checksums of the files ``names``, except those that are missing or cannot be read."""
    headers = {folder.prefix + name: h for folder in folders for name, h in folder.headers.items()}
    names = [name for name in names if content.files.get(name, -1) >= 0]
    files = [
        FileToRead(content.path / name, content.files[name], headers.get(name), count_non_finite) for name in names
    ]
    found = sum_files(files, threads, drop_cache=drop_cache, on_progress=progress)
    sums = dict(zip(names, found, strict=True))
    for name, file_sums in sums.items():
        if file_sums.error is not None:
            findings.problem('checksums', f'{name[:200]}: cannot be read ({file_sums.error})')
    return {name: file_sums for name, file_sums in sums.items() if file_sums.error is None}


def compare_sums(content: FolderContent, manifest: Manifest, sums: Mapping[str, FileSums], findings: Findings) -> None:
    """Compare the recorded checksums of files and of the tensors in them."""
    n_files, n_tensors = 0, 0
    for name, found in sums.items():
        record = manifest.files.get(name)
        if record is None or record.crc32 is None:
            continue
        tensors = record.tensors or {}
        changed = [
            tensor for tensor, crc in found.tensors.items() if tensor in tensors and tensors[tensor].crc32 != crc
        ]
        if changed:
            findings.problem('checksums', f'{name}: {counted(len(changed), "tensor")} changed: {some(changed)}')
        elif found.crc32 != record.crc32 and content.files[name] == record.nbytes:
            is_weights = name.endswith(WEIGHTS_SUFFIX)
            where = ' outside of its tensors' if is_weights and found.tensors else ''
            expected = checksum.to_hex(record.crc32)
            findings.problem(
                'checksums',
                f'{name[:200]}: has changed{where}: expected CRC-32 {expected}, found {checksum.to_hex(found.crc32)}',
            )
        n_files, n_tensors = n_files + 1, n_tensors + len(tensors)
    if manifest.has_checksums and not findings.has_problem('checksums'):
        findings.ok('checksums', f'{counted(n_files, "file")} and {counted(n_tensors, "tensor")}, all unchanged')
