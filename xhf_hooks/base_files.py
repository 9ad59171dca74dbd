"""The base model: its files, in its folder or in the local hub cache, and whether its code is custom. Never online."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.format import strict_json
from xhf_hooks.model import model_class

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

TOKENIZER_FILES = ('tokenizer_config.json', 'tokenizer.json', 'tokenizer.model', 'vocab.json', 'vocab.txt')
#: Files of a processor that are not its tokenizer's. transformers 5 saves them as one, which 4.48 cannot read.
PROCESSOR_FILES = ('processor_config.json', 'preprocessor_config.json', 'video_preprocessor_config.json')


def base_dir_of(model: PreTrainedModel) -> str:
    """Folder or hub name that the model was loaded from; '' if unknown."""
    return getattr(model.config, '_name_or_path', '') or ''


def base_dirs_of(model: nn.Module) -> list[str]:
    """Folders or hub names that the model and its parts were loaded from."""
    configs = [getattr(module, 'config', None) for module in model.modules()]
    names = {getattr(config, '_name_or_path', None) for config in configs}
    return sorted(name for name in names if isinstance(name, str) and name)


def is_remote_code(model: PreTrainedModel) -> bool:
    """Whether the model's class is custom code of the base model (``trust_remote_code``)."""
    return model._auto_class is not None or model_class(model).__module__.startswith('transformers_modules.')


def base_folder(base_dir: str) -> Path | None:
    """The folder of a base model, given as a folder or as its name in the local hub cache; None if there is none."""
    if not base_dir:
        return None
    if Path(base_dir).is_dir():
        return Path(base_dir)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    for name in ('config.json', 'adapter_config.json', *TOKENIZER_FILES, *PROCESSOR_FILES):
        try:
            cached = try_to_load_from_cache(base_dir, name)
        except HFValidationError:  # not a valid hub name
            return None
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def base_file(base_dir: str, name: str) -> Path | None:
    """A file of the base model; None if it has none of this name."""
    folder = base_folder(base_dir)
    return folder / name if folder is not None and (folder / name).is_file() else None


def base_json(base_dir: str, name: str) -> dict[str, Any]:
    """The content of a JSON file of the base model; {} if it has none of this name."""
    path = base_file(base_dir, name)
    return {} if path is None else strict_json.read(path)


def load_tokenizer(base_dir: str, *, trust_remote_code: bool, **options: Any) -> Any | None:
    """The base model's tokenizer, by ``from_pretrained``; None if it has none. Runs on: rank 0."""
    if not any(base_file(base_dir, name) for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    options = {**options, 'trust_remote_code': trust_remote_code, 'local_files_only': True}
    return AutoTokenizer.from_pretrained(base_dir, **options)
