"""The models of ``xhf-verify --compare A B``: folders of weights, and a checkpoint as xhf-convert would write it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch

from xhf_hooks.errors import CheckpointError, DamagedError, XhfError
from xhf_hooks.files.manifest import Manifest, read_undamaged_manifest
from xhf_hooks.format import strict_json
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.index import WEIGHTS_SUFFIX, weight_files
from xhf_hooks.format.loaded_files import CONFIG
from xhf_hooks.format.safetensors import HALF_DTYPES
from xhf_hooks.format.text import counted, some
from xhf_hooks.offline.checkpoint.source import CheckpointSource
from xhf_hooks.offline.convert.conversion import ConvertOptions
from xhf_hooks.offline.convert.plan_conversion import plan_conversion
from xhf_hooks.offline.model.transformers_model import first_architecture
from xhf_hooks.offline.verify.layout import loaded_texts, model_files, shown_lora
from xhf_hooks.offline.verify.load import tied_names_in
from xhf_hooks.planning.types import Placement, TensorSpec
from xhf_hooks.sources.copied import read_stored
from xhf_hooks.sources.stored_tensors import StoredTensor, tensors_of


@dataclass(frozen=True)
class Model:
    """A model to compare. Tensors of subfolders are named ``folder/tensor``.

    Attributes:
        label: Path, number of tensors and dtypes, for the report.
        read: Returns elements of a tensor, flat: called in any thread with its name, the first one, and their number.
        notes: Remarks for the report.
        is_made: Whether tensors are made when they are read, several at once, in this order.
        folder: The folder of its config, tokenizer and so on; None for a single file.
    """

    label: str
    tensors: Mapping[str, TensorSpec]
    read: Callable[[str, int, int], torch.Tensor]
    notes: list[str] = field(default_factory=list)
    is_made: bool = False
    folder: Path | None = None

    @property
    def texts(self) -> dict[str, Path]:
        """Files besides weights that loaders read; see :func:`.loaded_texts`."""
        return {} if self.folder is None else loaded_texts(self.folder)

    def tied_names(self) -> list[set[str]]:
        """Names of tensors that ``from_pretrained`` makes one, by the config; none if that is unknown."""
        return [] if self.folder is None else tied_names_in(self.folder)


def open_models(a: Path, b: Path, options: ConvertOptions, scratch: Path) -> list[Model]:
    """Open both, in the given order. At least one is a folder.

    Args:
        scratch: An empty folder for the files besides weights that a checkpoint would be converted to.

    Raises:
        DamagedError, CheckpointError: One of them cannot be read as a model, or both are checkpoints.
    """
    folders = {path: _open_folder(path, files) for path in (a, b) if (files := _weight_files(path))}
    if not folders:
        raise CheckpointError(f'{a} and {b} are checkpoints; convert one of them with xhf-convert first')
    folder, model = next(iter(folders.items()))
    return [folders.get(path) or _open_checkpoint(path, folder, model, options, scratch) for path in (a, b)]


def _weight_files(path: Path) -> list[Path]:
    """The files that ``from_pretrained`` would load; if none has such a name, all weight files of the folder itself.

    None of a checkpoint. Other models and checkpoints in folders below do not count.

    Raises:
        CheckpointError: There is no such file or folder.
        DamagedError: An index is malformed, or names a file that is missing.
    """
    if path.is_file():
        return [path] if path.suffix == WEIGHTS_SUFFIX else []
    if not path.is_dir():
        raise CheckpointError(f'{path}: no such file or folder')
    found = model_files(path, read_undamaged_manifest(path))
    if missing := [file for part in found for file in weight_files(path / part) if not file.is_file()]:
        raise DamagedError(f'{path}: the index names files that are missing: {some([file.name for file in missing])}')
    named = [path / name for names in found.values() for name in names]
    return named or sorted(path.glob(f'*{WEIGHTS_SUFFIX}'))


def _open_folder(path: Path, files: Sequence[Path]) -> Model:
    """A Hugging Face folder or a single file.

    Args:
        files: Its weights.
    """
    stored: dict[str, StoredTensor] = {}
    for file in files:
        folder = '' if file == path else file.parent.relative_to(path).as_posix()
        for tensor in tensors_of(file):
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
    notes = []
    if path.is_dir() and (tags := sorted(one.name for one in path.glob('global_step*') if one.is_dir())):
        notes.append(f"{path} also holds DeepSpeed's {some(tags)}; its Hugging Face files are compared")
    label = f'{path} ({counted(len(stored), "tensor")}, {dtypes})'
    return Model(label, tensors, read, notes, folder=path if path.is_dir() else None)


def _open_checkpoint(path: Path, folder: Path, model: Model, options: ConvertOptions, scratch: Path) -> Model:
    """The checkpoint as xhf-convert would write it into the folder, with the options that the folder shows."""
    floats = {tensor.dtype for tensor in model.tensors.values() if tensor.dtype in ('F32', *HALF_DTYPES)}
    manifest = read_undamaged_manifest(folder) if folder.is_dir() else None
    ema = manifest is None or manifest.manifest_fields.get('weights') != 'live'
    checkpoint = CheckpointSource.open(path, ema=ema)
    records = [] if manifest is None else manifest.files.values()
    has_copies = any(tensor.copied_from_base for record in records for tensor in record.tensors.values())
    carry_base = 'all' if has_copies else None
    options = replace(options, ema=ema, dtype='F32' if floats == {'F32'} else None, carry_base=carry_base)
    conversion = plan_conversion(checkpoint, options)
    if shown := conversion.options_shown_by(_shown_options(folder, manifest)):
        lora, layout = shown.get('lora', options.lora), shown.get('llava_format', options.llava_format)
        conversion = plan_conversion(checkpoint, replace(options, lora=lora, llava_format=layout))
    notes = [*conversion.warnings]
    if checkpoint.averages:
        notes.append(f'{path} holds averaged and live weights; the {"averaged" if ema else "live"} ones are compared')
    outputs = conversion.outputs
    groups = [*outputs.plan.in_place, *outputs.plan.gathered]
    copied = {_name_of(one.placement): one for one in outputs.plan.copied}
    placements = {_name_of(one): (number, one) for number, group in enumerate(groups) for one in group.placements}
    making = threading.Lock()

    @lru_cache(maxsize=2)  # while one is compared, threads begin with the next
    def made(number: int) -> dict[str, torch.Tensor]:
        return {placement.hf_name: made.reshape(-1) for placement, made in outputs.make(groups[number])}

    def read(name: str, first: int, count: int) -> torch.Tensor:
        if name in copied:
            dtype = TORCH_DTYPES[copied[name].placement.dtype]
            data = read_stored(copied[name], first * dtype.itemsize, count * dtype.itemsize)
            return torch.frombuffer(data, dtype=dtype)
        number, placement = placements[name]
        if not groups[number].is_contiguous:
            with making:
                return made(number)[placement.hf_name][first : first + count]
        out = torch.empty(count, dtype=TORCH_DTYPES[placement.dtype])
        outputs.read_into(groups[number], placement, first, out)
        return out

    planned = {name: placement for name, (_, placement) in placements.items()}
    planned |= {name: one.placement for name, one in copied.items()}
    tensors = {name: TensorSpec(name, placement.shape, placement.dtype) for name, placement in planned.items()}
    folder_of_assets = None
    try:
        conversion.write_assets(scratch)
        folder_of_assets = scratch
    except (XhfError, OSError) as error:
        notes.append(f'config and tokenizer are not compared: {error}')
    kind = 'fp32 master weights' if floats == {'F32'} else 'as trained'
    label = f'{path} ({counted(len(tensors), "tensor")} as xhf-convert writes them, {kind})'
    return Model(label, tensors, read, notes, is_made=True, folder=folder_of_assets)


def _name_of(placement: Placement) -> str:
    """A tensor's name in the whole folder."""
    inside = placement.file.rpartition('/')[0]
    return f'{inside}/{placement.hf_name}' if inside else placement.hf_name


def _shown_options(folder: Path, manifest: Manifest | None) -> dict[str, str]:
    """The options of xhf-convert that the layout of a folder shows; none of a single file."""
    if not folder.is_dir():
        return {}
    shown = {'lora': shown_lora(model_files(folder, manifest))}
    with suppress(DamagedError):  # no config.json
        architecture = first_architecture(strict_json.read(folder / CONFIG).get('architectures'))
        if architecture == 'LlavaForConditionalGeneration':
            shown['llava_format'] = 'huggingface'
            del shown['lora']  # adapters are always merged in it
    return shown
