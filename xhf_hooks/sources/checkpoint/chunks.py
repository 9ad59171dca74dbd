"""Tensors that ranks have saved in chunks, each with its place in the whole, as FSDP's sharded state dicts do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.strict_json import is_count
from xhf_hooks.sources.checkpoint.inert import Global, Inert
from xhf_hooks.sources.checkpoint.tensors import LazyTensor, as_dtype
from xhf_hooks.sources.pieces import Piece, StoredTensor

_MOST_DIMS = 16


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its elements lie.

    Attributes:
        offsets, sizes: In elements, by dimension of the whole tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    piece: Piece


def join(where: str, name: str, shape: tuple[int, ...], dtype: str, chunks: Iterable[Chunk]) -> StoredTensor:
    """The whole tensor from chunks of consecutive elements, as those of whole rows are.

    Replicas of a chunk, which groups of ranks each have saved, count once.

    Args:
        where: For messages: file or folder.

    Raises:
        CheckpointError: Chunks are of columns, overlap, or leave something out.
    """
    by_start: dict[int, Chunk] = {}
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise CheckpointError(f'{where}: {name} has a chunk of other dimensions; take another checkpoint')
        if math.prod(chunk.sizes):
            by_start.setdefault(_start(where, name, shape, chunk), chunk)
    position = 0
    for start, chunk in sorted(by_start.items()):
        if start != position:
            what = 'overlap' if start < position else f'leave out elements {position} to {start}'
            raise CheckpointError(f'{where}: the chunks of {name} {what}; copy the files of all ranks, of one save')
        position += math.prod(chunk.sizes)
    if position != math.prod(shape):
        raise CheckpointError(
            f'{where}: the chunks of {name} have {position} elements, its shape {shape} {math.prod(shape)}; copy the '
            f'files of all ranks, of one save'
        )
    pieces = tuple(chunk.piece for _, chunk in sorted(by_start.items()))
    return StoredTensor(name, shape, dtype, pieces)


def _start(where: str, name: str, shape: tuple[int, ...], chunk: Chunk) -> int:
    """The first element of the chunk in the row-major whole."""
    split = next((dim for dim, size in enumerate(chunk.sizes) if size != 1), len(shape))
    if chunk.sizes[split + 1 :] != shape[split + 1 :]:
        raise CheckpointError(
            f'{where}: {name} of shape {shape} is split into parts of shape {chunk.sizes}, not into whole rows, which '
            f"is not supported here; torch's dcp_to_torch_save reads it, and its file can be converted (it executes "
            f'what the checkpoint says)'
        )
    start = 0
    for size, offset in zip(shape, chunk.offsets, strict=True):
        start = start * size + offset
    return start


def contiguous_piece(tensor: Any, sizes: tuple[int, ...], dtype: str) -> Piece | None:
    """All of a tensor of a file; None if it is not one of these sizes and this dtype."""
    if not isinstance(tensor, LazyTensor) or (tensor.shape, tensor.dtype) != (sizes, dtype):
        return None
    if not tensor.numel or not tensor.is_contiguous:
        return None
    return tensor.piece()


def attributes(value: Any, class_name: str) -> dict[str, Any]:
    """What an object of a pickle has, if it is of a class of this name; else nothing."""
    if not isinstance(value, Inert):
        return {}
    state = value.state
    if isinstance(state, tuple) and len(state) == 2 and state[0] is None:  # of a class with slots
        state = state[1]
    return state if value.made_by.name == class_name and isinstance(state, dict) else {}


def as_sizes(value: Any) -> tuple[int, ...] | None:
    """A shape or offsets, as ``torch.Size``, tuple or list; None for anything else."""
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMS:
        return None
    return tuple(value) if all(map(is_count, value)) else None


@dataclass(frozen=True)
class Sharded:
    """A rank's ShardedTensor (torch ``distributed/_shard/sharded_tensor/api.py``, ``__getstate__``).

    Attributes:
        dtype, shape: Of the whole tensor; None where it does not tell.
        shards: Those of this rank; each has ``tensor`` and ``metadata``.
    """

    dtype: str | None
    shape: tuple[int, ...] | None
    shards: list[dict[str, Any]]


def as_sharded(value: Any) -> Sharded | None:
    """None for anything else."""
    args = value.args if isinstance(value, Inert) else ()
    if len(args) < 3 or not isinstance(args[0], Global) or args[0].name != 'ShardedTensor':
        return None
    shards = value.state[0] if isinstance(value.state, tuple) and value.state else None
    shards = [attributes(shard, 'Shard') for shard in shards] if isinstance(shards, list) else []
    return Sharded(as_dtype(args[1]), as_sizes(args[2]), shards)
