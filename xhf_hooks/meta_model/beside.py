"""What a trainer left beside a checkpoint: Hugging Face files that say more of the trained model than its base."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from xhf_hooks.errors import BaseModelError
from xhf_hooks.exporters.base_files import PROCESSOR_FILES, load_tokenizer
from xhf_hooks.meta_model.transformers_model import refused_as
from xhf_hooks.model import module_tensors
from xhf_hooks.sources.stored_tensors import StoredTensor, tensors_of
from xhf_hooks.system.library_settings import quiet

#: Which tokenizers of every kind save.
_TOKENIZER = 'tokenizer_config.json'
_ADAPTER_WEIGHTS = 'adapter_model.safetensors'


def folder_beside(checkpoint: Path, names: Sequence[str]) -> Path | None:
    """The folder that has one of the files: the checkpoint, or one above it.

    Trainer writes them beside its tag folder; scripts with Accelerate, a folder higher. MMEngine's ``.pth`` lie in the
    work_dir itself, and above it there are other runs.
    """
    above = (checkpoint, checkpoint.parent, checkpoint.parent.parent)
    folders = above if checkpoint.suffix != '.pth' else above[:2]
    return next((folder for folder in folders if any((folder / name).is_file() for name in names)), None)


def config_of_trainer(checkpoint: Path) -> Path | None:
    """Trainer's ``checkpoint-N``, which has the config.json of the whole trained model; None for other checkpoints."""
    folder = checkpoint.parent
    is_trainers = (folder / 'config.json').is_file() and (folder / 'trainer_state.json').is_file()
    return folder if is_trainers else None


def tokenizer_beside(checkpoint: Path, *, trust_remote_code: bool) -> tuple[Any | None, list[str]]:
    """The tokenizer or processor beside the checkpoint, None if there is none; and notes for the log.

    Raises:
        BaseModelError: The tokenizer cannot be loaded.
    """
    folder = folder_beside(checkpoint, (_TOKENIZER, *PROCESSOR_FILES))
    if folder is None:
        return None, []
    notes = []
    with quiet(), refused_as(BaseModelError, f'{folder}: its tokenizer cannot be loaded'):
        if any((folder / name).is_file() for name in PROCESSOR_FILES):
            from transformers import AutoProcessor

            options = {'local_files_only': True, 'trust_remote_code': trust_remote_code}
            try:
                return AutoProcessor.from_pretrained(folder, **options), []
            except Exception as error:  # of a package that is missing here, for example
                told = f'{type(error).__name__}: {" ".join(str(error).split())}'[:200]
                notes = [f"{folder}: its processor cannot be loaded here, so OUT gets the base's, if any ({told})"]
        return load_tokenizer(str(folder), trust_remote_code=trust_remote_code), notes


def take_generation_config(model: nn.Module, checkpoint: Path) -> None:
    """Give the model the generation config beside the checkpoint, if there is one."""
    folder = folder_beside(checkpoint, ('generation_config.json',))
    if folder is None or not (hasattr(model, 'can_generate') and model.can_generate()):
        return
    from transformers import GenerationConfig

    with refused_as(BaseModelError, f'{folder}: its generation_config.json cannot be loaded'):
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def adapter_beside(checkpoint: Path) -> dict[str, StoredTensor]:
    """The tensors of peft's file that Trainer puts beside its checkpoint; none if there is no such file."""
    folder = folder_beside(checkpoint, (_ADAPTER_WEIGHTS,))
    return {} if folder is None else {tensor.name: tensor for tensor in tensors_of(folder / _ADAPTER_WEIGHTS)}


def frozen_only(module: nn.Module, beside: Mapping[str, StoredTensor], stored: Collection[str]) -> list[StoredTensor]:
    """Those of the tensors that the checkpoint lacks, such as resized embeddings.

    Frozen ones alone: of every step they are the same, and peft writes them under their own names.
    """
    frozen = {name for name, tensor in module_tensors(module) if not tensor.requires_grad}
    return [tensor for name, tensor in beside.items() if name in frozen and name not in stored]
