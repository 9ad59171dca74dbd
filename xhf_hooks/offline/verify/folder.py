"""Checks one model folder: complete, consistent and, with a manifest, unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.files.check import NOTE, OK, PROBLEM, UNCHECKED, FolderCheck, list_files
from xhf_hooks.files.manifest import read_manifest
from xhf_hooks.format import strict_json
from xhf_hooks.format.index import ADAPTER_WEIGHTS_NAME, HF_WEIGHTS, INDEX_SUFFIX, MANIFEST_NAME, WEIGHTS_SUFFIX
from xhf_hooks.format.loaded_files import ADAPTER_CONFIG, CONFIG, is_loaded_text
from xhf_hooks.format.text import counted, engine_text, some
from xhf_hooks.offline.verify.layout import model_files

#: Of OpenSSF model signing.
SIGNATURE_NAME = 'model.sig'
#: The remedy where a checkpoint is given.
_TO_COMPARE = 'to compare a checkpoint with a folder, use xhf-verify --compare'


def verify_folder(
    path: Path,
    *,
    workers: int | None = None,
    read: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> FolderCheck:
    """Check a Hugging Face folder. With the manifest of this package, checksums are compared, too.

    Args:
        workers: Number of threads that read; None: see :func:`.default_workers`.
        read: Read every byte, for checksums and for infinite and NaN values.
        on_progress: Called with bytes done and total bytes.

    Raises:
        CheckpointError: The folder does not hold a model.
    """
    if path.is_file():
        raise CheckpointError(f'{path}: a file; give a folder with *.safetensors files; {_TO_COMPARE}')
    if not path.is_dir():
        raise CheckpointError(f'{path}: no such folder; give one with *.safetensors files')
    damage = None
    try:
        manifest = read_manifest(path)
    except DamagedError as error:
        manifest, damage = None, str(error)
    check = FolderCheck(path, manifest, list_files(path))
    _require_model(path, list(check.files))
    if damage is not None:
        check.add(PROBLEM, 'manifest', damage)
    elif manifest is None:
        check.add(UNCHECKED, 'checksums', f'no {MANIFEST_NAME}: changes since the save cannot be detected')
    check.check_structure()
    _check_weights(check)
    _check_texts(check)
    _check_configs(check)
    check.add(NOTE, 'model', _describe(check))
    if read:
        check.read(workers, on_progress=on_progress)
    else:
        check.add(UNCHECKED, 'checksums', 'nothing was read (--no-read)')
    if SIGNATURE_NAME in check.files:
        check.add(
            NOTE, 'signature', f'{SIGNATURE_NAME}: whether it matches, and who signed, `model_signing verify` tells'
        )
    return check


def _describe(check: FolderCheck) -> str:
    """The content of the folder, in a line."""
    name = 'an adapter' if ADAPTER_CONFIG in check.files else 'a model'
    with suppress(DamagedError):
        architectures = strict_json.read(check.path / CONFIG).get('architectures')
        if isinstance(architectures, list) and architectures:
            name = str(architectures[0])
    dtypes = Counter(entry.dtype for header in check.headers.values() for entry in header.entries)
    details = [f'{n} {dtype}' for dtype, n in dtypes.items()]
    if check.manifest is not None:
        step, manifest_fields = check.manifest.step, check.manifest.manifest_fields
        details += [
            f'{step.unit} {step.number}',
            f'{manifest_fields.get("weights", "live")} weights',
            engine_text(manifest_fields),
        ]
    return ', '.join([name, *details])


def _require_model(path: Path, files: list[str]) -> None:
    """Refuse a folder without weights, and one that holds several models, such as a work_dir."""
    inner = [name.removesuffix(f'/{MANIFEST_NAME}') for name in files if name.endswith(f'/{MANIFEST_NAME}')]
    if inner and MANIFEST_NAME not in files:
        shown = some([str(path / name) for name in inner])
        raise CheckpointError(f'{path}: holds {len(inner)} model folders; give one of them: {shown}')
    if MANIFEST_NAME in files or any(name.endswith((WEIGHTS_SUFFIX, INDEX_SUFFIX)) for name in files):
        return
    if old := [name for name in files if HF_WEIGHTS.fullmatch(name)]:
        raise CheckpointError(
            f'{path}: holds {some(old)}, and only *.safetensors files can be checked; load the model with '
            f'from_pretrained of its class, and save it with save_pretrained, which writes them'
        )
    raise CheckpointError(
        f'{path}: holds no *.safetensors files; {_TO_COMPARE}, and to see what it holds, xhf-convert --dry-run'
    )


def _check_weights(check: FolderCheck) -> None:
    """Check that there are weights: save_pretrained leaves tensors of shape [0] where ZeRO-3 has partitioned them."""
    for name, header in check.headers.items():
        empty = [entry.name for entry in header.entries if entry.shape == (0,)]
        if empty:
            check.add(PROBLEM, 'weights', f'{name}: {counted(len(empty), "tensor")} of shape [0]: {some(empty)}')
        elif not header.entries:
            check.add(PROBLEM, 'weights', f'{name} holds no tensors')


def _check_texts(check: FolderCheck) -> None:
    """Check that every JSON file that loaders read parses, and that configs are objects. Indexes are checked before."""
    for name in check.files:
        if name.endswith('.json') and is_loaded_text(name):
            try:
                strict_json.read(check.path / name)
            except DamagedError as error:
                is_config = name.rpartition('/')[2].endswith(CONFIG)  # one JSON object
                # Some tokenizers have lists in their vocabulary files
                if is_config or 'expected a JSON object' not in str(error):
                    check.add(PROBLEM, 'texts', str(error))
    if not check.problems('texts'):
        check.add(OK, 'texts', 'all JSON files are well formed')


def _check_configs(check: FolderCheck) -> None:
    """Check that weights that ``from_pretrained`` would load have the config that it reads first."""
    try:
        found = model_files(check.path, check.manifest)
    except DamagedError:  # the index is a problem already
        return
    for part, files in found.items():
        place = f'{part}/' if part else ''
        for config, weights in ((ADAPTER_CONFIG, ADAPTER_WEIGHTS_NAME), (CONFIG, '')):
            needing = [file for file in files if file.endswith(ADAPTER_WEIGHTS_NAME) == bool(weights)]
            if needing and f'{place}{config}' not in check.files:
                check.add(PROBLEM, 'texts', f'{place}{config} is missing, without which {needing[0]} cannot be loaded')
    if not found and not check.problems():
        check.add(UNCHECKED, 'load', 'no file has a name from which from_pretrained of transformers or peft loads')
