"""Which files of a folder make the models in it: what ``from_pretrained`` of transformers and peft reads."""

from __future__ import annotations

from pathlib import Path

from xhf_hooks.exporters.lora import ADAPTER_FOLDER
from xhf_hooks.exporters.other_modules import OTHER_MODULES
from xhf_hooks.files.manifest import Manifest, read_undamaged_manifest
from xhf_hooks.format.index import ADAPTER_WEIGHTS_NAME, MANIFEST_NAME, WEIGHTS_SUFFIX, weight_files
from xhf_hooks.format.loaded_files import is_loaded_text

#: Folders of a model's parts, as exporters with several parts name them.
_WHOLE_PARTS = ('llm', 'visual_encoder', 'projector')
_ADAPTERS = ('llm_adapter', 'visual_encoder_adapter')
_PARTS = (*_WHOLE_PARTS, *_ADAPTERS, OTHER_MODULES, ADAPTER_FOLDER, *(f'{ADAPTER_FOLDER}/{name}' for name in _ADAPTERS))


def parts_of(folder: Path, manifest: Manifest | None) -> list[str]:
    """The folders that belong to a model, as relative paths: '' and those of its parts.

    With a manifest, they are those of the files that were saved together. Any other folder below, such as a checkpoint
    or another model, is no part of it.
    """
    if manifest is not None:
        saved = {name.rpartition('/')[0] for name in manifest.files if name.endswith(WEIGHTS_SUFFIX)}
        return ['', *sorted(saved - {''})]
    inside = [part for part in _PARTS if (folder / part).is_dir() and not (folder / part / MANIFEST_NAME).exists()]
    return ['', *inside]


def model_files(folder: Path, manifest: Manifest | None) -> dict[str, list[str]]:
    """The weight files that loaders read, by the folder of the part; paths are relative.

    Parts without any are left out.

    Raises:
        DamagedError: An index is malformed.
    """
    found = {}
    for part in parts_of(folder, manifest):
        place = folder / part
        files = [file.name for file in weight_files(place) if file.is_file()]
        files += [ADAPTER_WEIGHTS_NAME] if (place / ADAPTER_WEIGHTS_NAME).is_file() else []
        if files:
            found[part] = [f'{part}/{name}' if part else name for name in files]
    return found


def loaded_texts(folder: Path) -> dict[str, Path]:
    """Files besides weights that loaders read, by relative path: config, tokenizer, adapter settings, code."""
    found = {}
    for part in parts_of(folder, read_undamaged_manifest(folder)):
        for file in sorted((folder / part).iterdir()):
            if is_loaded_text(file.name) and file.is_file():
                found[f'{part}/{file.name}' if part else file.name] = file
    return found


def shown_lora(files: dict[str, list[str]]) -> str:
    """The value of the option ``lora`` with which a folder was written, of a run that had an adapter."""
    if any(part.partition('/')[0] == ADAPTER_FOLDER for part in files):
        return 'both'
    has_adapter = any(name.endswith(ADAPTER_WEIGHTS_NAME) for names in files.values() for name in names)
    return 'adapter' if has_adapter else 'merge'
