"""Writes all files of a Hugging Face folder except the weights. Never edits objects of the live model."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.tokenizer import base_file, load_tokenizer, write_tokenizer
from xhf_hooks.exporters.transformers_4_fields import add_transformers_4_fields
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.model import model_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PROCESSOR_FILES = ('processor_config.json', 'preprocessor_config.json', 'video_preprocessor_config.json')


def exported_config(
    model: PreTrainedModel, dtype: str | None, embedding_rows: int | None, base_dir: str
) -> PretrainedConfig:
    """A copy of the model's config that describes the written model.

    Training often sets ``use_cache`` to False; the copy has the base model's value.

    Args:
        dtype: Safetensors dtype that floats are cast to; None: the training dtype.
        embedding_rows: The copy's ``vocab_size``; None keeps the model's.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [model_class(model).__name__]
    dtype_option = 'dtype' if hasattr(config, 'dtype') else 'torch_dtype'  # renamed in transformers 4.56
    written = model.dtype if dtype is None else TORCH_DTYPES[dtype]
    setattr(config, dtype_option, str(written).removeprefix('torch.'))
    parts = [part for part in vars(config).values() if hasattr(part, 'model_type')]  # configs of submodels
    if dtype is not None:
        for part in parts:
            if getattr(part, dtype_option, None) is not None:
                setattr(part, dtype_option, getattr(config, dtype_option))
    text = config.get_text_config()
    if embedding_rows is not None and getattr(text, 'vocab_size', embedding_rows) != embedding_rows:
        text.vocab_size = embedding_rows
    if getattr(text, 'use_cache', None) is False:
        text.use_cache = _base_use_cache(text, base_dir)
    return config


def _base_use_cache(config: PretrainedConfig, base_dir: str) -> bool:
    default = getattr(type(config)(), 'use_cache', True)
    if not base_dir:
        return default
    try:
        base, _ = type(config).get_config_dict(base_dir, local_files_only=True)
    except (OSError, ValueError):
        return default
    return base.get('use_cache', base.get('text_config', {}).get('use_cache', default))


def write(
    folder: Path,
    model: PreTrainedModel,
    config: PretrainedConfig,
    tokenizer: Any | None,
    eos_token_ids: Sequence[int],
    base_dir: str,
) -> list[str]:
    """Write the files. Runs on: rank 0.

    Returns:
        Warnings for the log.
    """
    from transformers.dynamic_module_utils import custom_object_save

    warnings = []
    if is_remote_code(model):  # the folder does not load without the code
        # transformers 4.48 does not set _auto_class; then the config has the base's auto_map
        custom_object_save(model, str(folder), config=config if model._auto_class is not None else None)
    if getattr(config, '_attn_implementation_autoset', False):
        config._attn_implementation_autoset = False  # transformers 4.48 does the same before it saves
    config.save_pretrained(folder)
    warnings += add_transformers_4_fields(folder, config)
    if model.can_generate() and model.generation_config is not None:
        warnings += _write_generation_config(folder, model, eos_token_ids)
    if tokenizer is not None:
        try:
            warnings += write_tokenizer(folder, tokenizer, base_dir)
        except UnicodeEncodeError as error:  # an unpaired surrogate: valid in JSON, not in UTF-8
            raise ModelError(f'{base_dir}: its tokenizer has text that cannot be encoded ({error.reason})') from None
    replaced = getattr(tokenizer, 'chat_template', None) not in (None, _base_chat_template(base_dir))
    _copy_processor_files(folder, base_dir, with_template=not replaced)
    return warnings


def is_remote_code(model: PreTrainedModel) -> bool:
    """Whether the model's class is custom code of the base model (``trust_remote_code``)."""
    return model._auto_class is not None or model_class(model).__module__.startswith('transformers_modules.')


def _write_generation_config(folder: Path, model: PreTrainedModel, eos_token_ids: Sequence[int]) -> list[str]:
    """Save the generation config; an invalid one is repaired with do_sample=True, or else omitted."""
    # ms-swift trains with settings for its own inference, and saves the original (swift/trainers/mixin.py, _save)
    original = getattr(model, 'origin_generation_config', None)
    generation = copy.deepcopy(model.generation_config if original is None else original)
    if eos_token_ids:
        known = generation.eos_token_id
        known = known if isinstance(known, list) else [] if known is None else [known]
        generation.eos_token_id = list(dict.fromkeys([*known, *eos_token_ids]))
    try:
        generation.save_pretrained(folder)
        return []
    except ValueError as error:
        problem = ' '.join(str(error).split())
    generation.do_sample = True
    try:
        generation.save_pretrained(folder)
    except ValueError:
        return [f'generation_config.json was not written: transformers refuses it: {problem}']
    return [f'generation_config.json: do_sample was set to True, without which transformers refuses it: {problem}']


def _base_chat_template(base_dir: str) -> str | dict[str, str] | None:
    """The chat template in the base model's tokenizer files."""
    if (jinja := base_file(base_dir, 'chat_template.jinja')) is not None:
        return jinja.read_text(encoding='utf-8')
    path = base_file(base_dir, 'tokenizer_config.json')
    try:
        config = {} if path is None else json.loads(path.read_text(encoding='utf-8'))
        template = config.get('chat_template')
        return {one['name']: one['template'] for one in template} if isinstance(template, list) else template
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # untrusted files
        return None


def _copy_processor_files(folder: Path, base_dir: str, *, with_template: bool) -> None:
    names = [name for name in PROCESSOR_FILES if base_file(base_dir, name)]
    if names and with_template:  # if the template was replaced, the processor's would override it
        names.append('chat_template.json')  # a processor's template, transformers < 5
    for name in names:
        path = base_file(base_dir, name)
        if path is not None and not (folder / name).exists():
            shutil.copyfile(path, folder / name)


def require_vocabulary(tokenizer: Any | None, embedding_rows: int | None) -> None:
    """Refuse a tokenizer with more tokens than the model has embeddings. Runs on: rank 0.

    Raises:
        ModelError: The tokenizer has too many tokens.
    """
    if embedding_rows is None or not hasattr(tokenizer, '__len__'):
        return
    if len(tokenizer) > embedding_rows:
        raise ModelError(
            f'the tokenizer has {len(tokenizer)} tokens, but the model has embeddings for {embedding_rows}: set the '
            f"option tokenizer to the model's own, or resize the embeddings (XTuner: give the model its tokenizer)"
        )


def base_dir_of(model: PreTrainedModel) -> str:
    """Folder or hub name that the model was loaded from; '' if unknown."""
    return getattr(model.config, '_name_or_path', '') or ''


def base_tokenizer_of(model: PreTrainedModel) -> Any | None:
    """The base model's tokenizer. Its custom code is trusted if the model's was. Runs on: rank 0."""
    return load_tokenizer(base_dir_of(model), trust_remote_code=is_remote_code(model))
