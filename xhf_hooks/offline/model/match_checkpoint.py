"""Matches a meta model and a checkpoint: names, shapes, dtypes, ties, and tensors of the base model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from xhf_hooks.compat.transformers import BUFFER_OF_OLD
from xhf_hooks.errors import BaseModelError
from xhf_hooks.exporters.find_model import adapters_in
from xhf_hooks.format.dtypes import TORCH_DTYPES, dtype_code, is_float
from xhf_hooks.format.text import counted, some
from xhf_hooks.model import names_by_identity
from xhf_hooks.offline.model.meta_model import Base, MetaModel
from xhf_hooks.offline.model.older_names import place_of, rename_older
from xhf_hooks.offline.model.other_modules import add_modules_inside, models_in
from xhf_hooks.offline.model.starting_weights import StartingWeights
from xhf_hooks.offline.model.stored_names import is_of_adapter
from xhf_hooks.offline.model.transformers_model import other_version_remedy
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.stored_tensors import StoredTensor, is_same_value

#: Worded to fit with and without a given --base.
_REMEDY = '--base has to name the model that training started from'

#: Ends of the names of tensors that AWQ and GPTQ make of weights.
_OF_QUANTIZED = ('.qweight', '.qzeros', '.scales', '.g_idx')


@dataclass
class Match:
    """The trained model's tensors, by name in the meta model.

    Attributes:
        tensors: The tensors that can be read.
        lent: The base, or the file, that lends a tensor, by the names of frozen ones that the checkpoint lacks.
        lacking: Names of tensors that neither the checkpoint nor a base has.
        refused: Why a base does not lend them, by the names of those that are frozen.
        notes: Messages for the log.
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    lent: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, TensorSpec] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def specs(self) -> list[TensorSpec]:
        """All tensors of the trained model, as a live one would have them: what is lacking may not be needed."""
        return [*(tensor.spec for tensor in self.tensors.values()), *self.lacking.values()]

    def notes_on_lent(self, read: Collection[str]) -> list[str]:
        """A note on the tensors that a base lends to what is written.

        Args:
            read: Names of what the outputs are made of.
        """
        folders = [folder for name, folder in self.lent.items() if name in read]
        if not folders:
            return []
        named = ' and '.join(dict.fromkeys(folders))
        return [f'{counted(len(folders), "tensor")} not in the checkpoint, read from {named}']


def match_checkpoint(
    meta_model: MetaModel,
    stored: Mapping[str, StoredTensor],
    trained_dtype: str | None,
) -> Match:
    """Give the tensors the meta model's names, and the meta model the tensors' shapes and dtypes.

    Tensors missing in the checkpoint are read from the base model, if they are known to be frozen.

    Args:
        stored: The tensors of the checkpoint, by each of their names.
        trained_dtype: The dtype that training cast the base model to; None if it did not.

    Raises:
        BaseModelError: The meta model is not the model that was trained.
    """
    match, stored = Match(notes=[*meta_model.notes]), dict(stored)
    unexpected = dict.fromkeys(stored)
    for one in meta_model.bases:
        renamed, used = rename_older(meta_model.module, one.model, one.names, stored)
        stored |= renamed
        for name in used:
            del unexpected[name]
    unexpected = {name: None for name in unexpected if not name.endswith(BUFFER_OF_OLD)}
    for one in meta_model.bases:
        prefix, part = place_of(one.model, meta_model.module)
        # Names below those that peft gives are the run's; others may show that the base is another model
        if not part and adapters_in(meta_model.module):
            match.notes += add_modules_inside(one.model, prefix, [*unexpected], stored, meta_model.trained)
    other_shape, is_slice = list[str](), list[bool]()
    for tensor, names in names_by_identity(meta_model.module):
        matching = list(dict.fromkeys(stored[name] for name in names if name in stored))
        for name in names:
            unexpected.pop(name, None)
        if meta_model.trained is not None and not meta_model.trained.isdisjoint(names):
            tensor.requires_grad_()  # also outside of an adapter
        base = meta_model.base_of(tensor)
        is_lent = not matching and base is not None and (meta_model.trained is not None or base.is_frozen(tensor))
        found = matching[0] if matching else None
        if is_lent and base is not None:
            found = _lent_by(base, tensor, names, meta_model.over_base, trained_dtype)
        _require_equal(matching, meta_model)
        if found is not None and found.shape == tuple(tensor.shape):
            # In place, to keep ties by identity. Some classes make tensors on the CPU, which cannot move there
            tensor.data = torch.empty(found.shape, dtype=TORCH_DTYPES[found.dtype], device=tensor.device)
            match.tensors[names[0]] = replace(found, name=names[0], aliases=tuple(names[1:]))
            if is_lent and base is not None:
                match.lent[names[0]] = meta_model.over_base.files.get(names[0], base.folder)
            continue
        if matching and found is not None:
            shape, expected = found.shape, tuple(tensor.shape)
            other_shape.append(f'{names[0]} is {shape}, expected {expected}')
            is_slice.append(is_of_adapter(names[0]) and shape[1:] == expected[1:] and shape[0] < expected[0])
        elif is_lent and base is not None:
            match.refused[names[0]] = base.why_not_lent(found, tuple(tensor.shape))
        is_copied = all('.original_module.' in name for name in names)  # what is written has the trained copy
        if found is not None and is_copied:
            # Replaced by a trained copy, which may have more rows. The dtype of the first tensor is the model's
            tensor.data = tensor.data.to(TORCH_DTYPES[found.dtype])
        if not is_copied and (base is None or not base.may_lack(tensor)):
            spec = TensorSpec(names[0], tuple(tensor.shape), dtype_code(tensor.dtype), tuple(names[1:]))
            match.lacking[names[0]] = spec
    if other_shape and all(is_slice):
        raise BaseModelError(
            f"the checkpoint has one rank's rows of the adapter, without those of other ranks: {some(other_shape)}. "
            f'FSDP saves whole adapters with fsdp_state_dict_type SHARDED_STATE_DICT, or HFCheckpointCallback does'
        )
    match.notes += _judge(meta_model, other_shape, list(unexpected))
    return match


