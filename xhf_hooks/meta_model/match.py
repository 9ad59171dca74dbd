"""Matches a meta model and a checkpoint: names, shapes, dtypes, ties, and tensors of the base model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from xhf_hooks.errors import BaseModelError
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
    unexpected = dict.fromkeys(stored)
    matched: dict[str, StoredTensor] = {}
    n_lent: Counter[str] = Counter()  # by folder of the base
    lacking, other_shape = list[str](), list[str]()
    for tensor, names in names_by_identity(meta_model.module):
        held = list(dict.fromkeys(stored[name] for name in names if name in stored))
        for name in names:
            unexpected.pop(name, None)
        if held:
            found = held[0]
            _require_equal(held, meta_model)
        else:
            base = next((base for base in meta_model.bases if id(tensor) in base.names), None)
            if base is None or base.weights is None:
                continue
            lent = [base.weights[name] for name in base.names[id(tensor)] if name in base.weights]
            if not base.weights:
                lacking.append(base.names[id(tensor)][0])
            if not lent:
                continue
            n_lent[base.folder] += 1
            found = lent[0]
            if trained_dtype is not None and is_float(found.dtype):
                found = replace(found, dtype=trained_dtype)  # DeepSpeed casts the whole model
        if found.shape == tuple(tensor.shape):
            # In place, to keep ties by identity
            tensor.data = torch.empty(found.shape, dtype=TORCH_DTYPES[found.dtype], device='meta')
            matched[names[0]] = replace(found, name=names[0], aliases=tuple(names[1:]))
        elif not held and all('.original_module.' in name for name in names):
            # Replaced by a trained copy, which may have more rows. The dtype of the first tensor is the model's
            tensor.data = tensor.data.to(TORCH_DTYPES[found.dtype])
        else:
            other_shape.append(f'{names[0]} is {found.shape}, expected {tuple(tensor.shape)}')
    notes = [*meta_model.notes, *_judge(meta_model, other_shape, list(unexpected))]
    if lacking:
        raise BaseModelError(
            f'the model of {meta_model.described_by} has {counted(len(lacking), "tensor")} that the checkpoint '
            f'lacks ({some(lacking)}), and no safetensors to read them from; if this is the trained model, '
            f'{_REMEDY}, with its weights'
        )
    if n_lent:
        folders = ' and '.join(n_lent)
        notes.append(f'{counted(n_lent.total(), "tensor")} not in the checkpoint, read from {folders}')
    return matched, notes


def _require_equal(held: Sequence[StoredTensor], meta_model: MetaModel) -> None:
    """Require that tied tensors are stored once or are equal (runs on GPUs store equal copies)."""
    for other in held[1:]:
        if not torch.equal(*(tensor.whole(False).view(torch.uint8) for tensor in (held[0], other))):
            raise BaseModelError(
                f'the model of {meta_model.described_by} ties {held[0].name} and {other.name}, but they differ in the '
                f'checkpoint; set tie_word_embeddings to false in the config.json that --base names'
            )


def _judge(meta_model: MetaModel, other_shape: list[str], unexpected: list[str]) -> list[str]:
    """Raise if the checkpoint belongs to another model, else return notes about tensors that are not exported."""
    if other_shape:
        raise BaseModelError(
            f'the checkpoint and the model of {meta_model.described_by} differ: {some(other_shape)}; {_REMEDY}'
        )
    unexpected = [name for name in unexpected if not name.endswith('rotary_emb.inv_freq')]  # transformers < 4.31
    inside = tuple(f'{path}.'.removeprefix('.') for path in _outermost(meta_model.module))
    if lost := [name for name in unexpected if name.startswith(inside)]:
        raise BaseModelError(
            f'the checkpoint has tensors that the model of {meta_model.described_by} lacks: {some(lost)}; {_REMEDY}'
        )
    if unexpected:
        return [f'{counted(len(unexpected), "tensor")} of the checkpoint not in the model: {some(unexpected)}']
    return []


def _outermost(module: nn.Module, path: str = '') -> Iterator[str]:
    """Paths of the models. What lies around them has no other purpose than to give them their names."""
    if type(module) is not nn.Module:
        yield path
        return
    for name, child in module.named_children():
        yield from _outermost(child, f'{path}.{name}'.removeprefix('.'))
