"""Writes all files of a Hugging Face folder except the weights. Never edits objects of the live model."""

from __future__ import annotations

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.base_files import PROCESSOR_FILES, base_file, base_json, is_remote_code
from xhf_hooks.compat.older_rope import add_older_rope
from xhf_hooks.compat.tokenizer_files import write_tokenizer
from xhf_hooks.compat.transformers import dtype_field, move_generation_fields, text_config
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.base import Exporter
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.model import model_class
from xhf_hooks.system.library_settings import quiet

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

#: Embeddings are padded to a multiple of this, or of a multiple of it.
_ROWS_MULTIPLE = 8
#: Fields that count layers for multi-token prediction, such as num_nextn_predict_layers (DeepSeek, GLM, MiMo) and
#: mtp_num_hidden_layers (Qwen3.5), and their tensors. Some have the names of another layer of the model.
_MTP_FIELD = re.compile(r'^num_(nextn|mtp).*layers|^mtp_num.*layers')
_MTP_TENSOR = re.compile(r'(^|[._])(mtp|nextn)[._]')


def exported_config(
    model: PreTrainedModel, dtype: str | None, base_dir: str, trained_dtype: torch.dtype
) -> PretrainedConfig:
    """A copy of the model's config that describes the written model.

    Training often sets ``use_cache`` to False; the copy has the base model's value.

    Args:
        dtype: Safetensors dtype that floats are cast to; None: the training dtype.
        trained_dtype: The dtype of the first tensor that is written, if there is no cast.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [model_class(model).__name__]
    dtype_option = dtype_field(config)
    written = trained_dtype if dtype is None else TORCH_DTYPES[dtype]
    setattr(config, dtype_option, str(written).removeprefix('torch.'))
    for part in vars(config).values() if dtype is not None else ():
        if hasattr(part, 'model_type') and getattr(part, dtype_option, None) is not None:  # the config of a submodel
            setattr(part, dtype_option, getattr(config, dtype_option))
    base = base_json(base_dir, 'config.json')
    text = text_config(config)
    _restore_use_cache(config, base)
    if text is not config:
        name = next((name for name, part in vars(config).items() if part is text), '')
        _restore_use_cache(text, {'use_cache': True, **base.get(name, {})})
    return config


def forget_use_cache(config: PretrainedConfig, base_dir: str) -> None:
    """Set ``use_cache`` as in the base, in a config that Trainer saved with its own value.

    Trainer's own folder says nothing of the base; then it is the class's default.
    """
    of_base = {} if (Path(base_dir) / 'trainer_state.json').is_file() else base_json(base_dir, 'config.json')
    _restore_use_cache(config, of_base)


def _restore_use_cache(part: PretrainedConfig, base: Mapping[str, Any]) -> None:
    """Trainer sets it on the outer config of composite models, too, where the base may have none."""
    if getattr(part, 'use_cache', None) is not False:
        return
    default = None
    with suppress(Exception):  # a class without defaults, such as VisionEncoderDecoderConfig, or custom code
        default = getattr(type(part)(), 'use_cache', None)
    before = base.get('use_cache', default)
    if before is None:
        vars(part).pop('use_cache', None)
    else:
        part.use_cache = before


def write(
    folder: Path,
    model: PreTrainedModel,
    config: PretrainedConfig,
    tokenizer: Any | None,
    eos_token_ids: Sequence[int],
    base_dir: str,
) -> list[str]:
    """Write the files, and return warnings. Runs on: rank 0."""
    from transformers.dynamic_module_utils import custom_object_save

    warnings = []
    if is_remote_code(model):  # the folder does not load without the code
        # transformers 4.48 does not set _auto_class; then the config has the base's auto_map
        custom_object_save(model, str(folder), config=config if model._auto_class is not None else None)
    if getattr(config, '_attn_implementation_autoset', False):
        config._attn_implementation_autoset = False  # transformers 4.48 does the same before it saves
    if model.can_generate() and model.generation_config is not None:
        generation = _saved_generation_config(model, folder)
        move_generation_fields(config, generation)
        warnings += _write_generation_config(folder, generation, eos_token_ids, base_dir)
    warnings = write_config(folder, config) + warnings
    if tokenizer is not None:
        warnings += write_tokenizer(folder, tokenizer, base_dir)
    names = [name for name in PROCESSOR_FILES if base_file(base_dir, name)]
    if names and getattr(tokenizer, 'chat_template', None) in (None, _base_chat_template(base_dir)):
        names.append('chat_template.json')  # a processor's, transformers < 5; it would override one that was replaced
    for name in names:
        path = base_file(base_dir, name)
        if path is not None and not (folder / name).exists():
            shutil.copyfile(path, folder / name)
    return warnings


def require_json(model: PreTrainedModel) -> None:
    """Refuse a model whose configs hold what JSON does not have, such as numpy's arrays.

    Raises:
        ModelError: It names the fields.
    """
    for file, config in (('config', model.config), ('generation_config', getattr(model, 'generation_config', None))):
        if config is None:
            continue
        try:
            config.to_json_string()
            continue
        except Exception as error:  # classes may be custom code
            fields = config.to_dict()
            reason = error
        found = [f'{name} ({type(value).__name__})' for name, value in fields.items() if not _is_json(value)]
        if found:
            raise ModelError(
                f'{file}.json cannot hold {", ".join(found)} of the {file} of {type(model).__name__}: {reason}. Set '
                f'what JSON has (numbers, strings, lists, dicts), or keep it elsewhere than in model.{file}'
            )


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def write_config(folder: Path, config: PretrainedConfig) -> list[str]:
    """Write config.json, and return warnings. Runs on: rank 0."""
    config.save_pretrained(folder)
    return add_older_rope(folder, config)


def _restore_forced(generation: GenerationConfig, base_dir: str) -> None:
    """The base's values, if nothing else differs than what training code sets for itself (Axolotl: both)."""
    base = base_json(base_dir, 'generation_config.json') or base_json(base_dir, 'config.json')
    if not base:
        return
    default = type(generation)()
    names = (name for name in {**generation.to_diff_dict(), **base} if hasattr(default, name) and name[0] != '_')
    settings = (name for name in names if not name.endswith('_token_id') and name != 'transformers_version')
    before = {name: base.get(name, getattr(default, name)) for name in settings}
    changed = {name: value for name, value in before.items() if value != getattr(generation, name)}
    if changed.keys() <= {'do_sample', 'use_cache'}:
        vars(generation).update(changed)


