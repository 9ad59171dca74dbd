"""Writes all files of a Hugging Face folder except the weights. Never edits objects of the live model."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.base_model.files import (
    PROCESSOR_FILES,
    LocatedBase,
    has_auto_class,
    is_remote_code,
)
from xhf_hooks.compat.older_rope import add_older_rope
from xhf_hooks.compat.tokenizer_files import write_tokenizer
from xhf_hooks.compat.transformers import (
    dtype_field,
    forget_chosen_attention,
    forget_scaling_by_one,
    move_generation_fields,
    prefixes_left_out,
    save_generation_config,
    text_config,
)
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.base import Exporter
from xhf_hooks.exporters.surroundings import WEIGHTS, read_files
from xhf_hooks.format import strict_json
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.text import error_text
from xhf_hooks.model import model_class
from xhf_hooks.system.library_settings import quiet

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

#: Embeddings are padded to a multiple of this, or of a multiple of it.
_ROWS_MULTIPLE = 8
#: Files that readers other than transformers' from_pretrained want next to a model, and training does not change.
_COMPANIONS = ('modules.json', 'config_sentence_transformers.json', 'sentence_bert_config.json', 'spk_dict.pt')
#: Fields of config.json that save_pretrained itself sets.
_OF_EACH_SAVE = ('architectures', 'dtype', 'torch_dtype', 'transformers_version', 'auto_map', '_name_or_path')


def exported_config(
    model: PreTrainedModel, dtype: str | None, base_model: LocatedBase, trained_dtype: torch.dtype
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
    base = base_model.read_json('config.json')
    text = text_config(config)
    _restore_use_cache(config, base)
    if text is not config:
        name = next((name for name, part in vars(config).items() if part is text), '')
        _restore_use_cache(text, base.get(name, {}))
    forget_scaling_by_one(text)
    return config


def forget_use_cache(config: PretrainedConfig, base_model: LocatedBase) -> None:
    """Set ``use_cache`` as in the base, in a config that Trainer saved with its own value.

    Trainer's own folder says nothing of the base; then it is the class's default.
    """
    of_base = {} if base_model.has_file('trainer_state.json') else base_model.read_json('config.json')
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
    base_model: LocatedBase,
) -> list[str]:
    """Write the files, and return warnings. Runs on: rank 0."""
    from transformers.dynamic_module_utils import custom_object_save

    warnings = [
        f'{model_class(model).__name__} was not loaded from a folder with the tensor names of the Hub, so the save has '
        f"the names that transformers 5 gives (without '{prefix}' in {path}), which neither transformers 4 nor vLLM "
        f"reads. To keep the Hub's names, load the model, before training, from a folder that has them"
        for path, prefix in prefixes_left_out(model).items()
    ]
    if is_remote_code(model):  # the folder does not load without the code
        # transformers 4.48 does not set _auto_class; then the config has the base's auto_map
        custom_object_save(model, str(folder), config=config if has_auto_class(model) else None)
    forget_chosen_attention(config)
    own_save = _try_own_save(model, folder)
    generation = None
    if model.can_generate() and model.generation_config is not None:
        generation = _saved_generation_config(model, own_save)
        move_generation_fields(config, generation)
    warnings += write_config(folder, config)
    if own_save is not None:
        warnings += _write_own_save(folder, model_class(model), own_save)
    if generation is not None:
        warnings += _write_generation_config(folder, generation, eos_token_ids, base_model)
    if tokenizer is not None:
        warnings += write_tokenizer(folder, tokenizer, base_model)
    names = [name for name in PROCESSOR_FILES if base_model.has_file(name)]
    if names and getattr(tokenizer, 'chat_template', None) in (None, _base_chat_template(base_model)):
        names.append('chat_template.json')  # a processor's, transformers < 5; it would override one that was replaced
    for name in names:
        content = base_model.read_file(name)
        if content is not None and not (folder / name).exists():
            (folder / name).write_bytes(content)
    if model_class(model).__name__ in (base_model.read_json('config.json').get('architectures') or ()):
        _copy_companions(folder, base_model)
    return warnings + _write_named_code(folder, base_model)


def _copy_companions(folder: Path, base_model: LocatedBase) -> None:
    """Copy what the base has for other readers of its class: sentence-transformers' modules, voices of Qwen-Omni."""
    names = [*_COMPANIONS]
    with suppress(ValueError, TypeError, KeyError, NotImplementedError):  # a damaged modules.json is copied as it is
        for content in base_model.read_files(('modules.json',)).values():
            paths = [module['path'] for module in json.loads(content) if module['path']]
            names += [name for path in paths for name in base_model.names_below(path)]
    for name, content in base_model.read_files(names).items():
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def _write_named_code(folder: Path, base_model: LocatedBase) -> list[str]:
    """Copy the code that the settings name, as those of a base do whose class is one of transformers by now.

    Nothing is executed. What custom code itself has saved stays.
    """
    files = {path.name: path.read_bytes() for path in folder.glob('*.json')}
    code, missing = base_model.read_code(files)
    for name, content in code.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(content)
    missing = [name for name in missing if not (folder / name).exists()]
    if not missing:
        return []
    return [
        f'auto_map names code that is not in the folder, since the base model {base_model.name!r} lacks it: {missing}'
    ]


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
        except Exception as error:  # of any type, from custom code
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


