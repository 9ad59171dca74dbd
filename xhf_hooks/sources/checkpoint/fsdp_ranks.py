"""Checkpoints of MMEngine's FSDPStrategy with one file per rank: ``iter_500.pth/rank0.pth`` and so on.

Format: mmengine ``_strategy/fsdp.py`` (``save_checkpoint``); torch ``fsdp/_state_dict_utils.py``. SHARDED_STATE_DICT
has a ShardedTensor under each name, with the offsets of its shards. LOCAL_STATE_DICT: :mod:`.fsdp_local`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.assemble import Assembled, from_state_dict
from xhf_hooks.sources.checkpoint.chunks import (
    Chunk,
    Sharded,
    as_sharded,
    as_sizes,
    attributes,
    contiguous_piece,
    join,
)
from xhf_hooks.sources.checkpoint.found import FoundCheckpoint
from xhf_hooks.sources.checkpoint.fsdp_local import READER, is_flat, join_local
from xhf_hooks.sources.checkpoint.inert import Inert
from xhf_hooks.sources.checkpoint.tensors import LazyTensor
from xhf_hooks.sources.checkpoint.torch_file import load_torch_file
from xhf_hooks.sources.pieces import StoredTensor


def load_fsdp_ranks(found: FoundCheckpoint) -> tuple[Mapping[str, Any], Assembled]:
    """The content of the first file, and the joined tensors of all files.

    Raises:
        CheckpointError: Files are missing, from several saves, or of an unsupported kind.
    """
    contents = [_content(file) for file in found.model_files]
    states = [content['state_dict'] for content in contents]
    _require_one_save(found.model_files, contents)
    if any(is_flat(name) for name in states[0]):
        return contents[0], Assembled(tuple(join_local(found.model_files, contents)))
    names = [name for name in states[0] if isinstance(name, str)]
    sharded = {name: as_sharded(states[0][name]) for name in names}
    tensors = {name: _joined(found, name, value, states) for name, value in sharded.items() if value is not None}
    whole = {name: states[0][name] for name in names if isinstance(states[0][name], LazyTensor)}  # the same on all
    buffers = {tensor.name: tensor for tensor in from_state_dict(str(found.model_files[0]), whole, {}).tensors}
    both = tensors | buffers
    return contents[0], Assembled(tuple(both[name] for name in names if name in both))


def _content(file: Path) -> Mapping[str, Any]:
    content = load_torch_file(file)
    state = content.get('state_dict') if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: not a rank's file of MMEngine's FSDPStrategy; give another checkpoint")
    for name, value in state.items():
        if isinstance(value, Inert) and as_sharded(value) is None:
            raise CheckpointError(
                f"{file}: saved by MMEngine's FSDPStrategy, with {str(name)[:80]!r} of an unsupported type; {READER}"
            )
    return content


def _require_one_save(files: Sequence[Path], contents: Sequence[Mapping[str, Any]]) -> None:
    saved_at = []
    for content in contents:
        meta = content['meta'] if isinstance(content.get('meta'), dict) else {}
        saved_at.append([value if type(value) is int else None for value in (meta.get('iter'), meta.get('epoch'))])
    for file, content, at in zip(files, contents, saved_at, strict=True):
        if at != saved_at[0]:
            raise CheckpointError(
                f'{file}: was saved at iteration and epoch {at}, {files[0].name} at {saved_at[0]}; put the files of '
                f'one save together'
            )
        if content['state_dict'].keys() != contents[0]['state_dict'].keys():
            raise CheckpointError(f'{file}: has other names than {files[0].name}; put the files of one save together')


def _joined(found: FoundCheckpoint, name: str, first: Sharded, states: Sequence[Mapping[str, Any]]) -> StoredTensor:
    dtype, shape = first.dtype, first.shape
    if dtype is None or shape is None:
        raise CheckpointError(f'{found.model_files[0]}: has no dtype or shape of {name}; take another checkpoint')
    chunks = []
    for file, state in zip(found.model_files, states, strict=True):
        sharded = as_sharded(state[name])
        if sharded is None or sharded.shape != shape:
            raise CheckpointError(f'{file}: {name} is not of shape {shape}; put the files of one save together')
        chunks += [_chunk(file, name, dtype, shard) for shard in sharded.shards]
    return join(str(found.path), name, shape, dtype, [chunk for chunk in chunks if chunk is not None])


def _chunk(file: Path, name: str, dtype: str, shard: Mapping[str, Any]) -> Chunk | None:
    box = attributes(shard.get('metadata'), 'ShardMetadata')
    offsets, sizes = as_sizes(box.get('shard_offsets')), as_sizes(box.get('shard_sizes'))
    if offsets is None or sizes is None:
        raise CheckpointError(f'{file}: a shard of {name} has no offsets or sizes; take another checkpoint')
    if 0 in sizes:
        return None
    piece = contiguous_piece(shard.get('tensor'), sizes, dtype)
    if piece is None:
        raise CheckpointError(f'{file}: a shard of {name} does not match its description; take another checkpoint')
    return Chunk(offsets, sizes, piece)
