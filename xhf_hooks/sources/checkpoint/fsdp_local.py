"""LOCAL_STATE_DICT of FSDP with ``use_orig_params=True``, the default of MMEngine's FSDPStrategy.

Each rank's file holds the rank's part of the flat parameter as ``_flat_param``, a ShardedTensor with its offset. Under
each parameter's name it has that parameter's elements in the part, as a one-dimensional view (torch
``fsdp/_state_dict_utils.py``, ``_local_post_state_dict_hook``). The parameter's shape is taken from the optimizer's
moments, which are ShardedTensors of the full parameter (``FSDP.optim_state_dict``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.chunks import as_sharded, as_sizes, attributes
from xhf_hooks.sources.checkpoint.tensors import LazyTensor
from xhf_hooks.sources.pieces import StoredTensor

_FLAT = '_flat_param'
_HINT = 'put the files of one save together'
#: How to convert a checkpoint that is refused.
READER = (
    "load it with MMEngine's FSDPStrategy.load_checkpoint on the same number of ranks, and save it again with "
    "state_dict_cfg='full' or with HFCheckpointHook"
)


def is_flat(name: Any) -> bool:
    """Whether a key of a state dict names a flat parameter."""
    return isinstance(name, str) and name.rpartition('.')[2] == _FLAT


def join_local(files: Sequence[Path], contents: Sequence[Mapping[str, Any]]) -> list[StoredTensor]:
    """Join all parameters; buffers are taken from the first rank.

    Raises:
        CheckpointError: A shape is unknown, or the ranks' parts are incomplete.
    """
    states = _in_order(files, [content['state_dict'] for content in contents])
    first = states[0]
    shapes = _shapes(contents[0])
    names = [name for name in first if isinstance(name, str) and isinstance(first[name], LazyTensor)]
    if not names:
        raise CheckpointError(
            f"{files[0]}: saved by MMEngine's FSDPStrategy with state_dict_cfg='local' and use_orig_params=False, "
            f'without names and shapes of parameters; {READER}'
        )
    return [_joined(files[0], name, shapes.get(name), [state.get(name) for state in states]) for name in names]


def _in_order(files: Sequence[Path], states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The states in the order of the ranks' parts, whatever the file names. The last ranks may lack parts of a unit."""
    units = [name for name in states[0] if is_flat(name)]
    places = [tuple(_start(state.get(unit)) for unit in units) for state in states]
    order = sorted(range(len(files)), key=places.__getitem__)
    for one, other in pairwise(order):
        if places[one] == places[other] and min(places[one]) < math.inf:
            raise CheckpointError(f'{files[other]}: holds the same part as {files[one].name}; {_HINT}')
    return [states[index] for index in order]


def _start(value: Any) -> float:
    """The offset of a rank's part of a flat parameter; infinity if it has none."""
    sharded = as_sharded(value)
    for shard in sharded.shards if sharded else ():
        offsets = as_sizes(attributes(shard.get('metadata'), 'ShardMetadata').get('shard_offsets'))
        if offsets:
            return offsets[0]
    return math.inf


def _shapes(content: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    optimizer = content.get('optimizer')
    state = optimizer.get('state') if isinstance(optimizer, dict) else None
    found = {}
    for name, moments in state.items() if isinstance(state, dict) else ():
        for moment in moments.values() if isinstance(moments, dict) else ():
            sharded = as_sharded(moment)
            if isinstance(name, str) and sharded and sharded.shape is not None:
                found[name] = sharded.shape
    return found


def _joined(file: Path, name: str, shape: tuple[int, ...] | None, parts: Sequence[Any]) -> StoredTensor:
    if not all(isinstance(part, LazyTensor) and part.is_contiguous for part in parts):
        raise CheckpointError(f'{file}: {name} is not in the files of all ranks; {_HINT}')
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1 or None in dtypes:
        raise CheckpointError(f'{file}: {name} has a dtype that safetensors cannot store; leave it out')
    if shape is None:
        if len({part.shape for part in parts}) > 1 or (len(parts) > 1 and parts[0].shape == (0,)):
            raise CheckpointError(
                f"{file}: saved by MMEngine's FSDPStrategy with state_dict_cfg='local', and without optimizer state "
                f'that has the shape of {name}; {READER}'
            )
        parts = parts[:1]  # a buffer
        shape = parts[0].shape
    if sum(part.numel for part in parts) != math.prod(shape):
        raise CheckpointError(
            f'{file}: {name} has {sum(part.numel for part in parts)} elements on all ranks, but its shape {shape} has '
            f'{math.prod(shape)}; copy the files of all ranks of one save'
        )
    return StoredTensor(name, shape, parts[0].dtype, tuple(part.piece() for part in parts if part.numel))
