"""Locates the values of each tensor in the files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.sources.checkpoint.flat_groups import Regions, fragments_region
from xhf_hooks.sources.checkpoint.states import ModelState
from xhf_hooks.sources.checkpoint.unpickler import LazyTensor
from xhf_hooks.sources.pieces import Region, StoredTensor

#: Shape in the state dict, at ZeRO-3, of a parameter whose values are stored elsewhere.
_PLACEHOLDER_SHAPE = (0,)
_MASTER, _ROUNDED = 'F32', ('BF16', 'F16')


@dataclass(frozen=True)
class Assembled:
    """The tensors of a checkpoint in the order of the state dict.

    Attributes:
        named_only: Parameters in the state dict that have no values in any file.
    """

    tensors: tuple[StoredTensor, ...]
    named_only: tuple[str, ...] = ()


def from_state_dict(file: str, tensors: Mapping[str, LazyTensor], masters: Regions) -> Assembled:
    """A single file or a run without ZeRO: one state dict has all weights."""
    return _assemble(file, tensors, masters, {}, {}, _MASTER)


def from_zero12(model: ModelState, masters: Regions) -> Assembled:
    """ZeRO-1 and 2, and BF16_Optimizer: trained weights in the model file, fp32 masters in the optimizer files.

    Weights that an overridden ``state_dict()`` left out are read from the masters and, at stage 2, from the second copy
    of frozen parameters in the model file.
    """
    file = str(model.file)
    frozen = {name: _region(file, name, tensor) for name, tensor in model.fragments.items()}
    return _assemble(file, model.module, masters, frozen, model.shared, model.trained_dtype or _MASTER)


def from_zero3(models: Sequence[ModelState], masters: Regions) -> Assembled:
    """ZeRO-3: each rank has a slice of every parameter; the state dict has dtypes and buffers."""
    first = models[0]
    frozen = {}
    for name, shape in first.frozen_shapes.items():
        lacking = next((model.file for model in models if name not in model.fragments), None)
        if lacking is not None:
            raise CheckpointError(f'{lacking}: lacks the frozen parameter {name}; put the files of one save together')
        frozen[name] = fragments_region(name, shape, [model.fragments[name] for model in models])
    empty = {n for n, t in first.module.items() if t.shape == _PLACEHOLDER_SHAPE and n not in first.buffer_names}
    trained = first.trained_dtype or _MASTER
    return _assemble(str(first.file), first.module, masters, frozen, first.shared, trained, empty)


def _assemble(
    file: str,
    state_dict: Mapping[str, LazyTensor],
    masters: Regions,
    frozen: Regions,
    shared: Mapping[str, str],
    trained_dtype: str,
    placeholders: Collection[str] = (),
) -> Assembled:
    """Choose where to read each parameter.

    Args:
        trained_dtype: The dtype of parameters that are not in the state dict.
        placeholders: Tensors of the state dict whose dtype alone is valid.
    """
    module = {name: tensor for name, tensor in state_dict.items() if name not in placeholders}
    owners = _owners([*state_dict, *masters, *frozen], module, shared)
    found: list[StoredTensor] = []
    named_only: list[str] = []
    for name, names in owners.items():
        whole = next((_region(file, n, module[n]) for n in names if n in module), None)
        master = next((masters[n] for n in names if n in masters), None)
        kept = next((frozen[n] for n in names if n in frozen), None)
        region = whole or master or kept
        if region is None:
            named_only.append(name)
            continue
        if any(other is not None and other.shape != region.shape for other in (master, kept)):
            raise CheckpointError(
                f'{file}: {name} has shape {region.shape}, but another one in the optimizer state; take another '
                f'checkpoint'
            )
        dtype = region.dtype
        if region is master:
            dtype = next((_dtype(file, n, state_dict[n]) for n in names if n in state_dict), trained_dtype)
        fp32 = master.pieces if master is not None and master.dtype == _MASTER else None
        pieces = fp32 if dtype in _ROUNDED else None
        found.append(StoredTensor(name, region.shape, dtype, region.pieces, pieces, tuple(names[1:])))
    return Assembled(tuple(found), tuple(named_only))


def _owners(names: Sequence[str], module: Mapping[str, LazyTensor], shared: Mapping[str, str]) -> dict[str, list[str]]:
    """All names of each parameter, by its first name.

    Names belong to one parameter if DeepSpeed says so or if they are views of the same bytes: in a file, unlike in
    memory, such views come from one tensor.
    """
    place = {name: index for index, name in enumerate(dict.fromkeys(names))}
    first_at: dict[Any, str] = {}
    towards: dict[str, str] = {}  # union-find: to an earlier name of the same parameter, or itself
    for name in place:
        tensor = module.get(name)
        towards[name] = first_at.setdefault(tensor.place if tensor is not None and tensor.numel else name, name)
    for alias, owner in shared.items():
        if alias in place and owner in place:
            first, second = sorted((_first(towards, alias), _first(towards, owner)), key=place.__getitem__)
            towards[second] = first
    owners: dict[str, list[str]] = {}
    for name in place:
        owners.setdefault(_first(towards, name), []).append(name)
    return owners


def _first(towards: dict[str, str], name: str) -> str:
    """The root in the union-find, with path halving."""
    while (following := towards[name]) != name:
        towards[name] = towards[following]
        name = following
    return name


def _region(file: str, name: str, tensor: LazyTensor) -> Region:
    dtype = _dtype(file, name, tensor)
    if tensor.numel * DTYPE_NBYTES[dtype] > tensor.storage.nbytes:
        raise CheckpointError(f'{file}: {name} has shape {tensor.shape}, but its bytes overlap; save a contiguous copy')
    return Region(tensor.shape, dtype, (tensor.piece(),) if tensor.numel else ())


def _dtype(file: str, name: str, tensor: LazyTensor) -> str:
    if tensor.dtype is None:
        raise CheckpointError(f'{file}: {name} has a dtype that safetensors cannot store; leave it out')
    return tensor.dtype
