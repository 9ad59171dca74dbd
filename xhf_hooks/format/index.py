"""What the files of weights are called, their index, and the name of this package's manifest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from xhf_hooks.errors import DamagedError
from xhf_hooks.format import strict_json

MANIFEST_NAME = 'xhf_manifest.json'
WEIGHTS_SUFFIX = '.safetensors'
INDEX_SUFFIX = f'{WEIGHTS_SUFFIX}.index.json'
#: All weights of a model, and of an adapter, in one file.
WEIGHTS_NAME = f'model{WEIGHTS_SUFFIX}'
ADAPTER_WEIGHTS_NAME = f'adapter_model{WEIGHTS_SUFFIX}'
#: Weights of a model or an adapter, as transformers and peft name them, in a file or in parts.
HF_WEIGHTS = re.compile(r'(adapter_model|model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)')
#: One of several files, as ``save_pretrained`` names them.
SHARD_NAME = re.compile(rf'.+-\d{{5}}-of-\d{{5}}{re.escape(WEIGHTS_SUFFIX)}', re.ASCII)


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The name of each tensor's file, and the metadata.

    Raises:
        DamagedError: It is malformed.
    """
    content = strict_json.read(path)
    weight_map: Any = content.get('weight_map')
    metadata: Any = content.get('metadata', {})
    is_valid = isinstance(weight_map, dict) and isinstance(metadata, dict)
    if not is_valid or not all(isinstance(file, str) for file in weight_map.values()):
        raise DamagedError(f'{path}: expected a weight_map of file names, and metadata')
    return weight_map, metadata


def weight_files(folder: Path, name: str = WEIGHTS_NAME) -> list[Path]:
    """The files of a model's weights; none if it has none. Like transformers, prefers a whole one to an index.

    Args:
        name: The file's name where all weights are in one.

    Raises:
        DamagedError: The index is malformed.
    """
    whole, index = folder / name, folder / f'{name}.index.json'
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return []
    weight_map, _ = read_index(index)
    return sorted({folder / Path(name).name for name in weight_map.values()})