def _lent_by(
    base: Base, tensor: torch.Tensor, names: Sequence[str], over_base: StartingWeights, trained_dtype: str | None
) -> StoredTensor | None:
    """The tensor that training started from, in the dtype that training gave it; None if it is nowhere."""
    found = over_base.lend(names, base.tensor(tensor), tuple(tensor.shape))
    if found is not None and trained_dtype is not None and is_float(found.dtype):
        return replace(found, dtype=trained_dtype)  # DeepSpeed casts the whole model
    return found


def require_all(match: Match, read: Collection[str], meta_model: MetaModel, not_tensors: Mapping[str, str]) -> None:
    """Require that what is to be written can be read.

    Args:
        read: Names of what the outputs are made of.
        not_tensors: Kinds of the checkpoint's entries that are no tensors, by name.

    Raises:
        BaseModelError: It cannot.
    """
    lacking = [name for name in match.lacking if name in read]
    if not lacking:
        return
    lack = f'the model of {meta_model.described_by} has {counted(len(lacking), "tensor")} that the checkpoint lacks'
    lack = f'{lack} ({some(lacking)})'
    if other := [f'{name} is a {not_tensors[name]}' for name in lacking if name in not_tensors]:
        raise BaseModelError(f'{lack}; it holds no plain tensors there, which cannot be read: {some(other)}')
    if reasons := [match.refused[name] for name in lacking if name in match.refused]:
        raise BaseModelError(f'{lack}, {reasons[0]}; if this is the trained model, {_REMEDY}, with its weights')
    if any(map(is_of_adapter, lacking)):
        raise BaseModelError(f'{lack}, and they were trained: take a complete checkpoint of the adapter')
    raise BaseModelError(
        f'{lack}, and nothing shows that they were frozen, so they are not taken from a base; take a complete '
        f'checkpoint. If another model was trained, {_REMEDY}, or --architecture its class'
    )


def _require_equal(matching: Sequence[StoredTensor], meta_model: MetaModel) -> None:
    """Require that tied tensors are stored once or are equal (runs on GPUs store equal copies)."""
    for other in matching[1:]:
        if not is_same_value(matching[0], other):
            raise BaseModelError(
                f'the model of {meta_model.described_by} ties {matching[0].name} and {other.name}, but they differ in '
                f'the checkpoint; set tie_word_embeddings to false in the config.json that --base names'
            )


def _judge(meta_model: MetaModel, other_shape: list[str], unexpected: list[str]) -> list[str]:
    """Raise if the checkpoint belongs to another model, else return notes about tensors that are not exported."""
    if other_shape:
        raise BaseModelError(
            f'the checkpoint and the model of {meta_model.described_by} differ: {some(other_shape)}; {_REMEDY}'
        )
    inside = tuple(f'{path}.'.removeprefix('.') for path, _ in models_in(meta_model.module))
    if lost := [name for name in unexpected if name.startswith(inside)]:
        lack = f'the checkpoint has tensors that the model of {meta_model.described_by} lacks: {some(lost)}'
        if all(name.endswith(_OF_QUANTIZED) for name in lost):
            raise BaseModelError(f'{lack}; they are of quantized weights (AWQ, GPTQ), which training does not change')
        if any(is_of_adapter(name) for name in lost) and not adapters_in(meta_model.module):
            raise BaseModelError(
                f'{lack}; they are of peft: --base has to name a folder with the adapter_config.json, or --config a '
                f'config with the LoraConfig of the run'
            )
        raise BaseModelError(f'{lack}; {_REMEDY}{other_version_remedy([base.model for base in meta_model.bases])}')
    if unexpected:
        return [f'{counted(len(unexpected), "tensor")} of the checkpoint not in the model: {some(unexpected)}']
    return []
