"""The weights of a base model, which lends a run its frozen ones: of safetensors files, or of ``.bin`` files."""

from __future__ import annotations

from pathlib import Path

from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.format.index import read_index, weight_files
from xhf_hooks.offline.checkpoint.regions import assemble
from xhf_hooks.offline.checkpoint.states import ModelState, tensors_in_files
from xhf_hooks.sources.stored_tensors import StoredTensor, tensors_of

_BIN = 'pytorch_model.bin'


def base_weights(folder: Path) -> dict[str, StoredTensor]:
    """The weights of a Hugging Face folder by each of their names; empty if it has none.

    Raises:
        CheckpointError: Files are missing or damaged.
    """
    try:
        files = weight_files(folder)
        if files:
            return {tensor.name: tensor for file in files for tensor in tensors_of(file)}
        tensors = assemble(ModelState(folder, {}, tensors_in_files(_bin_files(folder))), {}, {})
    except DamagedError as error:
        raise CheckpointError(f'base model {folder}: {error}; copy it again') from None
    return {name: tensor for tensor in tensors for name in (tensor.name, *tensor.aliases)}


def _bin_files(folder: Path) -> list[Path]:
    """The files of ``save_pretrained(..., safe_serialization=False)``."""
    whole, index = folder / _BIN, folder / f'{_BIN}.index.json'
    if whole.is_file() or not index.is_file():
        return [whole] if whole.is_file() else []
    weight_map, _ = read_index(index)
    return sorted({folder / Path(name).name for name in weight_map.values()})
