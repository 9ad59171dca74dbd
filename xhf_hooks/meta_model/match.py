"""Matches a meta model and a checkpoint: names, shapes, dtypes, ties, and tensors of the base model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from xhf_hooks.errors import BaseModelError
from xhf_hooks.exporters.base_files import base_folder
from xhf_hooks.format.dtypes import TORCH_DTYPES, is_float
from xhf_hooks.format.text import counted, some
from xhf_hooks.meta_model.build import MetaModel
from xhf_hooks.model import names_by_identity
from xhf_hooks.sources.stored_tensors import StoredTensor

#: Worded to fit with and without a given --base.
_REMEDY = '--base has to name the model that training started from'


def match_checkpoint(
    meta_model: MetaModel, tensors: Iterable[StoredTensor], trained_dtype: str | None
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Give the tensors the meta model's names, and the meta model the tensors' shapes and dtypes.

    Tensors missing in the checkpoint are read from the base model. The exporter reports those missing in both.

    Args:
        trained_dtype: The dtype that training cast the base model to; None if it did not.

    Returns:
        The tensors by name, and log messages.

    Raises:
        BaseModelError: The meta model is not the model that was trained.
    """
    stored = {name: tensor for tensor in tensors for name in (tensor.name, *tensor.aliases)}
    trained = names_by_identity(meta_model.module)
    lost = [id(tensor) for tensor, names in trained if not stored.keys() & set(names)]
    in_bases, lacking, folders = _from_bases(meta_model, lost, trained_dtype)
    matched: dict[str, StoredTensor] = {}
    known: set[str] = set()
    other_shape = []
    for tensor, names in trained:
        known.update(names)
        held = list({stored[name].name: stored[name] for name in names if name in stored}.values())
        found = held[0] if held else in_bases.get(id(tensor))
        if found is None:
            continue
        _require_equal(held, meta_model)
        if found.shape != tuple(tensor.shape):
            if not held and all('.original_module.' in name for name in names):
                tensor.data = tensor.data.to(TORCH_DTYPES[found.dtype])  # the first tensor's is the model's
                continue  # replaced by a trained copy, which may have more rows than the base
            other_shape.append(f'{names[0]} is {found.shape}, expected {tuple(tensor.shape)}')
            continue
        # In place, to keep ties by identity
        tensor.data = torch.empty(found.shape, dtype=TORCH_DTYPES[found.dtype], device='meta')
        matched[names[0]] = replace(found, name=names[0], aliases=tuple(names[1:]))
    notes = [*meta_model.notes]
    notes += _judge(meta_model, other_shape, [name for name in stored if name not in known])
    if lacking:
        raise BaseModelError(
            f'the model of {meta_model.described_by} has {counted(len(lacking), "tensor")} that the checkpoint '
            f'lacks ({some(lacking)}), and no safetensors to read them from; if this is the trained model, '
            f'{_REMEDY}, with its weights'
        )
    if in_bases:
        notes.append(f'{counted(len(in_bases), "tensor")} not in the checkpoint, read from {" and ".join(folders)}')
    return matched, notes


def _from_bases(
    meta_model: MetaModel, wanted: Collection[int], dtype: str | None
) -> tuple[dict[int, StoredTensor], list[str], list[str]]:
    """Tensors of the base models, by ``id`` of the meta model's; names of those whose base has no weights; folders."""
    found: dict[int, StoredTensor] = {}
    lacking, folders = list[str](), list[str]()
    for base in meta_model.bases:
        names_here = {one: base.names[one] for one in wanted if one in base.names}
        if not names_here or base_folder(base.folder) is None:
            continue
        if not base.weights:
            lacking += [names[0] for names in names_here.values()]
            continue
        folders.append(base.folder)
        for one, names in names_here.items():
            held = [base.weights[name] for name in names if name in base.weights]
            if held:
                found[one] = _as_trained(held[0], dtype)
    return found, lacking, folders


def _as_trained(tensor: StoredTensor, dtype: str | None) -> StoredTensor:
    """DeepSpeed casts the whole model."""
    return replace(tensor, dtype=dtype) if dtype is not None and is_float(tensor.dtype) else tensor


def _require_equal(held: Sequence[StoredTensor], meta_model: MetaModel) -> None:
    """Require that tied tensors are stored once or are equal (runs on GPUs store equal copies)."""
    for other in held[1:]:
        if not torch.equal(*(tensor.whole(False).view(torch.uint8) for tensor in (held[0], other))):
            raise BaseModelError(
                f'the model of {meta_model.described_by} ties {held[0].name} and {other.name}, but they differ in the '
                f'checkpoint; set tie_word_embeddings to false in the config.json that --base names'
            )


def _outermost(module: nn.Module, path: str = '') -> Iterator[str]:
    """Paths of the models. What lies around them has no other purpose than to give them their names."""
    if type(module) is not nn.Module:
        yield path
        return
    for name, child in module.named_children():
        yield from _outermost(child, f'{path}.{name}'.removeprefix('.'))


def _judge(meta_model: MetaModel, other_shape: list[str], unexpected: list[str]) -> list[str]:
    """Raise if the checkpoint belongs to another model, else return notes about tensors that are not exported."""
    if other_shape:
        raise BaseModelError(
            f'the checkpoint and the model of {meta_model.described_by} differ: {some(other_shape)}; {_REMEDY}'
        )
    unexpected = [name for name in unexpected if not name.endswith('rotary_emb.inv_freq')]  # transformers < 4.31
    inside = [*_outermost(meta_model.module)]
    lost = [name for name in unexpected if any(name.startswith(f'{path}.'.removeprefix('.')) for path in inside)]
    if lost:
        raise BaseModelError(
            f'the checkpoint has tensors that the model of {meta_model.described_by} lacks: {some(lost)}; {_REMEDY}'
        )
    if unexpected:
        return [f'{counted(len(unexpected), "tensor")} of the checkpoint not in the model: {some(unexpected)}']
    return []
