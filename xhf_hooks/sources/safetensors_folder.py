"""The weights of a Hugging Face folder as a source: the base model of a run whose checkpoint lacks frozen weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.format.dtypes import TORCH_DTYPES, is_float
from xhf_hooks.format.safetensors import read_header
from xhf_hooks.planning.types import TensorSpec
from xhf_hooks.sources.stored_source import Piece, StoredSource, StoredTensor

_WHOLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'


class SafetensorsSource(StoredSource):
    """``model.safetensors``, or the files that its index names.

    Args:
        dtype: The dtype to which training cast the floats (DeepSpeed casts the whole model); None if it did not.

    Raises:
        CheckpointError: The files are missing or damaged.
    """

    def __init__(self, folder: Path, dtype: str | None) -> None:
        super().__init__()
        for file in _files(folder):
            for tensor in _tensors(file, dtype):
                self._tensors[tensor.name] = tensor

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(tensor.name, tensor.shape, tensor.dtype) for tensor in self._tensors.values()]


def holds_weights(folder: Path) -> bool:
    """Whether the folder has safetensors files of a model, judging by their names."""
    return (folder / _INDEX).is_file() or (folder / _WHOLE).is_file()


def _tensors(file: Path, dtype: str | None) -> list[StoredTensor]:
    try:
        entries = read_header(file).entries
    except DamagedError as error:
        raise CheckpointError(f'{error}; copy the base model again') from None
    unknown = next((entry for entry in entries if entry.dtype not in TORCH_DTYPES), None)
    if unknown is not None:
        raise CheckpointError(f'{file}: {unknown.name} has dtype {unknown.dtype}, which conversions do not support')
    return [
        StoredTensor(
            entry.name,
            entry.shape,
            dtype if dtype is not None and is_float(entry.dtype) else entry.dtype,
            (Piece(file, entry.start, entry.dtype, math.prod(entry.shape)),),
        )
        for entry in entries
    ]


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding='utf-8'))['weight_map'].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f'{index}: cannot be read ({error}); copy the base model again') from None
        files = [folder / Path(name).name for name in names]
    else:
        files = [folder / _WHOLE]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f'{folder / missing[0]}: missing, but weights that were not trained are read from it; copy it, too'
        )
    return files
