"""The split of a model into weight files, by the installed huggingface_hub or, before 0.21, as transformers did."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import huggingface_hub


def split_into_files(nbytes_of: Mapping[str, int], filename_pattern: str, most_nbytes: int) -> dict[str, list[str]]:
    """Split tensors into weight files as ``save_pretrained`` does. Runs on: all ranks, with the same result.

    Args:
        nbytes_of: Size of each tensor, which shares its storage with no other one, by its name in the order of saving.
        filename_pattern: Name of a file, with ``{suffix}`` for its number.
        most_nbytes: Most bytes of a file, unless one tensor alone is larger.

    Returns:
        Names of tensors by name of the file, in the order in which they are saved.
    """
    factory = getattr(huggingface_hub, 'split_state_dict_into_shards_factory', None)  # since huggingface_hub 0.21
    if factory is not None:
        get_nbytes = 'get_storage_size'
        if get_nbytes not in inspect.signature(factory).parameters:
            get_nbytes = 'get_tensor_size'  # until huggingface_hub 0.23
        split = factory(
            nbytes_of,
            **{get_nbytes: lambda nbytes: nbytes},
            get_storage_id=lambda nbytes: None,
            filename_pattern=filename_pattern,
            max_shard_size=most_nbytes,
        )
        return dict(split.filename_to_tensors)
    files = _fill_files(nbytes_of, most_nbytes)
    suffixes = [f'-{number:05d}-of-{len(files):05d}' for number in range(1, len(files) + 1)] if len(files) > 1 else ['']
    return {filename_pattern.format(suffix=suffix): names for suffix, names in zip(suffixes, files, strict=True)}


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
