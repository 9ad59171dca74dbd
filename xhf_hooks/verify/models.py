"""The models of ``xhf-verify A B``: folders of weights, and a checkpoint as xhf-convert would write it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from xhf_hooks.convert import Conversion, ConvertOptions
from xhf_hooks.errors import CheckpointError, DamagedError, XhfError
from xhf_hooks.format import strict_json
from xhf_hooks.format.dtypes import host_bytes
from xhf_hooks.format.safetensors import DTYPE_NBYTES, HALF_DTYPES, Header, read_header
from xhf_hooks.host_memory import MemoryMeter
from xhf_hooks.integrity.check import FolderCheck, list_files
from xhf_hooks.integrity.checksums import read_into
from xhf_hooks.integrity.manifest import read_manifest
from xhf_hooks.planning.types import Group, Placement, TensorSpec
from xhf_hooks.sources.checkpoint import CheckpointSource, find_checkpoint
from xhf_hooks.sources.gather import group_chunks

_INPUT_EMBEDDINGS = ('embed_tokens.weight', 'wte.weight', 'tok_embeddings.weight', 'word_embeddings.weight')
_OUTPUT_EMBEDDINGS = ('lm_head.weight', 'output.weight')


class Model(Protocol):
    """A model on disk.

    Attributes:
        tensors: Its tensors by name.
        ties: Maps each alias to the name of the same tensor in :attr:`tensors`.
        label: Path, number of tensors and dtypes, for the report.
        notes: Remarks for the report.
    """

    tensors: dict[str, TensorSpec]
    ties: dict[str, str]
    label: str
    notes: list[str]

    def read(self, name: str, start: int, out: memoryview) -> None:
        """Fill ``out`` with the tensor's row-major bytes from ``start`` on. Thread-safe unless it is computed.

        Raises:
            OSError, XhfError: They cannot be read.
        """

    def is_computed(self, name: str) -> bool:
        """Whether the tensor is made from several stored ones. These are read in the order of ``tensors``."""

    def close(self) -> None:
        """Close the files."""


class FolderModel(Model):
    """A Hugging Face folder or a single file. Tensors of subfolders are named ``folder/tensor``.

    Raises:
        CheckpointError: A file is damaged, or has a dtype that cannot be compared.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.tensors, self.notes = path, {}, []
        self._fds: dict[Path, int] = {}
        self._places: dict[str, tuple[int, int]] = {}
        for prefix, header in _headers(path):
            fd = self._fds[header.path] = os.open(header.path, os.O_RDONLY | os.O_CLOEXEC)
            for entry in header.entries:
                if entry.dtype not in DTYPE_NBYTES:
                    raise CheckpointError(f'{header.path}: {entry.name}: {entry.dtype} cannot be compared')
                name = prefix + entry.name
                if name in self.tensors:
                    raise CheckpointError(f'{path}: {name} is stored twice; check it with xhf-verify {path}')
                self.tensors[name] = TensorSpec(name, entry.shape, entry.dtype)
                self._places[name] = (fd, entry.start)
        self.ties = _ties(path, self.tensors)
        dtypes = ', '.join(sorted({tensor.dtype for tensor in self.tensors.values()})) or 'none'
        self.label = f'{path} ({len(self.tensors)} tensors, {dtypes})'

    def read(self, name: str, start: int, out: memoryview) -> None:
        fd, offset = self._places[name]
        read_into(fd, out, offset + start)

    def is_computed(self, name: str) -> bool:
        return False

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])


def _headers(path: Path) -> list[tuple[str, Header]]:
    """The headers that loaders read, with the prefix of their tensors' names."""
    if path.is_file():
        try:
            return [('', read_header(path))]
        except DamagedError as error:
            raise CheckpointError(str(error)) from None
    check = FolderCheck(path, None)
    check.check_structure()
    for problem in check.report.problems('headers'):
        raise CheckpointError(problem)
    singles = ('model.safetensors', 'adapter_model.safetensors')
    found = []
    for name, header in check.headers.items():
        folder, slash, file = name.rpartition('/')
        single = next((one for one in singles if f'{folder}{slash}{one}' in check.headers), file)
        if file == single:  # beside the single file, loaders do not read shards
            found.append((folder + slash, header))
    return found


