"""Hugging Face files that a trainer left beside a checkpoint, and that describe the model better than its base."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import nn

from xhf_hooks.exporters.lora import ADAPTER_FOLDER
from xhf_hooks.format.index import ADAPTER_WEIGHTS_NAME, MANIFEST_NAME
from xhf_hooks.format.loaded_files import ADAPTER_CONFIG, CONFIG
from xhf_hooks.offline.checkpoint.find import FoundCheckpoint
from xhf_hooks.offline.model.freeze_modules import frozen_in
from xhf_hooks.sources.stored_tensors import StoredTensor, tensors_of


def folder_of_trainer_files(found: FoundCheckpoint, *names: str) -> Path | None:
    """The nearest folder of the run that has one of the files."""
    return _first_with(names, found.run_folders)


def adapter_folder(found: FoundCheckpoint) -> Path | None:
    """The folder with the adapter_config.json of the run: beside the checkpoint, or in the newest save of the hook."""
    return _first_with(
        [ADAPTER_CONFIG], [*found.run_folders, *(each / ADAPTER_FOLDER for each in _saves_of_hook(found))]
    )


def config_folder(found: FoundCheckpoint) -> Path | None:
    """The folder with the whole model's config.json: beside the checkpoint, or the newest save of the hook."""
    return _first_with([CONFIG], [*found.run_folders, *_saves_of_hook(found)])


def is_save_of_hook(folder: Path) -> bool:
    """Whether this package wrote the folder, in which adapters may be merged into the weights of the base."""
    return (folder / MANIFEST_NAME).is_file()


def _saves_of_hook(found: FoundCheckpoint) -> list[Path]:
    """The folders that HFCheckpointHook or the callback wrote in this run, the newest first."""
    patterns = (f'*/hf_model*/{MANIFEST_NAME}', f'hf_model*/{MANIFEST_NAME}')
    manifests = {file for folder in found.run_folders for pattern in patterns for file in folder.glob(pattern)}
    return [file.parent for file in sorted(manifests, key=lambda file: file.stat().st_mtime, reverse=True)]


def _first_with(names: Sequence[str], folders: Sequence[Path]) -> Path | None:
    return next((folder for folder in folders if any((folder / name).is_file() for name in names)), None)


def adapter_of_trainer(found: FoundCheckpoint) -> dict[str, StoredTensor]:
    """The tensors of peft's file that Trainer puts beside its checkpoint; none if there is no such file."""
    folder = folder_of_trainer_files(found, ADAPTER_WEIGHTS_NAME)
    return {} if folder is None else {tensor.name: tensor for tensor in tensors_of(folder / ADAPTER_WEIGHTS_NAME)}


def frozen_only(
    module: nn.Module, trainer_files: Mapping[str, StoredTensor], stored: Collection[str]
) -> list[StoredTensor]:
    """The frozen tensors in a trainer's files that the checkpoint lacks, such as resized embeddings.

    Frozen ones alone: of every step they are the same, and peft writes them under their own names.
    """
    frozen = frozen_in(module, trainer_files)
    return [tensor for name, tensor in trainer_files.items() if name in frozen and name not in stored]