def _restore_forced(generation: GenerationConfig, base_model: LocatedBase) -> None:
    """The base's values, if nothing else differs than what training code sets for itself (Axolotl: both)."""
    base = base_model.read_json('generation_config.json') or base_model.read_json('config.json')
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
    folder: Path, generation: GenerationConfig, eos_token_ids: Sequence[int], base_model: LocatedBase
) -> list[str]:
    _restore_forced(generation, base_model)
    if eos_token_ids:
        known = generation.eos_token_id
        known = known if isinstance(known, list) else [] if known is None else [known]
        generation.eos_token_id = list(dict.fromkeys([*known, *eos_token_ids]))
    try:
        save_generation_config(generation, folder)
        return []
    except ValueError as error:
        problem = ' '.join(str(error).split())
    generation.do_sample = True
    try:
        save_generation_config(generation, folder)
    except ValueError:
        return [f'generation_config.json was not written: transformers refuses it: {problem}']
    return [f'generation_config.json: do_sample was set to True, without which transformers refuses it: {problem}']


def _saved_generation_config(model: PreTrainedModel, own_save: _OwnSave | None) -> GenerationConfig:
    """A copy of what ``save_pretrained`` writes. Classes that override it, such as CSM's, add to it there."""
    # ms-swift trains with settings for its own inference, and saves the original (swift/trainers/mixin.py, _save)
    original = getattr(model, 'origin_generation_config', None)
    if original is None and own_save is not None:
        return own_save.generation
    return copy.deepcopy(model.generation_config if original is None else original)


@dataclass(frozen=True)
class _OwnSave:
    """The files that a class that overrides ``save_pretrained`` writes besides weights.

    Attributes:
        generation: The generation config as the override has left it.
        files: Content by path.
        fields: Fields of config.json that the override has set.
        error: Why the override did not run to its end; None if it did.
    """

    generation: GenerationConfig | None
    files: dict[str, bytes]
    fields: dict[str, Any]
    error: Exception | None


def _try_own_save(model: PreTrainedModel, folder: Path) -> _OwnSave | None:
    """Run the class's ``save_pretrained`` without weights; None if it is the one of transformers."""
    from transformers import PreTrainedModel

    kind = model_class(model)
    if kind.save_pretrained is PreTrainedModel.save_pretrained:
        return None
    trial = copy.copy(model)  # it edits the configs; the tensors are shared
    trial.config, trial.generation_config = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
    before = json.loads(trial.config.to_json_string())
    error = None
    with quiet(), tempfile.TemporaryDirectory(prefix='.xhf_hooks_', dir=folder) as temporary:
        try:
            kind.save_pretrained(trial, temporary, state_dict={})
        except Exception as raised:  # an override need not accept an empty state dict
            error = raised
        found = read_files(Path(temporary))
    files = {
        name: data for name, data in found.items() if not name.endswith(WEIGHTS) and name != 'generation_config.json'
    }
    after = json.loads(files.pop('config.json', b'{}'))
    fields = {name: value for name, value in after.items() if name not in before or before[name] != value}
    return _OwnSave(trial.generation_config, files, {k: v for k, v in fields.items() if k not in _OF_EACH_SAVE}, error)


