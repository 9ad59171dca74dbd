"""Folders of torch.distributed.checkpoint, as FSDP runs of Accelerate and transformers.Trainer write them.

``.metadata`` is a pickle with the chunks of each tensor, and the place of each chunk in a ``.distcp`` file, where it is
stored as a ``torch.save`` archive (torch ``distributed/checkpoint/metadata.py``, ``filesystem.py``,
``default_planner.py``). torch's reader executes that pickle; this one parses it as data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from xhf_hooks.errors import CheckpointError
from xhf_hooks.format.strict_json import is_count
from xhf_hooks.sources.checkpoint.find import FoundCheckpoint
from xhf_hooks.sources.checkpoint.regions import Assembled
from xhf_hooks.sources.checkpoint.torch_file import load_pickle_file, load_torch_file
from xhf_hooks.sources.checkpoint.unpickler import Inert, LazyTensor, as_dtype
from xhf_hooks.sources.stored_source import Piece, StoredTensor

_MOST_DIMS = 16

#: Keys under which trainers save a model's state dict; Accelerate: ``model``.
_MODELS = ('model', 'state_dict', 'module', 'model_state_dict')
_SHOWN = 5

#: Maps (name in the checkpoint, offsets of the chunk) to the chunk's storage info.
Places = Mapping[tuple[str, tuple[int, ...]], Any]


def load_dcp(found: FoundCheckpoint) -> Assembled:
    """Load the tensors of the model's state dict, without optimizer state and other objects.

    Raises:
        CheckpointError: The files are inconsistent or of an unsupported kind.
    """
    index = found.path / '.metadata'
    metadata = _attributes(load_pickle_file(index), 'Metadata')
    entries, stored = metadata.get('state_dict_metadata'), metadata.get('storage_data')
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise CheckpointError(f'{index}: not an index of torch.distributed.checkpoint; give another folder')
    tensors = {key: _attributes(entry, 'TensorStorageMetadata') for key, entry in entries.items()}
    names = _names(index, [key for key, tensor in tensors.items() if tensor], metadata.get('planner_data'))
    places = _places(stored)
    folder = _Folder(found, index)
    described = [_tensor(index, key, name, tensors[key], places, folder) for key, name in names.items()]
    folder.require_apart()
    return Assembled(tuple(_joined(index, tensor) for tensor in described))


def _names(index: Path, keys: list[Any], paths: Any) -> dict[str, str]:
    """Maps names in the checkpoint to names in the model.

    ``planner_data`` has the path of each tensor in the nested dict that was saved: ``('model', 'lm_head.weight')``.
    """
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for key in keys:
        path = paths.get(key) if isinstance(paths, dict) else None
        if not isinstance(path, tuple) or not path:
            path = (key,)
        if not isinstance(key, str) or not isinstance(path[-1], str):
            continue  # an item of a list, not of a state dict
        groups.setdefault(tuple(map(str, path[:-1])), {})[key] = path[-1]
    models = [group for group in groups if group and group[-1] in _MODELS]
    if len(models) > 1:
        shown = ', '.join('/'.join(model)[:80] for model in models[:_SHOWN])
        raise CheckpointError(f'{index}: holds {len(models)} models ({shown}), expected one; save them separately')
    found = groups.get(models[0] if models else (), {})
    if not found:
        shown = ', '.join(sorted('/'.join(group)[:80] for group in groups)[:_SHOWN]) or 'nothing'
        raise CheckpointError(
            f"{index}: holds no model's state dict, only {shown}; give the model's folder (Accelerate: "
            f'pytorch_model_fsdp_0)'
        )
    return found


def _places(stored: Mapping[Any, Any]) -> Places:
    places = {}
    for key, info in stored.items():
        place = _attributes(key, 'MetadataIndex')
        offsets = _as_sizes(place.get('offset'))
        if isinstance(place.get('fqn'), str) and offsets is not None:
            places[place['fqn'], offsets] = _attributes(info, '_StorageInfo')
    return places


def _tensor(index: Path, key: str, name: str, tensor: Mapping[str, Any], places: Places, folder: _Folder) -> _Tensor:
    """Describe a tensor from the index alone."""
    shape = _as_sizes(tensor.get('size'))
    properties = getattr(tensor.get('properties'), 'state', None)
    dtype = as_dtype(properties[0]) if isinstance(properties, tuple) and properties else None
    chunks = tensor.get('chunks')
    if shape is None or not isinstance(chunks, list):
        raise CheckpointError(f'{index}: has no shape or chunks of {name}; take another checkpoint')
    if dtype is None:
        raise CheckpointError(f'{index}: {name} has a dtype that safetensors cannot store; leave it out')
    stored = []
    for chunk in chunks:
        box = _attributes(chunk, 'ChunkStorageMetadata')
        offsets, sizes = _as_sizes(box.get('offsets')), _as_sizes(box.get('sizes'))
        if offsets is None or sizes is None:
            raise CheckpointError(f'{index}: a chunk of {name} has invalid offsets or sizes; take another checkpoint')
        if 0 not in sizes:  # empty on ranks without a part of the tensor
            stored.append(_Stored(offsets, sizes, *folder.place(name, places.get((key, offsets), {}))))
    return _Tensor(name, shape, dtype, tuple(stored))


class _Stored(NamedTuple):
    """A chunk, stored as a ``torch.save`` archive within a larger file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    window: tuple[int, int]


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: tuple[_Stored, ...]


