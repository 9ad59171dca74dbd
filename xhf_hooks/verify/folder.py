"""Is a model folder whole and unchanged? All checks, in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from xhf_hooks.concurrency.thread_pool import WorkerThreads, default_workers
from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.files.regular_files import require_regular
from xhf_hooks.format.text import size_text, some
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
    """Check one folder of Hugging Face's layout; the manifest of this package makes more checks possible.

    Args:
        workers: Threads that read; None takes one for each core.
        read: Read every byte: checksums, and values that are not finite.
        model: Compare with the model and the tokenizer that transformers builds.
        trust_remote_code: Run the folder's own code for that.
        on_progress: Called with bytes done and bytes in all.

    Raises:
        CheckpointError: There is nothing to check.
    """
    started = time.perf_counter()
    if not path.is_dir():
        raise CheckpointError(f'{path}: no such folder; give a folder with *.safetensors in it')
    findings, content = Findings(), scan(path)
    manifest = _manifest(content, findings)
    inner = [name for name in content.files if name.endswith(f'/{MANIFEST_NAME}')]
    if inner and MANIFEST_NAME not in content.files:
        shown = some([str(path / name.removesuffix(f'/{MANIFEST_NAME}')) for name in inner])
        raise CheckpointError(f'{path}: holds {len(inner)} model folders; give one: {shown}')
    if not content.weight_files() and manifest is None and MANIFEST_NAME not in content.files:
        for name, kind in content.special.items():
            raise CheckpointError(f'{path / name}: {kind}, not a regular file; give a folder with *.safetensors in it')
        others = [name for name in content.files if name.endswith(('.bin', '.pt', '.pth', '.gguf', '.h5'))]
        raise CheckpointError(
            f'{path}: holds no *.safetensors'
            + (f' but {some(others)}, which is not checked; xhf-convert makes a model folder of it' if others else '')
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
        findings.unchecked('checksums', 'nothing was read')
    _check_models(content, folders, sums, findings, model, trust_remote_code)
    return FolderReport(
        path=path,
        findings=tuple(findings.found),
        n_files=len(content.files),
        n_tensors=sum(len(header.entries) for folder in folders for header in folder.headers.values()),
        nbytes=sum(max(0, nbytes) for nbytes in content.files.values()),
        read_nbytes=sum(content.files[n] - found.hole_nbytes for n, found in sums.items() if found.error is None),
        seconds=time.perf_counter() - started,
    )


def _manifest(content: FolderContent, findings: Findings) -> Manifest | None:
    try:
        manifest = read_manifest(content.path)
    except DamagedError as error:
        findings.problem('manifest', str(error))
        return None
    if manifest is None:
        findings.unchecked('checksums', f'there is no {MANIFEST_NAME} to compare with: was anything changed?')
    elif not manifest.has_checksums:
        findings.unchecked(
            'checksums', f'{MANIFEST_NAME} is of format {manifest.version}, which has none: was anything changed?'
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
            count_non_finite=known is None,  # else they were counted in memory, and the bytes are the same
            progress=on_progress,
        )
    if known is not None:
        against.compare_sums(content, known, sums, findings)
        recorded = {n: t for f in known.files.values() for n, t in (f.tensors or {}).items()}
        non_finite = {name: tensor.non_finite for name, tensor in recorded.items() if tensor.non_finite}
    else:
        for name, found in sums.items():
            if found.error is not None:
                findings.problem('checksums', f'{name}: cannot be read ({found.error})')
            elif found.hole_nbytes:  # nor does a checksum tell that they belong there
                size, total = size_text(found.hole_nbytes), size_text(content.files[name])
                findings.note('values', f'{name}: {size} of {total} are holes: never written, and read as zeros')
        non_finite = {name: count for found in sums.values() for name, count in found.non_finite.items()}
    if non_finite:
        worst = sorted(non_finite, key=non_finite.__getitem__, reverse=True)
        shown = some([f'{name} ({non_finite[name]})' for name in worst])
        findings.problem('values', f'{len(non_finite)} tensors have infinite or NaN values: {shown}')
    else:
        findings.ok('values', 'all are finite')
    return sums


def _look_for_lost_shards(content: FolderContent, folders: list[WeightFolder], findings: Findings) -> None:
    """An index without a single shard beside it is in a folder that has no weights at all."""
    known = {folder.name for folder in folders}
    for name in content.files:
        parent = name.rpartition('/')[0]
        if name.endswith('.safetensors.index.json') and parent not in known:
            findings.problem('index', f'{name}: none of its files is there')


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
            findings.unchecked('config', f'{folder.where}: left alone: {error.filename}: {error.strerror}')
            continue
        if any(name.startswith('adapter_model') for name in folder.headers):
            check_adapter(folder, findings)
            continue
        if 'adapter_config.json' in folder.files:
            findings.problem(
                'config',
                f'{folder.where}: adapter_config.json lies beside model weights: from_pretrained takes it '
                f'all for an adapter; remove it',
            )
        if not model:
            findings.unchecked('config', f'{folder.where}: config, ties and tokenizer were not looked at')
        elif findings.has_problem('headers'):
            findings.unchecked('config', f'{folder.where}: headers are damaged')
        else:
            check_model(folder, sums, findings, trust_remote_code=trust_remote_code)