def _write_own_save(folder: Path, kind: type, own_save: _OwnSave) -> list[str]:
    """Write what the class's ``save_pretrained`` has written besides weights, and return warnings."""
    for name, content in own_save.files.items():
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    if own_save.fields:
        config = strict_json.read(folder / 'config.json')
        text = json.dumps({**config, **own_save.fields}, indent=2, sort_keys=True) + '\n'  # as transformers does
        (folder / 'config.json').write_text(text, encoding='utf-8')
    if own_save.error is None or kind.__module__.startswith('transformers.'):
        return []
    return [
        f'{kind.__name__} has a save_pretrained of its own, which could not be run without weights '
        f'({error_text(own_save.error)}): files that it writes besides the weights may be missing'
    ]


def _base_chat_template(base_model: LocatedBase) -> str | dict[str, str] | None:
    if (jinja := base_model.read_file('chat_template.jinja')) is not None:
        return jinja.decode()
    template = base_model.read_json('tokenizer_config.json').get('chat_template')
    return {one['name']: one['template'] for one in template} if isinstance(template, list) else template


def warn_of_lost_rows(embedding_rows: int | None, head_rows: int | None, base_model: LocatedBase) -> list[str]:
    """A warning if embeddings were resized that an adapter's files do not have. Runs on: rank 0.

    peft saves them only if it finds the base's config: before 0.12 not one in a folder, and without a network not that
    of a hub name.
    """
    of_base = _base_rows(base_model)
    if embedding_rows is None or of_base in (None, embedding_rows, head_rows):
        return []
    return [
        f'the embeddings were resized from {of_base} to {embedding_rows} rows, and peft does not save them with the '
        f"adapter: where it is loaded, added tokens have other embeddings. The merged model has them (lora='merge' or "
        f"'both')"
    ]


def _base_rows(base_model: LocatedBase) -> int | None:
    """Rows of the base's embeddings, as its config.json says."""
    base = base_model.read_json('config.json')
    of_text = base.get('text_config', base.get('llm_config', {}))  # the latter of InternVL's code
    return base.get('vocab_size', of_text.get('vocab_size'))


def compare_vocabulary(
    tokenizer: Any | None, embedding_rows: int | None, head_rows: int | None, exporter: Exporter
) -> list[str]:
    """Compare the number of tokens with that of embeddings, and return warnings. Runs on: rank 0.

    Args:
        embedding_rows: Rows of the input embedding. Mllama has some more than its vocabulary, for images.
        head_rows: Rows of the language-modelling head; None if there is none.

    Raises:
        ModelError: There are more tokens than embeddings. Not for one like the base's own: some bases have more, such
            as Gemma 3's text models.
    """
    tokenizer = getattr(tokenizer, 'tokenizer', tokenizer)  # a processor's
    if tokenizer is None or embedding_rows is None or not hasattr(tokenizer, '__len__'):
        return []
    n_tokens = len(tokenizer)
    if n_tokens > embedding_rows and n_tokens > exporter.n_base_tokens:
        raise ModelError(
            f'the tokenizer has {n_tokens} tokens, but the model has embeddings for {embedding_rows}: give the '
            f"model's own (the option tokenizer; in xhf-convert, beside the checkpoint or in --base), or resize the "
            f'embeddings before training (XTuner: give the model its tokenizer)'
        )
    of_base = _base_rows(exporter.base_model)
    if of_base in (None, embedding_rows, head_rows) or n_tokens >= embedding_rows:
        return []
    is_padded = embedding_rows % _ROWS_MULTIPLE == 0
    if is_padded and not n_tokens <= of_base < embedding_rows:
        return []
    return [
        f'the tokenizer has {n_tokens} tokens, but the embeddings were resized from {of_base} to {embedding_rows} '
        f'rows: if tokens were added for training, they are not in it; give one that has them (the option '
        f'tokenizer; in xhf-convert, beside the checkpoint or in --base)'
    ]
