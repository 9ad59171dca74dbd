"""The index of weights in several files, ``model.safetensors.index.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json

INDEX_SUFFIX = '.safetensors.index.json'


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The name of each tensor's file, and the metadata.

    Raises:
        DamagedError: It is malformed.
    """
    content = strict_json.read(path)
    weight_map, metadata = content.get('weight_map'), content.get('metadata', {})
    is_map = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not is_map or not isinstance(metadata, dict):
        raise DamagedError(f'{path}: expected a weight_map of file names, and metadata')
    return weight_map, metadata


def weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights; none if it has none. Like transformers, prefers a whole one to an index.

    Raises:
        DamagedError: The index is malformed.
    """
    whole, index = folder / 'model.safetensors', folder / f'model{INDEX_SUFFIX}'
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    weight_map, _ = read_index(index)
    return sorted({folder / Path(name).name for name in weight_map.values()})
