"""The models of ``xhf-verify A B``: folders of weights, and a checkpoint as xhf-convert would write it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch

from xhf_hooks.convert import Conversion, ConvertOptions
from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.safetensors import HALF_DTYPES
from xhf_hooks.integrity.check import list_files
from xhf_hooks.integrity.manifest import read_manifest
from xhf_hooks.planning.types import Placement, TensorSpec
from xhf_hooks.sources.checkpoint import CheckpointSource
from xhf_hooks.sources.stored_tensors import StoredTensor, tensors_of


@dataclass(frozen=True)
class Model:
    """A model to compare. Tensors of subfolders are named ``folder/tensor``.

    Attributes:
        label: Path, number of tensors and dtypes, for the report.
        read: Returns elements of a tensor, flat: called in any thread with its name, the first one, and their number.
        notes: Remarks for the report.
        is_made: Whether tensors are made when they are read, several at once, in this order.
    """

    label: str
    tensors: Mapping[str, TensorSpec]
    read: Callable[[str, int, int], torch.Tensor]
    notes: list[str] = field(default_factory=list)
    is_made: bool = False


def open_models(a: Path, b: Path, options: ConvertOptions) -> list[Model]:
    """Open both, in the given order. At least one is a folder.

    Raises:
        DamagedError, CheckpointError: One of them cannot be read as a model, or both are checkpoints.
    """
    folders = {path: _open_folder(path) for path in (a, b) if _holds_weights(path)}
    if not folders:
        raise CheckpointError(f'{a} and {b} are checkpoints; convert one of them with xhf-convert first')
    folder, model = next(iter(folders.items()))
    return [folders.get(path) or _open_checkpoint(path, folder, model, options) for path in (a, b)]


def _holds_weights(path: Path) -> bool:
    """Whether it holds weights. A work_dir, with a checkpoint and the models exported from it, does not count."""
    if path.is_file():
        return path.suffix == '.safetensors'
    if not path.is_dir():
        raise CheckpointError(f'{path}: no such file or folder')
    if any(path.glob('*.safetensors')):
        return True
    return (path / 'config.json').is_file() and any(name.endswith('.safetensors') for name in list_files(path))


def _open_folder(path: Path) -> Model:
    """A Hugging Face folder or a single file."""
    files = [path] if path.is_file() else [path / name for name in sorted(list_files(path))]
    stored: dict[str, StoredTensor] = {}
    for file in files:
        folder = '' if file == path else file.parent.relative_to(path).as_posix()
        for tensor in tensors_of(file) if file.suffix == '.safetensors' else ():
            name = tensor.name if folder in ('', '.') else f'{folder}/{tensor.name}'
            if name in stored:
                raise CheckpointError(f'{path}: {name} is stored twice; check it with xhf-verify {path}')
            stored[name] = tensor

    def read(name: str, first: int, count: int) -> torch.Tensor:
        out = torch.empty(count, dtype=TORCH_DTYPES[stored[name].dtype])
        stored[name].read_into(first, out)
        return out

    dtypes = ', '.join(sorted({tensor.dtype for tensor in stored.values()})) or 'none'
    tensors = {name: tensor.spec for name, tensor in stored.items()}
    return Model(f'{path} ({len(stored)} tensors, {dtypes})', tensors, read)


def _open_checkpoint(path: Path, folder: Path, model: Model, options: ConvertOptions) -> Model:
    """The checkpoint as xhf-convert would write it into the folder."""
    floats = {tensor.dtype for tensor in model.tensors.values() if tensor.dtype in ('F32', *HALF_DTYPES)}
    ema = not _is_live(folder)
    checkpoint = CheckpointSource(path, ema=ema)
    conversion = Conversion(checkpoint, replace(options, ema=ema, dtype='F32' if floats == {'F32'} else None))
    notes = [*conversion.warnings]
    if checkpoint.averages:
        notes.append(f'{path} holds averaged and live weights; the {"averaged" if ema else "live"} ones are compared')
    outputs = conversion.outputs
    groups = [*outputs.plan.sliced, *outputs.plan.gathered]
    placements: dict[str, tuple[int, Placement]] = {}
    for number, group in enumerate(groups):
        for placement in group.placements:
            inside = placement.file.rpartition('/')[0]
            placements[f'{inside}/{placement.hf_name}' if inside else placement.hf_name] = number, placement
    making = threading.Lock()

    @lru_cache(maxsize=2)  # while one is compared, threads begin with the next
    def made(number: int) -> dict[str, torch.Tensor]:
        return {placement.hf_name: made.reshape(-1) for placement, made in outputs.make(groups[number])}

    def read(name: str, first: int, count: int) -> torch.Tensor:
        number, placement = placements[name]
        if not groups[number].is_contiguous:
            with making:
                return made(number)[placement.hf_name][first : first + count]
        out = torch.empty(count, dtype=TORCH_DTYPES[placement.dtype])
        outputs.read_into(groups[number], placement, first, out)
        return out

    tensors = {name: TensorSpec(name, placement.shape, placement.dtype) for name, (_, placement) in placements.items()}
    kind = 'fp32 master weights' if floats == {'F32'} else 'as trained'
    label = f'{path} ({len(tensors)} tensors as xhf-convert writes them, {kind})'
    return Model(label, tensors, read, notes, is_made=True)


def _is_live(folder: Path) -> bool:
    """Whether its manifest says that it holds live rather than averaged weights."""
    try:
        manifest = read_manifest(folder) if folder.is_dir() else None
    except DamagedError:  # xhf-verify FOLDER reports it
        return False
    return manifest is not None and manifest.facts.get('weights') == 'live'
