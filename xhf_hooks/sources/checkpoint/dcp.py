"""Folders of torch.distributed.checkpoint, as FSDP runs of Accelerate and transformers.Trainer write them.

``.metadata`` is a pickle that says, for each tensor, which chunks it was saved in, and for each chunk, where in which
``.distcp`` file it lies, as a file of ``torch.save`` of its own (torch ``distributed/checkpoint/metadata.py``,
``filesystem.py``, ``default_planner.py``). torch's own reader executes that pickle; here it is read as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xhf_hooks.errors import CheckpointError
from xhf_hooks.sources.checkpoint.assemble import Assembled
from xhf_hooks.sources.checkpoint.chunks import Chunk, as_dtype, as_sizes, attributes, contiguous_piece, join
from xhf_hooks.sources.checkpoint.records import FoundCheckpoint, StoredTensor
from xhf_hooks.sources.checkpoint.torch_file import load_pickle_file, load_torch_file

#: What trainers save a model's state dict under; Accelerate: ``model``.
_MODELS = ('model', 'state_dict', 'module', 'model_state_dict')
_SHOWN = 5

#: Of a name in the checkpoint and the chunk's offsets, what says where it lies.
Places = Mapping[tuple[str, tuple[int, ...]], Any]


def load_dcp(found: FoundCheckpoint) -> Assembled:
    """Every tensor of the model's state dict; the optimizer's and what is no tensor stay behind.

    Raises:
        CheckpointError: The files do not agree, or hold something that cannot be read here.
    """
    index = found.path / '.metadata'
    metadata = attributes(load_pickle_file(index), 'Metadata')
    entries, stored = metadata.get('state_dict_metadata'), metadata.get('storage_data')
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        raise CheckpointError(f'{index}: not an index of torch.distributed.checkpoint; give another folder')
    tensors = {key: attributes(entry, 'TensorStorageMetadata') for key, entry in entries.items()}
    names = _names(index, [key for key, tensor in tensors.items() if tensor], metadata.get('planner_data'))
    places = _places(stored)
    files = {file.name: file for file in found.model_files}
    return Assembled(tuple(_tensor(index, key, name, tensors[key], places, files) for key, name in names.items()))


def _names(index: Path, keys: list[Any], paths: Any) -> dict[str, str]:
    """What the model called each of its tensors, by its name in the checkpoint.

    ``planner_data`` says where each was in the nested dict that was saved: ``('model', 'lm_head.weight')``.
    """
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for key in keys:
        path = paths.get(key) if isinstance(paths, dict) else None
        if not isinstance(path, tuple) or not path:
            path = (key,)
        if not isinstance(key, str) or not isinstance(path[-1], str):
            continue  # an item of a list is no tensor of a state dict
        groups.setdefault(tuple(map(str, path[:-1])), {})[key] = path[-1]
    models = [group for group in groups if group and group[-1] in _MODELS]
    if len(models) > 1:
        shown = ', '.join('/'.join(model)[:80] for model in models[:_SHOWN])
        raise CheckpointError(f'{index}: holds {len(models)} models ({shown}), one is expected; save them one by one')
    found = groups.get(models[0] if models else (), {})
    if not found:
        shown = ', '.join(sorted('/'.join(group)[:80] for group in groups)[:_SHOWN]) or 'nothing'
        raise CheckpointError(
            f"{index}: holds no state dict of a model, but {shown}; give the model's folder (Accelerate: "
            f'pytorch_model_fsdp_0)'
        )
    return found


def _places(stored: Mapping[Any, Any]) -> Places:
    places = {}
    for key, info in stored.items():
        place = attributes(key, 'MetadataIndex')
        offsets = as_sizes(place.get('offset'))
        if isinstance(place.get('fqn'), str) and offsets is not None:
            places[place['fqn'], offsets] = attributes(info, '_StorageInfo')
    return places


def _tensor(
    index: Path, key: str, name: str, tensor: Mapping[str, Any], places: Places, files: Mapping[str, Path]
) -> StoredTensor:
    shape = as_sizes(tensor.get('size'))
    properties = getattr(tensor.get('properties'), 'state', None)
    dtype = as_dtype(properties[0]) if isinstance(properties, tuple) and properties else None
    chunks = tensor.get('chunks')
    if shape is None or not isinstance(chunks, list):
        raise CheckpointError(f'{index}: does not say what {name} consists of; take another checkpoint')
    if dtype is None:
        raise CheckpointError(f'{index}: {name} is of an element type that safetensors cannot store; leave it out')
    return join(str(index), name, shape, dtype, [
        chunk for each in chunks if (chunk := _chunk(index, key, each, dtype, places, files)) is not None
    ])  # fmt: skip


def _chunk(
    index: Path, key: str, described: Any, dtype: str, places: Places, files: Mapping[str, Path]
) -> Chunk | None:
    """None for one without elements, which ranks without a part of the tensor may have."""
    box = attributes(described, 'ChunkStorageMetadata')
    offsets, sizes = as_sizes(box.get('offsets')), as_sizes(box.get('sizes'))
    if offsets is None or sizes is None:
        raise CheckpointError(f'{index}: a chunk of {key} has no proper place; take another checkpoint')
    if 0 in sizes:
        return None
    place = places.get((key, offsets), {})
    window = as_sizes((place.get('offset'), place.get('length')))
    name = place.get('relative_path')
    if window is None or not isinstance(name, str):
        raise CheckpointError(f'{index}: does not say where the chunk of {key} at {offsets} lies; save it again')
    if place.get('transform_descriptors'):
        raise CheckpointError(
            f"{index}: {key} was saved through extensions ({str(place['transform_descriptors'])[:80]!r}); torch's own "
            f'load reads it, in a run with these extensions'
        )
    if name not in files:
        raise CheckpointError(f'{index}: {key} lies in {name[:80]!r}, which is not in the folder; copy it, too')
    piece = contiguous_piece(load_torch_file(files[name], window), sizes, dtype)
    if piece is None:
        raise CheckpointError(
            f'{files[name]}: what lies at byte {window[0]} is not the chunk of {key} that .metadata describes; put the '
            f'files of one save together'
        )
    return Chunk(offsets, sizes, piece)