def _joined(index: Path, tensor: _Tensor) -> StoredTensor:
    chunks = []
    for stored in tensor.stored:
        piece = _contiguous_piece(load_torch_file(stored.file, stored.window), stored.sizes, tensor.dtype)
        if piece is None:
            raise CheckpointError(
                f'{stored.file}: the bytes at {stored.window[0]} are not the chunk of {tensor.name} that .metadata '
                f'describes; put the files of one save together'
            )
        chunks.append(_Chunk(stored.offsets, stored.sizes, piece))
    return _join(str(index), tensor.name, tensor.shape, tensor.dtype, chunks)


class _Folder:
    """The ``.distcp`` files and the byte ranges of chunks in them."""

    def __init__(self, found: FoundCheckpoint, index: Path) -> None:
        self._index = index
        self._files = {file.name: file for file in found.model_files}
        self._windows: dict[str, list[tuple[int, int]]] = {}

    def place(self, name: str, info: Mapping[str, Any]) -> tuple[Path, tuple[int, int]]:
        window = _as_sizes((info.get('offset'), info.get('length')))
        file = info.get('relative_path')
        if window is None or not isinstance(file, str):
            raise CheckpointError(f'{self._index}: has no file and offset of a chunk of {name}; save it again')
        if info.get('transform_descriptors'):
            raise CheckpointError(
                f'{self._index}: {name} was saved with storage extensions (such as compression), which are not '
                f'supported; load it with torch.distributed.checkpoint and save it without them'
            )
        if file not in self._files:
            raise CheckpointError(
                f'{self._index}: {name} is stored in {file[:80]!r}, which is not in the folder; copy it'
            )
        self._windows.setdefault(file, []).append((window[0], sum(window)))
        return self._files[file], (window[0], window[1])

    def require_apart(self) -> None:
        """Refuse overlapping chunks: an index could name one archive many times, and it would be opened each time."""
        for file, windows in self._windows.items():
            windows.sort()
            for (_, end), (start, _) in pairwise(windows):
                if start < end:
                    raise CheckpointError(f'{self._index}: chunks overlap in {file} at byte {start}; save it again')


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor, and the place of its elements in a file.

    Attributes:
        offsets, sizes: In elements, by dimension of the full tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    piece: Piece


def _join(where: str, name: str, shape: tuple[int, ...], dtype: str, chunks: Iterable[_Chunk]) -> StoredTensor:
    """Join chunks of consecutive elements, such as rows, into the full tensor.

    Replicas of a chunk, saved by several groups of ranks, count once.

    Args:
        where: File or folder, for messages.

    Raises:
        CheckpointError: Chunks are not consecutive elements, overlap, or leave gaps.
    """
    by_start: dict[int, _Chunk] = {}
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


def _start(where: str, name: str, shape: tuple[int, ...], chunk: _Chunk) -> int:
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


def _contiguous_piece(tensor: Any, sizes: tuple[int, ...], dtype: str) -> Piece | None:
    """All elements of a tensor in a file; None unless it is contiguous with these sizes and this dtype."""
    if not isinstance(tensor, LazyTensor) or (tensor.shape, tensor.dtype) != (sizes, dtype):
        return None
    if not tensor.numel or not tensor.is_contiguous:
        return None
    return tensor.piece()


def _attributes(value: Any, class_name: str) -> dict[str, Any]:
    """The attributes of a pickled object of the given class; {} for other values."""
    if not isinstance(value, Inert):
        return {}
    state = value.state
    if isinstance(state, tuple) and len(state) == 2 and state[0] is None:  # a class with __slots__
        state = state[1]
    return state if value.made_by.name == class_name and isinstance(state, dict) else {}


def _as_sizes(value: Any) -> tuple[int, ...] | None:
    """A shape or offsets as ``torch.Size``, tuple or list; None for other values."""
    if not isinstance(value, (tuple, list)) or len(value) > _MOST_DIMS:
        return None
    return tuple(value) if all(map(is_count, value)) else None
