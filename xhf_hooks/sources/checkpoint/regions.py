"""Where DeepSpeed's files have a parameter's values: the state dict, or the optimizer's flat fp32 groups.

Layouts: ``zero/stage_1_and_2.py`` (``state_dict``, ``_get_groups_without_padding``), ``bf16_optimizer.py``
(``_setup_for_real_optimizer``), ``zero/stage3.py`` (``_rigid_state_dict``); read as ``utils/zero_to_fp32.py`` does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.safetensors import DTYPE_NBYTES
from xhf_hooks.sources.checkpoint.states import ModelState
from xhf_hooks.sources.checkpoint.unpickler import LazyTensor
from xhf_hooks.sources.stored_source import Piece, Region, StoredTensor

Shapes = Mapping[str, tuple[int, ...]]
Regions = dict[str, Region]
_HINT = 'the files are not of one save, or the training mode is not supported'


def zero12_regions(
    shapes: Sequence[Shapes], ranks: Sequence[Sequence[LazyTensor]], paddings: Sequence[Sequence[int]] | None
) -> Regions:
    """Locate parameters at ZeRO-1 and 2: each group is one vector, split evenly over the ranks.

    The vector holds the parameters in order, then up to 2 * ranks elements of alignment, which may be missing in the
    last ranks' files.

    Args:
        shapes: For each group, its parameters in the order of the vector.
        ranks: For each rank, its part of each group.
        paddings: For each group, the padding after each parameter (``zero_optimization.parameter_alignment``,
            DeepSpeed 0.19.8 and later); None if there is none.

    Raises:
        CheckpointError: Elements are missing or left over.
    """
    found: Regions = {}
    for index, group in enumerate(shapes):
        parts = [rank[index] for rank in ranks]
        if any(part.numel != parts[0].numel for part in parts[:-1]) or parts[-1].numel > parts[0].numel:
            sizes = [part.numel for part in parts]
            raise CheckpointError(f'{_file(parts)}: group {index} has parts of sizes {sizes} on the ranks; {_HINT}')
        vector = _Vector(parts)
        behind = paddings[index] if paddings is not None else [0] * len(group)
        if len(behind) != len(group):
            raise CheckpointError(f'{_file(parts)}: {len(behind)} paddings for {len(group)} parameters; {_HINT}')
        position = data_end = 0
        for (name, shape), padding in zip(group.items(), behind, strict=True):
            data_end = position + math.prod(shape)
            if data_end > vector.numel:
                raise CheckpointError(f'{_file(parts)}: group {index} ends within {name}; {_HINT}')
            found[name] = Region(shape, vector.dtype, vector.pieces(position, data_end))
            position = data_end + padding
        alignment = 2 * len(ranks)
        if _aligned(position, alignment) != _aligned(vector.numel, alignment):
            raise CheckpointError(
                f'{_file(parts)}: group {index} holds {vector.numel} elements, its parameters have {position}; {_HINT}'
            )
    return found


class Slice(NamedTuple):
    """A rank's slice of a parameter at ZeRO-3: ceil(numel / ranks) elements, padded at the end.

    Attributes:
        position: Start in the rank's vector, the concatenation of its groups. Groups may end within a parameter
            (``sub_group_size``).
    """

    name: str
    shape: tuple[int, ...]
    position: int
    numel: int


def zero3_slices(shapes: Sequence[Shapes], n_ranks: int) -> list[Slice]:
    """All slices of one rank, in the order of its vector."""
    merged = {name: shape for group in shapes for name, shape in group.items()}
    numels = [_slice_numel(shape, n_ranks) for shape in merged.values()]
    positions = accumulate(numels, initial=0)
    return [Slice(*parts) for parts in zip(merged, merged.values(), positions, numels, strict=False)]


def zero3_regions(shapes: Sequence[Shapes], ranks: Sequence[Sequence[LazyTensor]]) -> Regions:
    """Locate parameters at ZeRO-3.

    Raises:
        CheckpointError: Elements are missing or left over.
    """
    slices = zero3_slices(shapes, len(ranks))
    vectors = [_zero3_vector(groups, slices, len(ranks)) for groups in ranks]
    return {part.name: _sliced_region(vectors, part.position, part.shape) for part in slices}


def fragments_region(name: str, shape: tuple[int, ...], fragments: Sequence[LazyTensor]) -> Region:
    """Locate a frozen parameter at ZeRO-3: a slice in each rank's model file.

    Raises:
        CheckpointError: A slice has the wrong size.
    """
    slices = zero3_slices([{name: shape}], len(fragments))
    vectors = [_zero3_vector([fragment], slices, len(fragments), f'{name} has') for fragment in fragments]
    return _sliced_region(vectors, 0, shape)


class _Vector:
    """The concatenation of flat tensors of one dtype."""

    def __init__(self, tensors: Sequence[LazyTensor]) -> None:
        self._tensors = tensors
        self._starts = [0, *accumulate(tensor.numel for tensor in tensors)]
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1 or None in dtypes:
            raise CheckpointError(f'{_file(tensors)}: weights of several dtypes {dtypes} in one group; {_HINT}')
        self.dtype = dtypes.pop() if dtypes else 'F32'

    @property
    def numel(self) -> int:
        return self._starts[-1]

    def pieces(self, start: int, end: int) -> tuple[Piece, ...]:
        found = []
        index = bisect_right(self._starts, start) - 1
        while start < end:
            tensor, begin = self._tensors[index], self._starts[index]
            stop = min(end, begin + tensor.numel)
            if stop > start:
                found.append(tensor.piece(start - begin, stop - start))
                start = stop
            index += 1
        return tuple(found)


def _zero3_vector(groups: Sequence[LazyTensor], slices: Sequence[Slice], n_ranks: int, what: str = 'holds') -> _Vector:
    """A rank's vector, checked to have exactly the size of these slices."""
    vector, wanted = _Vector(groups), sum(part.numel for part in slices)
    if vector.numel != wanted:
        raise CheckpointError(
            f'{_file(groups)}: {what} {vector.numel} elements, expected {wanted} with {n_ranks} ranks; {_HINT}'
        )
    return vector


def _sliced_region(vectors: Sequence[_Vector], position: int, shape: tuple[int, ...]) -> Region:
    """A parameter whose slices begin at ``position`` of each rank's vector."""
    numel, share = math.prod(shape), _slice_numel(shape, len(vectors))
    found: list[Piece] = []
    for rank, vector in enumerate(vectors):
        mine = max(0, min(share, numel - rank * share))
        found += vector.pieces(position, position + mine)
    return Region(shape, vectors[0].dtype, tuple(found))


def _slice_numel(shape: tuple[int, ...], n_ranks: int) -> int:
    return -(-math.prod(shape) // n_ranks)


def _aligned(numel: int, alignment: int) -> int:
    return -(-numel // alignment) * alignment


def _file(tensors: Sequence[LazyTensor]) -> str:
    return str(tensors[0].storage.file) if tensors else 'the checkpoint'


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
