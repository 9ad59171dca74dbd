"""The weights in a Hugging Face folder, such as a base model: of safetensors files, or of ``.bin`` files."""

from __future__ import annotations

from pathlib import Path

from xhf_hooks.errors import CheckpointError, DamagedError
from xhf_hooks.format.index import weight_files
from xhf_hooks.offline.checkpoint.regions import assemble
from xhf_hooks.offline.checkpoint.states import ModelState, tensors_in_files
from xhf_hooks.sources.stored_tensors import StoredTensor, tensors_of


def weights_of_folder(folder: Path) -> dict[str, StoredTensor]:
    """The weights of a Hugging Face folder by each of their names; empty if it has none.

    Raises:
        CheckpointError: Files are missing or damaged.
    """
    try:
        files = weight_files(folder)
        if files:
            return {tensor.name: tensor for file in files for tensor in tensors_of(file)}
        tensors_in_bins = tensors_in_files(weight_files(folder, 'pytorch_model.bin'))
        tensors = assemble(ModelState(folder, {}, tensors_in_bins), {}, {})
    except DamagedError as error:
        raise CheckpointError(f'base model {folder}: {error}; copy it again') from None
    return {name: tensor for tensor in tensors for name in (tensor.name, *tensor.aliases)}
