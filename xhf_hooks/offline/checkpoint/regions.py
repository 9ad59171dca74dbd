"""Where DeepSpeed's files have a parameter's values: the state dict, or the optimizer's flat fp32 groups.

Layouts: ``zero/stage_1_and_2.py`` (``state_dict``, ``_get_groups_without_padding``), ``bf16_optimizer.py``
(``_setup_for_real_optimizer``), ``zero/stage3.py`` (``_rigid_state_dict``); read as ``utils/zero_to_fp32.py`` does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from xhf_hooks.errors import CheckpointError, TensorError
from xhf_hooks.format.dtypes import dtype_code
from xhf_hooks.format.safetensors import HALF_DTYPES
from xhf_hooks.offline.checkpoint.states import ModelState, OptimState, Shapes, trained_dtype
from xhf_hooks.sources.stored_tensors import Pieces, StoredTensor


class Region(NamedTuple):
    """Pieces of one dtype that make up a tensor of ``shape``."""

    shape: tuple[int, ...]
    pieces: Pieces


Regions = dict[str, Region]
_HINT = 'the files are not of one save, or the training mode is not supported'


def zero12_regions(shapes: Sequence[Shapes], optims: Sequence[OptimState]) -> Regions:
    """Locate parameters at ZeRO-1 and 2: each group is one vector, split evenly over the ranks.

    The vector holds the parameters in order, each with its padding (``zero_optimization.parameter_alignment``,
    DeepSpeed 0.19.8 and later), then up to 2 * ranks elements of alignment, which may be missing in the last ranks'
    files.

    Args:
        shapes: For each group, its parameters in the order of the vector.

    Raises:
        CheckpointError: Elements are missing or left over.
    """
    found: Regions = {}
    for index, group in enumerate(shapes):
        parts = [optim.groups[index] for optim in optims]
        sizes = [len(part) for part in parts]
        paddings = optims[0].paddings[index] if optims[0].paddings is not None else [0] * len(group)
        end = position = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            end = position + math.prod(shape)
            found[name] = Region(shape, cut(parts, position, end))
            position = end + padding
        is_even = len({*sizes[:-1], max(sizes)}) == 1  # but for the last one, which may be shorter
        total, alignment = sum(sizes), 2 * len(optims)
        if not is_even or end > total or -(-position // alignment) != -(-total // alignment):
            raise CheckpointError(
                f'{optims[0].file}: group {index} has parts of {sizes} elements on the ranks, expected {position} in '
                f'equal parts; {_HINT}'
            )
    return found


def zero3_regions(shapes: Sequence[Shapes], ranks: Sequence[tuple[Path, Sequence[torch.Tensor]]]) -> Regions:
    """Locate parameters at ZeRO-3: each rank has ceil(numel / ranks) elements of every parameter, padded at the end.

    Args:
        ranks: For each rank, its file and its vector in any number of parts: groups may end within a parameter
            (``sub_group_size``).

    Raises:
        CheckpointError: Elements are missing or left over.
    """
    merged = {name: shape for group in shapes for name, shape in group.items()}
    shares = {name: -(-math.prod(shape) // len(ranks)) for name, shape in merged.items()}
    for file, parts in ranks:
        numel, wanted = sum(len(part) for part in parts), sum(shares.values())
        if numel != wanted:
            raise CheckpointError(f'{file}: holds {numel} elements, expected {wanted} with {len(ranks)} ranks; {_HINT}')
    found: Regions = {}
    position = 0
    for name, shape in merged.items():
        left, pieces = math.prod(shape), Pieces()
        for _, parts in ranks:
            pieces += cut(parts, position, position + min(left, shares[name]))
            left -= min(left, shares[name])
        found[name] = Region(shape, pieces)
        position += shares[name]
    return found


def cut(parts: Iterable[torch.Tensor], start: int, end: int) -> Pieces:
    """Elements of the concatenation of flat tensors."""
    found = []
    for part in parts:
        if end <= 0:
            break
        if start < len(part):
            found.append(part[max(0, start) : end])
        start, end = start - len(part), end - len(part)
    return tuple(found)


def frozen_regions(models: Sequence[ModelState], is_zero3: bool) -> Regions:
    """Locate frozen parameters: at ZeRO-3 a slice in each rank's file, at stage 2 a second copy in the model file."""
    first = models[0]
    if not is_zero3:
        return {name: _region(tensor) for name, tensor in first.fragments.items()}
    found: Regions = {}
    for name, shape in first.frozen_shapes.items():
        lacking = next((model.file for model in models if name not in model.fragments), None)
        if lacking is not None:
            raise CheckpointError(f'{lacking}: lacks the frozen parameter {name}; put the files of one save together')
        found |= zero3_regions([{name: shape}], [(m.file, [m.fragments[name].view(-1)]) for m in models])
    return found


def assemble(
    model: ModelState, masters: Regions, frozen: Regions, placeholders: Collection[str] = ()
) -> list[StoredTensor]:
    """Choose where to read each parameter; those that are nowhere are left out.

    Args:
        model: At ZeRO-3 it has dtypes and buffers, else all weights that ``state_dict()`` gave.
        placeholders: Tensors of the state dict whose dtype alone is valid.
    """
    module = {name: tensor for name, tensor in model.module.items() if name not in placeholders}
    weights = {name: _region(tensor) for name, tensor in module.items()}
    trained, never_trained = trained_dtype(model.content.get('ds_config')) or 'F32', model.never_trained
    found = []
    for names in _tied([*model.module, *masters, *frozen], module, model.shared):
        master, kept = _first(masters, names), _first(frozen, names)
        region = _first(weights, names) or master or kept
        if region is None:
            continue
        if any(other is not None and other.shape != region.shape for other in (master, kept)):
            raise CheckpointError(
                f'{model.file}: {names[0]} has shape {region.shape}, but another one in the optimizer state; take '
                f'another checkpoint'
            )
        dtypes = [model.module[name].dtype for name in names if name in model.module]
        dtypes += [piece.dtype for piece in kept.pieces] if kept is not None else []
        dtype = code_of(model.file, names[0], dtypes[0]) if dtypes else trained
        if dtype not in HALF_DTYPES or (master and any(piece.dtype != torch.float32 for piece in master.pieces)):
            master = None
        pieces = None if master is None else master.pieces
        lost = master is None and dtype in HALF_DTYPES and never_trained.isdisjoint(names)
        found.append(StoredTensor(names[0], region.shape, dtype, region.pieces, pieces, tuple(names[1:]), lost))
    return found


def _tied(names: Iterable[str], module: Mapping[str, torch.Tensor], shared: Mapping[str, str]) -> list[list[str]]:
    """All names of each parameter.

    Names belong to one parameter if DeepSpeed says so or if they are views of the same bytes: in a file, unlike in
    memory, such views come from one tensor.
    """
    found: dict[object, list[str]] = {}
    for name in dict.fromkeys(names):
        owner = shared.get(name, name)
        tensor = module.get(owner)
        found.setdefault(owner if tensor is None or not tensor.numel() else place_of(tensor), []).append(name)
    return list(found.values())


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that view the same bytes of a file."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _first(regions: Regions, names: Iterable[str]) -> Region | None:
    return next((regions[name] for name in names if name in regions), None)


def _region(tensor: torch.Tensor) -> Region:
    return Region(tuple(tensor.shape), (tensor,))


def code_of(file: Path, name: str, dtype: torch.dtype) -> str:
    """The safetensors code of a dtype."""
    try:
        return dtype_code(dtype)
    except TensorError:
        raise CheckpointError(f'{file}: {name} is {dtype}, which safetensors cannot store; leave it out') from None
