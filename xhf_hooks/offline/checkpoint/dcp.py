"""Folders of torch.distributed.checkpoint, as FSDP runs of Accelerate and transformers.Trainer write them.

``.metadata`` is a pickle with the chunks of each tensor, and the place of each chunk in a ``.distcp`` file, where it is
stored as a ``torch.save`` archive (torch ``distributed/checkpoint/metadata.py``, ``filesystem.py``,
``default_planner.py``). torch's reader executes that pickle; this one parses it as data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.safetensors import HALF_DTYPES
from xhf_hooks.format.text import some
from xhf_hooks.offline.checkpoint.find import FoundCheckpoint
from xhf_hooks.offline.checkpoint.regions import code_of
from xhf_hooks.offline.checkpoint.states import parsing
from xhf_hooks.offline.checkpoint.torch_file import load_mapped, load_pickle_file, told_of
from xhf_hooks.offline.checkpoint.unpickler import Inert
from xhf_hooks.sources.mapped_files import MappedFile
from xhf_hooks.sources.stored_tensors import StoredTensor

#: Keys under which trainers save a model's state dict; Accelerate: ``model``.
_MODELS = ('model', 'state_dict', 'module', 'model_state_dict')
#: Keys of what is no model: states of optimizers, schedulers and generators.
_BESIDE_MODELS = re.compile(r'.*(optim|sched|scaler|rng|random).*')


def load_dcp(found: FoundCheckpoint) -> list[StoredTensor]:
    """Load the tensors of the model's state dict, without optimizer state and other objects.

    Raises:
        CheckpointError: The files are inconsistent or of an unsupported kind.
    """
    index = found.path / '.metadata'
    metadata = load_pickle_file(index)
    with parsing(index, 'an index of torch.distributed.checkpoint'):
        fields = _fields(metadata)
        tensors = {key: _fields(tensor) for key, tensor in fields['state_dict_metadata'].items()}
        tensors = {key: tensor for key, tensor in tensors.items() if 'chunks' in tensor}  # not those of other objects
        stored = {}
        for key, info in fields['storage_data'].items():
            place = _fields(key)
            stored[place['fqn'], tuple(place.get('offset') or ())] = _fields(info)
        names = _names(index, list(tensors), fields.get('planner_data') or {})
        chunks = _Chunks(found, stored)
        return [chunks.tensor(key, name, tensors[key]) for key, name in names.items()]


def _names(index: Path, keys: list[Any], paths: Mapping[str, Any]) -> dict[str, str]:
    """Maps names in the checkpoint to names in the model.

    ``planner_data`` has the path of each tensor in the nested dict that was saved: ``('model', 'lm_head.weight')``.
    """
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for key in keys:
        path = paths.get(key) or (key,)
        if isinstance(path[-1], str):  # else an item of a list, not of a state dict
            groups.setdefault(tuple(map(str, path[:-1])), {})[key] = path[-1]
    models = [group for group in groups if group and group[-1] in _MODELS]
    found = groups.get(models[0] if models else (), {})
    if len(models) > 1 or not found:  # such as an actor and a critic: the option module chooses
        several = models or [group for group in groups if not any(map(_BESIDE_MODELS.fullmatch, group))]
        paths_of_models = {group: [part for part in group if part not in _MODELS] for group in several}
        if len(several) > 1 and len(set(map(tuple, paths_of_models.values()))) == len(several):
            return {key: '.'.join([*paths_of_models[g], name]) for g in several for key, name in groups[g].items()}
        shown = some(sorted('/'.join(group) for group in models or groups)) or 'nothing'
        raise CheckpointError(
            f"{index}: expected one model's state dict, found {shown}; give the model's folder (Accelerate: "
            f'pytorch_model_fsdp_0), or save the model alone'
        )
    return found


class _Chunks:
    """The chunks in the ``.distcp`` files.

    Args:
        stored: Name in the checkpoint and offsets of the chunk in the tensor to the chunk's storage info.
    """

    def __init__(self, found: FoundCheckpoint, stored: Mapping[tuple[str, tuple[int, ...]], Any]) -> None:
        self._index, self._stored = found.path / '.metadata', stored
        self._files = {file.name: file for file in found.model_files}
        self._mapped: dict[str, MappedFile] = {}

    def tensor(self, key: str, name: str, tensor: Mapping[str, Any]) -> StoredTensor:
        """Join chunks of consecutive elements, such as rows, into the full tensor.

        Replicas of a chunk, saved by several groups of ranks, count once.

        Raises:
            CheckpointError: Chunks are not consecutive elements, overlap, or leave gaps.
        """
        shape, dtype = tuple(tensor['size']), tensor['properties'].state[0]
        found: dict[int, torch.Tensor] = {}
        for box in map(_fields, tensor['chunks']):
            offsets, sizes = tuple(box['offsets']), tuple(box['sizes'])
            if 0 in sizes:  # empty on ranks without a part of the tensor
                continue
            split = next((dim for dim, size in enumerate(sizes) if size != 1), len(shape))
            if sizes[split + 1 :] != shape[split + 1 :]:
                raise CheckpointError(
                    f'{self._index}: {name} of shape {shape} is split into chunks of shape {sizes}, which is not '
                    f"supported (expected complete rows). For checkpoints that you trust: torch's dcp_to_torch_save, "
                    f'which may run code from them, makes a file that can be converted'
                )
            start = 0
            for size, offset in zip(shape, offsets, strict=True):
                start = start * size + offset
            if start not in found:
                found[start] = self._load(name, self._stored[key, offsets], sizes, dtype)
        position = 0
        for start, chunk in sorted(found.items()):
            position = position + chunk.numel() if start == position else -1
        if position != math.prod(shape):
            raise CheckpointError(
                f'{self._index}: the chunks of {name} are not those of its shape {shape}; copy the files of all ranks '
                f'of one save'
            )
        pieces = tuple(found[start] for start in sorted(found))
        code = code_of(self._index, name, dtype)
        return StoredTensor(name, shape, code, pieces, master_lost=code in HALF_DTYPES)

    def _load(self, name: str, info: Mapping[str, Any], sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        file = info['relative_path']
        if file not in self._files:
            raise CheckpointError(
                f'{self._index}: {name} is stored in {file[:80]!r}, which is not in the folder; copy it'
            )
        if file not in self._mapped:
            with told_of(self._files[file]):
                self._mapped[file] = MappedFile.open(self._files[file])
        tensor = load_mapped(self._mapped[file].part(info['offset'], info['length']))
        if not isinstance(tensor, torch.Tensor) or (tuple(tensor.shape), tensor.dtype) != (sizes, dtype):
            raise CheckpointError(
                f'{self._files[file]}: the bytes at {info["offset"]} are not the chunk of {name} that .metadata '
                f'describes; put the files of one save together'
            )
        return tensor


def _fields(value: Inert) -> dict[str, Any]:
    """The attributes of a pickled object."""
    state = value.state
    return state[1] if isinstance(state, tuple) else state or {}  # a tuple: of a class with __slots__
