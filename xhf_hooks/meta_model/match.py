"""Matches a meta model and a checkpoint: names, shapes, dtypes, ties, and tensors of the base model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from xhf_hooks.errors import BaseModelError
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.text import counted, some
from xhf_hooks.meta_model.build import MetaModel
from xhf_hooks.model import module_tensors, names_by_identity
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.safetensors_folder import SafetensorsSource, holds_weights
from xhf_hooks.sources.stored_source import FileSource, JoinedSource, renamed

_COMPARED_NBYTES = 2**20  # per read
#: Worded to fit with and without a given --base.
_REMEDY = '--base has to name the model that training started from'


def match_checkpoint(
    meta_model: MetaModel, source: FileSource, trained_dtype: str | None
) -> tuple[JoinedSource, list[str]]:
    """Give the source the meta model's names, and the meta model the source's shapes and dtypes.

    Tensors missing in the checkpoint are read from the base model. The exporter reports those missing in both.

    Args:
        trained_dtype: The dtype that training cast the base model to; None if it did not.

    Returns:
        The source, and log messages.

    Raises:
        BaseModelError: The meta model is not the model that was trained.
    """
    spec_of = {name: spec for spec in source.specs() for name in (spec.name, *spec.aliases)}
    base = _BaseWeights(meta_model, trained_dtype)
    embeddings = _embeddings(meta_model.module)
    tensors: dict[TensorSpec, tuple[FileSource, str]] = {}
    known: set[str] = set()
    other_shape = []
    for tensor, names in names_by_identity(meta_model.module):
        known.update(names)
        held = list({spec_of[name].name: spec_of[name] for name in names if name in spec_of}.values())
        if held:
            spec, place = held[0], (source, held[0].name)
            _require_equal(held, source, meta_model)
        elif (found := base.find(tensor)) is not None:
            spec, place = found
        else:
            continue
        if spec.shape != tuple(tensor.shape) and not (id(tensor) in embeddings and _has_other_rows(spec, tensor)):
            other_shape.append(f'{names[0]} is {spec.shape}, expected {tuple(tensor.shape)}')
            continue
        _become(tensor, spec)
        tensors[renamed(spec, names)] = place
    notes = [*meta_model.notes]
    notes += _judge(meta_model, other_shape, [name for name in spec_of if name not in known])
    if base.lacking:
        raise BaseModelError(
            f'the model of {meta_model.described_by} has {counted(len(base.lacking), "tensor")} that the checkpoint '
            f'lacks ({some(base.lacking)}), and no safetensors to read them from; if this is the trained model, '
            f'{_REMEDY}, with its weights'
        )
    if base.n_found:
        notes.append(f'{counted(base.n_found, "tensor")} not in the checkpoint, read from {base.folders}')
    return JoinedSource(tensors), notes


class _BaseWeights:
    """The weights of base models, opened on demand.

    Attributes:
        n_found: Number of tensors found there.
        lacking: Tensors whose base folder has no weights.
    """

    def __init__(self, meta_model: MetaModel, dtype: str | None) -> None:
        self._bases = meta_model.bases
        self._dtype = dtype
        self._opened: dict[str, tuple[SafetensorsSource, dict[str, TensorSpec]]] = {}
        self.n_found = 0
        self.lacking: list[str] = []

    @property
    def folders(self) -> str:
        return ' and '.join(self._opened)

    def find(self, tensor: torch.Tensor) -> tuple[TensorSpec, tuple[FileSource, str]] | None:
        lacking = []
        for folder, names_of in self._bases:
            names = names_of.get(id(tensor), ())
            if names and Path(folder).is_dir():
                if not holds_weights(Path(folder)):
                    lacking.append(names[0])
                    continue
                opened, specs = self._open(folder)
                for name in names:
                    if name in specs:
                        self.n_found += 1
                        return specs[name], (opened, name)
        self.lacking += lacking
        return None

    def _open(self, folder: str) -> tuple[SafetensorsSource, dict[str, TensorSpec]]:
        if folder not in self._opened:
            opened = SafetensorsSource(Path(folder), self._dtype)
            self._opened[folder] = (opened, {spec.name: spec for spec in opened.specs()})
        return self._opened[folder]


def _embeddings(module: nn.Module) -> set[int]:
    """``id`` of each weight with a row per token: training may have added rows."""
    found = set()
    for child in module.modules():
        for get in ('get_input_embeddings', 'get_output_embeddings'):
            try:
                layer = getattr(child, get, lambda: None)()
            except (NotImplementedError, AttributeError):  # the model has no such embeddings
                continue
            for name in ('weight', 'bias'):
                tensor = getattr(layer, name, None)
                if isinstance(tensor, torch.Tensor):
                    found.add(id(tensor))
    return found


def _has_other_rows(spec: TensorSpec, tensor: torch.Tensor) -> bool:
    return len(spec.shape) == tensor.dim() and spec.shape[1:] == tuple(tensor.shape)[1:]


def _require_equal(held: Sequence[TensorSpec], source: FileSource, meta_model: MetaModel) -> None:
    """Require that tied tensors are stored once or are equal (runs on GPUs store equal copies)."""
    for other in held[1:]:
        if not _same_bytes(held[0], other, source):
            raise BaseModelError(
                f'the model of {meta_model.described_by} ties {held[0].name} and {other.name}, but they '
                f'differ in the checkpoint; set tie_word_embeddings to false in the config.json that --base names'
            )


def _same_bytes(one: TensorSpec, other: TensorSpec, source: FileSource) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    width = one.nbytes // max(1, torch.Size(one.shape).numel())
    buffers = bytearray(_COMPARED_NBYTES), bytearray(_COMPARED_NBYTES)
    for start in range(0, one.nbytes, _COMPARED_NBYTES):
        count = min(_COMPARED_NBYTES, one.nbytes - start)
        views = [memoryview(buffer)[:count] for buffer in buffers]
        for spec, view in zip((one, other), views, strict=True):
            source.read_into(spec.name, start // width, view, spec.dtype, use_fp32_master=False)
        if views[0] != views[1]:
            return False
    return True


def _become(tensor: torch.Tensor, spec: TensorSpec) -> None:
    """Change shape and dtype in place, to keep ties by identity."""
    dtype = TORCH_DTYPES[spec.dtype]
    if tensor.dtype != dtype or tuple(tensor.shape) != spec.shape:
        tensor.data = torch.empty(spec.shape, dtype=dtype, device='meta')


def _judge(meta_model: MetaModel, other_shape: list[str], unexpected: list[str]) -> list[str]:
    """Raise if the checkpoint belongs to another model, else return notes about tensors that are not exported."""
    if other_shape:
        raise BaseModelError(
            f'the checkpoint and the model of {meta_model.described_by} differ: {some(other_shape)}; {_REMEDY}'
        )
    unexpected = [name for name in unexpected if not name.endswith('rotary_emb.inv_freq')]  # transformers < 4.31
    inside = {path.partition('.')[0] for path, _ in module_tensors(meta_model.module)}
    lost = [name for name in unexpected if name.partition('.')[0] in inside]
    if lost:
        raise BaseModelError(
            f'the checkpoint has tensors that the model of {meta_model.described_by} lacks: {some(lost)}; {_REMEDY}'
        )
    if unexpected:
        return [f'{counted(len(unexpected), "tensor")} of the checkpoint not in the model: {some(unexpected)}']
    return []
