"""The split of a model into weight files, by the installed huggingface_hub or, before 0.21, as transformers did."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import huggingface_hub

Item = TypeVar('Item')


@dataclass(frozen=True)
class Split:
    """Which tensors each weight file holds: the fields of huggingface_hub's StateDictSplit that are used here.

    Attributes:
        filename_to_tensors: Names of tensors by name of the file, in the order in which they are saved.
        metadata: ``total_size`` in bytes, for the index.
    """

    filename_to_tensors: dict[str, list[str]]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def is_sharded(self) -> bool:
        return len(self.filename_to_tensors) > 1

    @property
    def tensor_to_filename(self) -> dict[str, str]:
        return {name: file for file, names in self.filename_to_tensors.items() for name in names}


def split_state_dict(
    items: Mapping[str, Item],
    get_storage_size: Callable[[Item], int],
    filename_pattern: str,
    max_shard_size: int,
) -> Any:
    """Split tensors into weight files as ``save_pretrained`` does. Runs on: all ranks, with the same result.

    Args:
        items: A stand-in for each tensor, by its name, in the order of saving.
        get_storage_size: Returns the bytes of a tensor, which shares its storage with no other one.
        filename_pattern: Name of a file, with ``{suffix}`` for its number.
        max_shard_size: Most bytes of a file, unless one tensor alone is larger.

    Returns:
        huggingface_hub's StateDictSplit, or a :class:`Split`.
    """
    factory = getattr(huggingface_hub, 'split_state_dict_into_shards_factory', None)  # since huggingface_hub 0.21
    if factory is not None:
        named_nbytes = 'get_storage_size'
        if named_nbytes not in inspect.signature(factory).parameters:
            named_nbytes = 'get_tensor_size'  # until huggingface_hub 0.23
        return factory(
            items,
            **{named_nbytes: get_storage_size},
            get_storage_id=lambda item: None,
            filename_pattern=filename_pattern,
            max_shard_size=max_shard_size,
        )
    files = _fill_files({name: get_storage_size(item) for name, item in items.items()}, max_shard_size)
    suffixes = [f'-{number:05d}-of-{len(files):05d}' for number in range(1, len(files) + 1)] if len(files) > 1 else ['']
    total_nbytes = sum(get_storage_size(item) for item in items.values())
    named = {filename_pattern.format(suffix=suffix): names for suffix, names in zip(suffixes, files, strict=True)}
    return Split(named, {'total_size': total_nbytes})


def _fill_files(nbytes_of: Mapping[str, int], most_nbytes: int) -> list[list[str]]:
    """Fill one file after another, as ``shard_checkpoint`` did (transformers 4.36, ``modeling_utils.py``).

    The versions of transformers that this huggingface_hub fits give no two tensors one storage.
    """
    files: list[list[str]] = [[]]
    filled_nbytes = 0
    for name, nbytes in nbytes_of.items():
        if files[-1] and filled_nbytes + nbytes > most_nbytes:
            files.append([])
            filled_nbytes = 0
        files[-1].append(name)
        filled_nbytes += nbytes
    return files
