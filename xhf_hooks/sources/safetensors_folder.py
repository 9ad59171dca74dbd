"""The weights of a Hugging Face folder, mapped: a base model that lends a run its frozen weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.format.dtypes import TORCH_DTYPES, is_float
from xhf_hooks.format.safetensors import Header, read_header
from xhf_hooks.sources.mapped_files import MappedFile
from xhf_hooks.sources.stored_source import StoredSource, StoredTensor

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
        try:
            headers = [read_header(file) for file in _files(folder)]
        except DamagedError as error:
            raise CheckpointError(f'{error}; copy the base model again') from None
        super().__init__(tensor for header in headers for tensor in tensors_of(header, dtype))


def holds_weights(folder: Path) -> bool:
    """Whether the folder has safetensors files of a model, judging by their names."""
    return (folder / _INDEX).is_file() or (folder / _WHOLE).is_file()


def tensors_of(header: Header, dtype: str | None = None) -> Iterator[StoredTensor]:
    """The tensors of a file.

    Args:
        dtype: The dtype in which floats are read; None: as they are.

    Raises:
        CheckpointError: torch has no dtype for one of them.
    """
    file = MappedFile(header.path)
    for entry in header.entries:
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(f'{header.path}: {entry.name} has dtype {entry.dtype}, which torch cannot read')
        values = file.tensor(entry.start, entry.shape, TORCH_DTYPES[entry.dtype])
        read_as = dtype if dtype is not None and is_float(entry.dtype) else entry.dtype
        yield StoredTensor(entry.name, entry.shape, read_as, (values,))


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
