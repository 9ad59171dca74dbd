"""The models of ``xhf-verify A B``: folders of weights, and a checkpoint as xhf-convert would write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.convert import Conversion, ConvertOptions
from xhf_hooks.convert.weights import PART_NBYTES, Work
from xhf_hooks.errors import CheckpointError, DamagedError, XhfError
from xhf_hooks.format import strict_json
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.safetensors import HALF_DTYPES, read_header
from xhf_hooks.host_memory import MemoryMeter
from xhf_hooks.integrity.check import list_files
from xhf_hooks.integrity.manifest import read_manifest
from xhf_hooks.planning.types import Placement, TensorSpec
from xhf_hooks.sources.checkpoint import CheckpointSource, find_checkpoint
from xhf_hooks.sources.safetensors_folder import tensors_of
from xhf_hooks.sources.stored_source import StoredTensor
from xhf_hooks.writers.writer import cuts

_INPUT_EMBEDDINGS = ('embed_tokens.weight', 'wte.weight', 'tok_embeddings.weight', 'word_embeddings.weight')
_OUTPUT_EMBEDDINGS = ('lm_head.weight', 'output.weight')
#: Called in any thread with a tensor's name, the number of an element, and the elements from there on.
Use = Callable[[str, int, torch.Tensor], None]


class FolderModel:
    """A Hugging Face folder or a single file. Tensors of subfolders are named ``folder/tensor``.

    Attributes:
        tensors: Its tensors by name.
        ties: Maps each alias to the name of the same tensor in :attr:`tensors`.
        label: Path, number of tensors and dtypes, for the report.
        notes: Remarks for the report.

    Raises:
        DamagedError, CheckpointError: A file is damaged, or has a dtype that cannot be compared.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.notes = path, ()
        self._stored: dict[str, StoredTensor] = {}
        for prefix, file in _files(path):
            for tensor in tensors_of(read_header(file)):
                name = prefix + tensor.name
                if name in self._stored:
                    raise CheckpointError(f'{path}: {name} is stored twice; check it with xhf-verify {path}')
                self._stored[name] = replace(tensor, name=name)
        self.tensors = {name: tensor.spec for name, tensor in self._stored.items()}
        self.ties = self._ties()
        dtypes = ', '.join(sorted({tensor.dtype for tensor in self.tensors.values()})) or 'none'
        self.label = f'{path} ({len(self.tensors)} tensors, {dtypes})'

    def _ties(self) -> dict[str, str]:
        """Aliases of tied embeddings, if config.json ties them and only one is stored."""
        try:
            config = strict_json.read(self.path / 'config.json')
        except DamagedError:
            return {}
        inputs = [name for name in self.tensors if name.endswith(_INPUT_EMBEDDINGS)]
        outputs = [name for name in self.tensors if name.endswith(_OUTPUT_EMBEDDINGS)]
        if config.get('tie_word_embeddings') is not True or len(inputs) + len(outputs) != 1:
            return {}
        if inputs:
            return dict.fromkeys(_OUTPUT_EMBEDDINGS, inputs[0])
        return {f'model.{name}': outputs[0] for name in _INPUT_EMBEDDINGS}

    def jobs(self, use: Use) -> Iterator[Callable[[], None]]:
        """Jobs, to be run in any threads, that read every tensor once."""
        for name, spec in self.tensors.items():
            width = TORCH_DTYPES[spec.dtype].itemsize
            for start, end in cuts(spec.nbytes, 0, PART_NBYTES):
                yield partial(self._read_for, use, name, start // width, (end - start) // width)

    def _read_for(self, use: Use, name: str, first: int, count: int) -> None:
        use(name, first, self.read(name, first, count))

    def read(self, name: str, first: int, count: int) -> torch.Tensor:
        """Elements of a tensor, flat."""
        out = torch.empty(count, dtype=TORCH_DTYPES[self.tensors[name].dtype])
        self._stored[name].read_into(first, out)
        return out


def _files(path: Path) -> list[tuple[str, Path]]:
    """Weight files, with the prefix of their tensors' names."""
    if path.is_file():
        return [('', path)]
    names = [name for name in list_files(path) if name.endswith('.safetensors')]
    return [(name[: name.rfind('/') + 1], path / name) for name in sorted(names)]


class ConvertedModel:
    """The tensors that ``xhf-convert`` would write, made when they are compared; as :class:`FolderModel`."""

    def __init__(self, conversion: Conversion, label: str, notes: Sequence[str], ties: dict[str, str]) -> None:
        self.label, self.notes, self.ties = label, notes, ties
        self._conversion = conversion
        specs = [TensorSpec(_name(place), place.shape, place.dtype) for place in conversion.plan.placements]
        self.tensors = {spec.name: spec for spec in specs}

    def jobs(self, use: Use) -> Iterator[Callable[[], Any]]:
        """Jobs, to be run in any threads, that make every tensor once."""
        conversion = self._conversion

        def made(place: Placement, start: int, data: memoryview) -> None:
            if len(data):
                dtype = TORCH_DTYPES[place.dtype]
                use(_name(place), start // dtype.itemsize, torch.frombuffer(data, dtype=dtype))

        work = Work(
            conversion.source, conversion.plan, made, use_fp32_master=conversion.use_fp32_master, meter=MemoryMeter()
        )
        return work.jobs()


def _name(placement: Placement) -> str:
    folder = placement.file.rpartition('/')[0]
    return f'{folder}/{placement.hf_name}' if folder else placement.hf_name


def open_models(a: Path, b: Path, options: ConvertOptions) -> list[FolderModel | ConvertedModel]:
    """Open both, in the given order. At least one is a folder.

    Raises:
        CheckpointError: One of them cannot be read as a model, or both are checkpoints.
    """
    folders = [FolderModel(path) if _holds_weights(path) else None for path in (a, b)]
    found = next((folder for folder in folders if folder is not None), None)
    if found is None:
        raise CheckpointError(f'{a} and {b} are checkpoints; convert one of them with xhf-convert first')
    return [folder or _converted(path, found, options) for path, folder in zip((a, b), folders, strict=True)]


def _holds_weights(path: Path) -> bool:
    """Whether it holds weights. A work_dir, with a checkpoint and the models exported from it, does not count."""
    if path.is_file():
        return path.suffix == '.safetensors'
    if not path.is_dir():
        raise CheckpointError(f'{path}: no such file or folder')
    if any(path.glob('*.safetensors')):
        return True
    return (path / 'config.json').is_file() and any(name.endswith('.safetensors') for name in list_files(path))


def _converted(path: Path, folder: FolderModel, options: ConvertOptions) -> ConvertedModel:
    """The checkpoint as xhf-convert would write it into the folder, with its own config or else with the folder's."""
    floats = {tensor.dtype for tensor in folder.tensors.values() if tensor.dtype in ('F32', *HALF_DTYPES)}
    ema, lora = not _is_live(folder.path), options.lora
    source = CheckpointSource(find_checkpoint(path), ema=ema)
    if lora is None and any('.lora_A.' in name for spec in source.specs() for name in (spec.name, *spec.aliases)):
        adapters = sum('.lora_A.' in name for name in folder.tensors)
        lora = 'merge' if not adapters else 'adapter' if adapters * 2 >= len(folder.tensors) else 'both'
    as_written = replace(
        options,
        ema=ema,
        lora=lora,
        dtype='F32' if floats == {'F32'} else None,
        max_shard_nbytes=10**18,
    )
    notes: list[str] = []
    try:
        conversion = Conversion(path, as_written)
    except CheckpointError:
        raise
    except XhfError:
        if options.base is not None or not (folder.path / 'config.json').is_file():
            raise
        conversion = Conversion(path, replace(as_written, base=str(folder.path)))
        notes.append(
            f'{path} is read with the config.json of {folder.path}; tensors that it lacks are taken from there'
        )
    notes = [*conversion.warnings, *notes]
    if conversion.averages:
        notes.append(f'{path} holds averaged and live weights; the {"averaged" if ema else "live"} ones are compared')
    kind = 'fp32 master weights' if conversion.use_fp32_master else 'as trained'
    label = f'{path} ({len(conversion.plan.placements)} tensors as xhf-convert writes them, {kind})'
    return ConvertedModel(conversion, label, notes, folder.ties)


def _is_live(folder: Path) -> bool:
    """Whether its manifest says that it holds live rather than averaged weights."""
    try:
        manifest = read_manifest(folder) if folder.is_dir() else None
    except DamagedError:  # xhf-verify FOLDER reports it
        return False
    return manifest is not None and manifest.facts.get('weights') == 'live'