def _ties(path: Path, tensors: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Aliases of tied embeddings, if config.json ties them and only one is stored."""
    try:
        config = strict_json.read(path / 'config.json')
    except DamagedError:
        return {}
    inputs = [name for name in tensors if name.endswith(_INPUT_EMBEDDINGS)]
    outputs = [name for name in tensors if name.endswith(_OUTPUT_EMBEDDINGS)]
    if config.get('tie_word_embeddings') is not True or len(inputs) + len(outputs) != 1:
        return {}
    if inputs:
        return dict.fromkeys(_OUTPUT_EMBEDDINGS, inputs[0])
    return {f'model.{name}': outputs[0] for name in _INPUT_EMBEDDINGS}


class ConvertedModel(Model):
    """The tensors that ``xhf-convert`` would write, made when they are read.

    Args:
        ties: Maps each tied name that is not written to the one that is.
    """

    def __init__(self, conversion: Conversion, label: str, notes: Sequence[str], ties: dict[str, str]) -> None:
        self.label, self.notes, self.ties = label, list(notes), ties
        self._source, self._use_fp32_master = conversion.source, conversion.use_fp32_master
        self._made: tuple[Group | None, dict[str, memoryview]] = (None, {})
        groups = (*conversion.plan.sliced, *conversion.plan.gathered)
        self._places = {_name(placement): (group, placement) for group in groups for placement in group.placements}
        self.tensors = {name: TensorSpec(name, p.shape, p.dtype) for name, (_, p) in self._places.items()}

    def read(self, name: str, start: int, out: memoryview) -> None:
        group, placement = self._places[name]
        if self.is_computed(name):
            if self._made[0] is not group:
                self._made = (None, {})  # frees the group before
                self._made = (group, self._make(group))
            out[:] = self._made[1][name][start : start + len(out)]
            return
        first = placement.source_offset + start // DTYPE_NBYTES[placement.dtype]
        read = group.reads[0].name
        self._source.read_into(read, first, out, placement.dtype, use_fp32_master=self._use_fp32_master)

    def is_computed(self, name: str) -> bool:
        return not self._places[name][0].is_contiguous

    def _make(self, group: Group) -> dict[str, memoryview]:
        reads = [spec.name for spec in group.reads]
        with (
            self._source.gathered(reads, wanted=reads, use_fp32_master=self._use_fp32_master) as tensors,
            torch.no_grad(),
        ):
            chunks = group_chunks(group, tensors, 0, host_bytes, MemoryMeter())
            return {_name(chunk.placement): chunk.data for chunk in chunks}

    def close(self) -> None:
        """Nothing: the files of a source close when it is garbage collected."""


def _name(placement: Placement) -> str:
    folder = placement.file.rpartition('/')[0]
    return f'{folder}/{placement.hf_name}' if folder else placement.hf_name


def open_models(a: Path, b: Path, options: ConvertOptions) -> tuple[Model, Model]:
    """Open both, in the given order.

    Raises:
        CheckpointError: One of them cannot be read as a model, or both are checkpoints.
    """
    folders = [FolderModel(path) if _holds_weights(path) else None for path in (a, b)]
    if not any(folders):
        raise CheckpointError(f'{a} and {b} are checkpoints; convert one of them with xhf-convert first')
    if folders[0] is None:
        return _converted(a, folders[1], options), folders[1]
    return folders[0], folders[1] or _converted(b, folders[0], options)


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
    source = CheckpointSource(find_checkpoint(path), ema=ema, optimizer_restarted=True)
    if lora is None and any('.lora_A.' in name for spec in source.specs() for name in (spec.name, *spec.aliases)):
        adapters = sum('.lora_A.' in name for name in folder.tensors)
        lora = 'merge' if not adapters else 'adapter' if adapters * 2 >= len(folder.tensors) else 'both'
    as_written = replace(
        options,
        ema=ema,
        lora=lora,
        dtype='F32' if floats == {'F32'} else None,
        max_shard_nbytes=10**18,
        optimizer_restarted=True,  # values are compared, whatever the steps say
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
    return ConvertedModel(conversion, label, notes, dict(folder.ties))


def _is_live(folder: Path) -> bool:
    """Whether its manifest says that it holds live rather than averaged weights."""
    try:
        manifest = read_manifest(folder) if folder.is_dir() else None
    except DamagedError:  # xhf-verify FOLDER reports it
        return False
    return manifest is not None and manifest.facts.get('weights') == 'live'
