"""Tensors that were saved in chunks by several ranks, as in FSDP's sharded state dicts."""

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
    """A box of a tensor, and the place of its elements in a file.

    Attributes:
        offsets, sizes: In elements, by dimension of the full tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    piece: Piece


def join(where: str, name: str, shape: tuple[int, ...], dtype: str, chunks: Iterable[Chunk]) -> StoredTensor:
    """Join chunks of consecutive elements, such as rows, into the full tensor.

    Replicas of a chunk, saved by several groups of ranks, count once.

    Args:
        where: File or folder, for messages.

    Raises:
        CheckpointError: Chunks are not consecutive elements, overlap, or leave gaps.
    """
    by_start: dict[int, Chunk] = {}
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            raise CheckpointError(
                f'{where}: {name} has a chunk with another number of dimensions; take another checkpoint'
            )
        if math.prod(chunk.sizes):
            by_start.setdefault(_start(where, name, shape, chunk), chunk)
    position = 0
    for start, chunk in sorted(by_start.items()):
        if start != position:
            what = 'overlap' if start < position else f'leave out elements {position} to {start}'
            raise CheckpointError(f'{where}: the chunks of {name} {what}; copy the files of all ranks of one save')
        position += math.prod(chunk.sizes)
    if position != math.prod(shape):
        raise CheckpointError(
            f'{where}: the chunks of {name} have {position} elements, but its shape {shape} has {math.prod(shape)}; '
            f'copy the files of all ranks of one save'
        )
    pieces = tuple(chunk.piece for _, chunk in sorted(by_start.items()))
    return StoredTensor(name, shape, dtype, pieces)


def _start(where: str, name: str, shape: tuple[int, ...], chunk: Chunk) -> int:
    """Index of the chunk's first element in the row-major tensor."""
    split = next((dim for dim, size in enumerate(chunk.sizes) if size != 1), len(shape))
    if chunk.sizes[split + 1 :] != shape[split + 1 :]:
        raise CheckpointError(
            f'{where}: {name} of shape {shape} is split into chunks of shape {chunk.sizes}, which is not supported '
            f"(expected complete rows). For checkpoints that you trust: torch's dcp_to_torch_save, which may run code "
            f'from them, makes a file that can be converted'
        )
    start = 0
    for size, offset in zip(shape, chunk.offsets, strict=True):
        start = start * size + offset
    return start


def contiguous_piece(tensor: Any, sizes: tuple[int, ...], dtype: str) -> Piece | None:
    """All elements of a tensor in a file; None unless it is contiguous with these sizes and this dtype."""
    if not isinstance(tensor, LazyTensor) or (tensor.shape, tensor.dtype) != (sizes, dtype):
        return None
    if not tensor.numel or not tensor.is_contiguous:
        return None
    return tensor.piece()


def attributes(value: Any, class_name: str) -> dict[str, Any]:
    """The attributes of a pickled object of the given class; {} for other values."""
    if not isinstance(value, Inert):
        return {}
    state = value.state
    if isinstance(state, tuple) and len(state) == 2 and state[0] is None:  # a class with __slots__
        state = state[1]
    return state if value.made_by.name == class_name and isinstance(state, dict) else {}


def as_sizes(value: Any) -> tuple[int, ...] | None:
    """A shape or offsets as ``torch.Size``, tuple or list; None for other values."""
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMS:
        return None
    return tuple(value) if all(map(is_count, value)) else None


@dataclass(frozen=True)
class Sharded:
    """A rank's ShardedTensor (torch ``distributed/_shard/sharded_tensor/api.py``, ``__getstate__``).

    Attributes:
        dtype, shape: Those of the full tensor; None if unknown.
        shards: This rank's shards, with ``tensor`` and ``metadata``.
    """

    dtype: str | None
    shape: tuple[int, ...] | None
    shards: list[dict[str, Any]]


def as_sharded(value: Any) -> Sharded | None:
    """Parse a pickled ShardedTensor; None for other values."""
    args = value.args if isinstance(value, Inert) else ()
    if len(args) < 3 or not isinstance(args[0], Global) or args[0].name != 'ShardedTensor':
        return None
    shards = value.state[0] if isinstance(value.state, tuple) and value.state else None
    shards = [attributes(shard, 'Shard') for shard in shards] if isinstance(shards, list) else []
    return Sharded(as_dtype(args[1]), as_sizes(args[2]), shards)