def _write_generation_config(
    folder: Path, generation: GenerationConfig, eos_token_ids: Sequence[int], base_dir: str
) -> list[str]:
    _restore_forced(generation, base_dir)
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


def _saved_generation_config(model: PreTrainedModel, folder: Path) -> GenerationConfig:
    """A copy of what ``save_pretrained`` writes. Classes that override it, such as CSM's, add to it there."""
    from transformers import PreTrainedModel

    # ms-swift trains with settings for its own inference, and saves the original (swift/trainers/mixin.py, _save)
    original = getattr(model, 'origin_generation_config', None)
    generation = copy.deepcopy(model.generation_config if original is None else original)
    kind = model_class(model)
    if kind.save_pretrained is PreTrainedModel.save_pretrained:
        return generation
    trial = copy.copy(model)  # it edits the configs; the tensors are shared
    trial.config, trial.generation_config = copy.deepcopy(model.config), generation
    # An override need not accept an empty state dict
    with suppress(Exception), quiet(), tempfile.TemporaryDirectory(prefix='.xhf_hooks_', dir=folder) as temporary:
        kind.save_pretrained(trial, temporary, state_dict={}, is_main_process=False)
    return trial.generation_config


def _base_chat_template(base_dir: str) -> str | dict[str, str] | None:
    if (jinja := base_file(base_dir, 'chat_template.jinja')) is not None:
        return jinja.read_text(encoding='utf-8')
    template = base_json(base_dir, 'tokenizer_config.json').get('chat_template')
    return {one['name']: one['template'] for one in template} if isinstance(template, list) else template


def compare_vocabulary(tokenizer: Any | None, embedding_rows: int | None, exporter: Exporter) -> list[str]:
    """Compare the number of tokens with that of embeddings, and return warnings. Runs on: rank 0.

    Raises:
        ModelError: There are more tokens than embeddings. Not for one like the base's own: some bases have more, such
            as Gemma 3's text models.
    """
    if tokenizer is None or embedding_rows is None or not hasattr(tokenizer, '__len__'):
        return []
    n_tokens = len(tokenizer)
    if n_tokens > embedding_rows and n_tokens > exporter.n_base_tokens:
        raise ModelError(
            f'the tokenizer has {n_tokens} tokens, but the model has embeddings for {embedding_rows}: give the '
            f"model's own (the option tokenizer; in xhf-convert, beside the checkpoint or in --base), or resize the "
            f'embeddings before training (XTuner: give the model its tokenizer)'
        )
    base = base_json(exporter.base_dir, 'config.json')
    of_base = base.get('vocab_size', base.get('text_config', {}).get('vocab_size'))
    if of_base in (None, embedding_rows) or n_tokens >= embedding_rows:
        return []
    is_padded = embedding_rows % _ROWS_MULTIPLE == 0
    if is_padded and not n_tokens <= of_base < embedding_rows:
        return []
    return [
        f'the tokenizer has {n_tokens} tokens, but the embeddings were resized from {of_base} to {embedding_rows} '
        f'rows: if tokens were added for training, they are not in it; give one that has them (the option '
        f'tokenizer; in xhf-convert, beside the checkpoint or in --base)'
    ]


def missing_mtp_layers(names: Iterable[str], base_dir: str) -> list[str]:
    """A warning if the base announces layers for multi-token prediction, but no tensor has such a name."""
    base = base_json(base_dir, 'config.json')
    fields = {**base, **base.get('text_config', {})}
    announced = [name for name, value in fields.items() if _MTP_FIELD.search(name) and type(value) is int and value]
    layer = f'.layers.{fields.get("num_hidden_layers")}.'
    if not announced or any(_MTP_TENSOR.search(name) or layer in f'.{name}' for name in names):
        return []
    name, value = announced[0], fields[announced[0]]
    return [
        f'config.json has {name}={value}, but the class of the trained model has no layers for multi-token prediction, '
        f'so none are saved: servers that use them cannot load the folder unless {name} is set to 0'
    ]
