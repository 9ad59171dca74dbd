"""Checks one model folder: complete, consistent and, with a manifest, unchanged."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from xhf_hooks.concurrency.thread_pool import WorkerThreads, default_workers
from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.files.regular_files import require_regular
from xhf_hooks.format.text import counted, some
from xhf_hooks.integrity import against_manifest as against
from xhf_hooks.integrity.checksums import FileSums
from xhf_hooks.integrity.findings import Findings, FolderReport
from xhf_hooks.integrity.folder_scan import (
    FolderContent,
    WeightFolder,
    check_indexes,
    check_kinds,
    find_duplicates,
    read_headers,
    scan,
    tell_links,
)
from xhf_hooks.integrity.manifest import MANIFEST_NAME, Manifest, read_manifest
from xhf_hooks.verify.adapter_checks import check_adapter
from xhf_hooks.verify.model_checks import check_model, check_texts


def verify_folder(
    path: Path,
    *,
    workers: int | None = None,
    read: bool = True,
    model: bool = True,
    trust_remote_code: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> FolderReport:
    """Check a Hugging Face folder. With the manifest of this package, checksums are compared, too.

    Args:
        workers: Number of threads that read; None: see :func:`.default_workers`.
        read: Read every byte, for checksums and for infinite and NaN values.
        model: Compare with the model and tokenizer that transformers builds.
        trust_remote_code: Allow transformers to run code from the folder.
        on_progress: Called with bytes done and total bytes.

    Raises:
        CheckpointError: The folder does not hold a model.
    """
    started = time.perf_counter()
    if not path.is_dir():
        raise CheckpointError(f'{path}: no such folder; give a folder with *.safetensors files')
    findings, content = Findings(), scan(path)
    manifest = _manifest(content, findings)
    inner = [name for name in content.files if name.endswith(f'/{MANIFEST_NAME}')]
    if inner and MANIFEST_NAME not in content.files:
        shown = some([str(path / name.removesuffix(f'/{MANIFEST_NAME}')) for name in inner])
        raise CheckpointError(f'{path}: holds {len(inner)} model folders; give one of them: {shown}')
    if not content.weight_files() and manifest is None and MANIFEST_NAME not in content.files:
        for name, kind in content.special.items():
            raise CheckpointError(f'{path / name}: {kind}, not a regular file; give a folder with *.safetensors files')
        others = [name for name in content.files if name.endswith(('.bin', '.pt', '.pth', '.gguf', '.h5'))]
        raise CheckpointError(
            f'{path}: holds no *.safetensors files'
            + (f', only {some(others)}, which cannot be checked; convert it with xhf-convert first' if others else '')
        )
    check_kinds(content, findings)
    tell_links(content, findings)
    if manifest is not None:
        against.compare_files(content, manifest, findings)
    folders = read_headers(content, findings)
    if manifest is not None:
        against.compare_headers(folders, manifest, findings)
    for folder in folders:
        check_indexes(folder, findings)
        find_duplicates(folder, findings)
    _look_for_lost_shards(content, folders, findings)
    check_texts(content, findings)
    sums = _read(content, folders, manifest, findings, workers, on_progress) if read else {}
    if not read:
        findings.unchecked('checksums', 'nothing was read (--no-read)')
    _check_models(content, folders, sums, findings, model, trust_remote_code)
    return FolderReport(
        path=path,
        findings=tuple(findings.found),
        n_files=len(content.files),
        n_tensors=sum(len(header.entries) for folder in folders for header in folder.headers.values()),
        nbytes=sum(max(0, nbytes) for nbytes in content.files.values()),
        read_nbytes=sum(content.files[name] for name in sums),
        seconds=time.perf_counter() - started,
    )


def _manifest(content: FolderContent, findings: Findings) -> Manifest | None:
    try:
        manifest = read_manifest(content.path)
    except DamagedError as error:
        findings.problem('manifest', str(error))
        return None
    if manifest is None:
        findings.unchecked('checksums', f'no {MANIFEST_NAME}: changes since the save cannot be detected')
    elif not manifest.has_checksums:
        findings.unchecked(
            'checksums',
            f'{MANIFEST_NAME} has none (format {manifest.version}): changes since the save cannot be detected',
        )
    return manifest


def _read(
    content: FolderContent,
    folders: list[WeightFolder],
    manifest: Manifest | None,
    findings: Findings,
    workers: int | None,
    on_progress: Callable[[int, int], None] | None,
) -> Mapping[str, FileSums]:
    known = manifest if manifest is not None and manifest.has_checksums else None
    names = list(known.files) if known is not None else content.weight_files()
    with WorkerThreads(workers or default_workers()) as threads:
        sums = against.read_files(
            content,
            folders,
            names,
            threads,
            findings,
            count_non_finite=known is None,  # else the manifest has the counts, taken in memory
            progress=on_progress,
        )
    if known is not None:
        against.compare_sums(content, known, sums, findings)
        recorded = {n: t for f in known.files.values() for n, t in (f.tensors or {}).items()}
        non_finite = {name: tensor.non_finite for name, tensor in recorded.items() if tensor.non_finite}
    else:
        non_finite = {name: count for found in sums.values() for name, count in found.non_finite.items()}
    if non_finite:
        worst = sorted(non_finite, key=non_finite.__getitem__, reverse=True)
        shown = some([f'{name} ({non_finite[name]})' for name in worst])
        findings.problem('values', f'{counted(len(non_finite), "tensor")} with infinite or NaN values: {shown}')
    else:
        findings.ok('values', 'no infinite or NaN values')
    return sums


def _look_for_lost_shards(content: FolderContent, folders: list[WeightFolder], findings: Findings) -> None:
    """Report indexes in folders without any weights, which :func:`check_indexes` does not see."""
    known = {folder.name for folder in folders}
    for name in content.files:
        parent = name.rpartition('/')[0]
        if name.endswith('.safetensors.index.json') and parent not in known:
            findings.problem('index', f'{name}: all files that it names are missing')


def _check_models(
    content: FolderContent,
    folders: list[WeightFolder],
    sums: Mapping[str, FileSums],
    findings: Findings,
    model: bool,
    trust_remote_code: bool,
) -> None:
    for folder in folders:
        try:
            require_regular(folder.path)
        except OSError as error:
            findings.unchecked('config', f'{folder.where}: not opened: {error.filename}: {error.strerror}')
            continue
        if any(name.startswith('adapter_model') for name in folder.headers):
            check_adapter(folder, findings)
            continue
        if 'adapter_config.json' in folder.files:
            findings.problem(
                'config',
                f'{folder.where}: adapter_config.json beside model weights makes from_pretrained load an adapter; '
                f'remove it',
            )
        if not model:
            findings.unchecked('config', f'{folder.where}: config, ties and tokenizer were not checked (--no-model)')
        elif findings.has_problem('headers'):
            findings.unchecked('config', f'{folder.where}: not checked, since headers are damaged')
        else:
            check_model(folder, sums, findings, trust_remote_code=trust_remote_code)
