"""What a trainer left beside a checkpoint: Hugging Face files that say more of the trained model than its base."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import nn

from xhf_hooks.exporters.lora import ADAPTER_FOLDER
from xhf_hooks.format.index import MANIFEST_NAME
from xhf_hooks.meta_model.frozen import frozen_in
from xhf_hooks.sources.stored_tensors import StoredTensor, tensors_of

ADAPTER_CONFIG = 'adapter_config.json'
_ADAPTER_WEIGHTS = 'adapter_model.safetensors'


def folder_beside(checkpoint: Path, *names: str) -> Path | None:
    """The folder that has one of the files: the checkpoint, or one above it.

    Trainer writes them beside its tag folder; scripts with Accelerate, a folder higher. MMEngine's ``.pth`` lie in the
    work_dir itself, and above it there are other runs.
    """
    above = (checkpoint, checkpoint.parent, checkpoint.parent.parent)
    return _first_with(names, above if checkpoint.suffix != '.pth' else above[:2])


def hugging_face_folder(checkpoint: Path) -> Path | None:
    """The folder with Trainer's config.json, in or above the checkpoint; else the newest save of HFCheckpointHook."""
    work_dir = checkpoint.parent
    manifests = [*work_dir.glob(f'*/hf_model*/{MANIFEST_NAME}'), *work_dir.glob(f'hf_model*/{MANIFEST_NAME}')]
    saved = [file.parent for file in sorted(manifests, key=lambda file: file.stat().st_mtime, reverse=True)]
    of_hook = [place for folder in saved for place in (folder / ADAPTER_FOLDER, folder)]  # the adapter was trained
    return _first_with((ADAPTER_CONFIG, 'config.json'), [checkpoint, work_dir, work_dir.parent, *of_hook])


def _first_with(names: Sequence[str], folders: Sequence[Path]) -> Path | None:
    return next((folder for folder in folders if any((folder / name).is_file() for name in names)), None)


def config_of_trainer(checkpoint: Path) -> Path | None:
    """Trainer's ``checkpoint-N``, which has the config.json of the whole trained model; None for other checkpoints."""
    folder = checkpoint.parent
    is_trainers = (folder / 'config.json').is_file() and (folder / 'trainer_state.json').is_file()
    return folder if is_trainers else None


def adapter_beside(checkpoint: Path) -> dict[str, StoredTensor]:
    """The tensors of peft's file that Trainer puts beside its checkpoint; none if there is no such file."""
    folder = folder_beside(checkpoint, _ADAPTER_WEIGHTS)
    return {} if folder is None else {tensor.name: tensor for tensor in tensors_of(folder / _ADAPTER_WEIGHTS)}


def frozen_only(module: nn.Module, beside: Mapping[str, StoredTensor], stored: Collection[str]) -> list[StoredTensor]:
    """Those of the tensors that the checkpoint lacks, such as resized embeddings.

    Frozen ones alone: of every step they are the same, and peft writes them under their own names.
    """
    frozen = frozen_in(module, beside)
    return [tensor for name, tensor in beside.items() if name in frozen and name not in stored]
