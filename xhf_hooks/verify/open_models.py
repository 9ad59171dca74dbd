"""Opens the two paths of ``xhf-verify A B`` so that the same tensor has the same name in both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from xhf_hooks.convert import Conversion, ConvertOptions
from xhf_hooks.errors import CheckpointError, DamagedError, XhfError
from xhf_hooks.format.safetensors import HALF_DTYPES
from xhf_hooks.integrity.folder_scan import scan
from xhf_hooks.integrity.manifest import read_manifest
from xhf_hooks.sources.checkpoint import CheckpointSource, find_checkpoint
from xhf_hooks.verify.checkpoint_readers import ConvertedReader, NamedReader, common_prefixes
from xhf_hooks.verify.model_reader import ModelReader, SafetensorsReader


def open_models(a: Path, b: Path, options: ConvertOptions) -> tuple[ModelReader, ModelReader]:
    """Readers of both, in the given order.

    A checkpoint that is compared with a folder is read as ``xhf-convert`` would write it. Where that is impossible, and
    for two checkpoints, tensors are matched by their names in training.

    Raises:
        CheckpointError: One of them cannot be read as a model.
    """
    folders = [_folder_reader(place) for place in (a, b)]
    if all(folders):
        return folders[0], folders[1]
    if not any(folders):
        return _two_checkpoints(Path(a), Path(b))
    folder = folders[0] or folders[1]
    checkpoint = _as_converted(Path(b if folders[0] else a), folder, folder.path, options)
    return (folder, checkpoint) if folders[0] else (checkpoint, folder)


def _folder_reader(place: Path) -> SafetensorsReader | None:
    return SafetensorsReader(place) if _is_folder_of_weights(place) else None


def _is_folder_of_weights(path: Path) -> bool:
    """Whether it holds weights. A work_dir, with a checkpoint and the models exported from it, does not count."""
    if path.is_file():
        return path.suffix == '.safetensors'
    if not path.is_dir():
        raise CheckpointError(f'{path}: no such file or folder')
    if any(path.glob('*.safetensors')):
        return True
    return (path / 'config.json').is_file() and bool(scan(path).weight_files())


def _two_checkpoints(a: Path, b: Path) -> tuple[ModelReader, ModelReader]:
    sources = [CheckpointSource(find_checkpoint(path), optimizer_restarted=True) for path in (a, b)]
    names = [[name for spec in source.specs() for name in (spec.name, *spec.aliases)] for source in sources]
    prefixes = common_prefixes(names[0], names[1], strip_others=True)
    readers = [
        NamedReader(source, f'{source.found.path} ({len(source.specs())} tensors, as trained)', source.warnings, prefix)
        for source, prefix in zip(sources, prefixes, strict=True)
    ]
    return readers[0], readers[1]


def _as_converted(path: Path, folder: SafetensorsReader, folder_path: Path, options: ConvertOptions) -> ModelReader:
    """The checkpoint with the folder's names, interpreted with its own config or else with the folder's."""
    ema = not _is_live(folder_path)
    source = CheckpointSource(find_checkpoint(path), ema=ema, optimizer_restarted=True)
    names = [name for spec in source.specs() for name in (spec.name, *spec.aliases)]
    bases = [options.base]
    if options.base is None and (folder_path / 'config.json').is_file():
        bases.append(str(folder_path))
    reasons = []
    for base in bases:
        try:
            return _converted(path, base, names, folder, options, ema=ema)
        except CheckpointError:
            raise
        except XhfError as error:
            reasons.append(str(error))
    prefix, _ = common_prefixes(names, list(folder.tensors), strip_others=False)
    label = f'{source.found.path} ({len(source.specs())} tensors, as trained)'
    reader = NamedReader(source, label, [f'matched by name alone: {reasons[0]}', *source.warnings], prefix)
    if not (reader.tensors.keys() | reader.ties.keys()) & folder.tensors.keys():
        raise CheckpointError(f'{path}: shares no tensor names with {folder_path}, and: {reasons[0]}')
    return reader


def _is_live(folder: Path) -> bool:
    """Whether its manifest says that it holds live rather than averaged weights."""
    try:
        manifest = read_manifest(folder) if folder.is_dir() else None
    except DamagedError:  # xhf-verify FOLDER reports it
        return False
    return manifest is not None and manifest.facts.get('weights') == 'live'


def _converted(
    path: Path,
    base: str | None,
    names: list[str],
    folder: SafetensorsReader,
    options: ConvertOptions,
    *,
    ema: bool,
) -> ConvertedReader:
    floats = {tensor.dtype for tensor in folder.tensors.values() if tensor.dtype in ('F32', *HALF_DTYPES)}
    lora = options.lora
    if lora is None and any('.lora_A.' in name for name in names):
        adapters = [name for name in folder.tensors if '.lora_A.' in name]
        lora = 'merge' if not adapters else 'adapter' if len(adapters) * 2 >= len(folder.tensors) else 'both'
    as_written = replace(
        options,
        base=base,
        ema=ema,
        lora=lora,
        dtype='F32' if floats == {'F32'} else None,
        max_shard_nbytes=10**18,
        optimizer_restarted=True,  # values are compared, whatever the steps say
    )
    conversion = Conversion(path, as_written)
    notes = list(conversion.warnings)
    if conversion.averages:
        notes.append(f'{path} holds averaged and live weights; the {"averaged" if ema else "live"} ones are compared')
    if base is not None and base != options.base:
        notes.append(f'{path} is read with the config.json of {base}; tensors that it lacks are taken from there')
    kind = 'fp32 master weights' if conversion.use_fp32_master else 'as trained'
    label = f'{path} ({len(conversion.plan.placements)} tensors as xhf-convert writes them, {kind})'
    return ConvertedReader(conversion, label, notes, dict(folder.ties))
