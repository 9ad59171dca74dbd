"""Writes all files of a Hugging Face folder except the weights. Never edits objects of the live model."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xhf_hooks.compat.transformers import (
    dtype_field,
    forget_scaling_by_one,
    text_config,
)
from xhf_hooks.errors import ModelError
from xhf_hooks.exporters.ask_save import ModelTensor, SaveAnswer, ask_save, has_own_save
from xhf_hooks.exporters.assets.base_files import LocatedBase, has_auto_class, is_remote_code
from xhf_hooks.exporters.assets.older_readers import with_older_fields
from xhf_hooks.exporters.assets.write_tokenizer import copy_processor, write_tokenizer
from xhf_hooks.exporters.base import Exporter
from xhf_hooks.exporters.older_tensors import warn_of_older_tensors
from xhf_hooks.exporters.surroundings import warn_of_not_saved
from xhf_hooks.format import strict_json
from xhf_hooks.format.dtypes import TORCH_DTYPES
from xhf_hooks.format.loaded_files import CONFIG, GENERATION_CONFIG
from xhf_hooks.format.text import error_text
from xhf_hooks.model import model_class
from xhf_hooks.system.files import write_missing

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

#: Embeddings are padded to a multiple of this, or of a multiple of it.
_ROWS_MULTIPLE = 8
#: Files that readers other than transformers' from_pretrained want next to a model, and training does not change.
_COMPANIONS = ('modules.json', 'config_sentence_transformers.json', 'sentence_bert_config.json', 'spk_dict.pt')


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
    base = base_model.read_json(CONFIG)
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
    of_base = {} if base_model.has_file('trainer_state.json') else base_model.read_json(CONFIG)
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


def ask_with_generation_config(
    model: PreTrainedModel,
    trained: PreTrainedModel,
    tensors: Mapping[str, ModelTensor],
    config: PretrainedConfig,
    base_model: LocatedBase,
) -> tuple[SaveAnswer, list[str]]:
    """Ask what ``save_pretrained`` writes (:func:`.ask_save`), and return warnings. Runs on: all ranks.

    It refuses a generation config that contradicts itself. Then ``do_sample`` is set, or none is written.

    Args:
        model: The model whose class is asked.
        trained: The trained model, which has the generation config.
    """
    # ms-swift trains with settings for its own inference, and saves the original (swift/trainers/mixin.py, _save)
    original = getattr(trained, 'origin_generation_config', None) or getattr(trained, 'generation_config', None)
    if original is None or not model.can_generate():
        return ask_save(model, tensors, config, None), []
    generation = copy.deepcopy(original)
    _restore_forced(generation, base_model)
    with_sampling = copy.deepcopy(generation)
    with_sampling.do_sample = True
    answer, problem = None, ''
    for sampling in (generation, with_sampling):
        try:
            answer = ask_save(model, tensors, config, sampling)
        except ModelError as error:
            problem = problem or error_text(error.__cause__ or error, 500)
            continue
        if GENERATION_CONFIG in answer.files:
            warning = (
                f'{GENERATION_CONFIG}: do_sample was set to True, without which transformers refuses it: {problem}'
            )
            return answer, [] if sampling is generation else [warning]
    answer = answer or ask_save(model, tensors, config, None)
    if has_own_save(model) and not problem:
        return answer, []  # the class writes none
    return answer, [f'{GENERATION_CONFIG} was not written: transformers refuses it{problem and f": {problem}"}']


def for_older_readers(
    model: PreTrainedModel, answer: SaveAnswer, config: PretrainedConfig, base_model: LocatedBase
) -> tuple[SaveAnswer, list[str]]:
    """The answer with what older readers need in its config.json, and warnings about what they do not read.

    Raises:
        ModelError: There is no config.json.
    """
    if CONFIG not in answer.files:
        raise ModelError(f'{model_class(model).__name__}.save_pretrained: expected a {CONFIG}, found {[*answer.files]}')
    content, warnings = with_older_fields(answer.files[CONFIG], config, base_model)
    answer = replace(answer, files={**answer.files, CONFIG: content})
    return answer, warnings + warn_of_older_tensors(model, config, answer, base_model)


def warn_of_own_save(model: PreTrainedModel, answer: SaveAnswer) -> list[str]:
    """Warnings about what a ``save_pretrained`` of the class's own writes, and a save cannot."""
    warnings = warn_of_not_saved(answer.not_saved)
    if answer.problem is not None and not model_class(model).__module__.startswith('transformers.'):
        warnings.append(
            f'{model_class(model).__name__} has a save_pretrained of its own, which could not be run without weights '
            f'({answer.problem}): files that it writes besides the weights may be missing'
        )
    return warnings


def write(
    folder: Path,
    model: PreTrainedModel,
    answer: SaveAnswer,
    tokenizer: Any | None,
    eos_token_ids: Sequence[int],
    base_model: LocatedBase,
) -> list[str]:
    """Write the files, and return warnings. Runs on: rank 0.

    Args:
        answer: What ``save_pretrained`` of the model writes, as :func:`for_older_readers` returns it.
    """
    from transformers.dynamic_module_utils import custom_object_save

    if is_remote_code(model) and not has_auto_class(model):  # as in transformers 4.48
        custom_object_save(model, str(folder))  # the folder does not load without the code; the config has its auto_map
    for name, content in answer.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if eos_token_ids and GENERATION_CONFIG in answer.files:
        _add_eos_token_ids(folder / GENERATION_CONFIG, eos_token_ids)
    warnings = [] if tokenizer is None else write_tokenizer(folder, tokenizer, base_model)
    copy_processor(folder, tokenizer, base_model)
    if model_class(model).__name__ in (base_model.read_json(CONFIG).get('architectures') or ()):
        _copy_companions(folder, base_model)
    return warnings + _write_named_code(folder, base_model)


def _copy_companions(folder: Path, base_model: LocatedBase) -> None:
    """Copy what the base has for other readers of its class: sentence-transformers' modules, voices of Qwen-Omni."""
    names = [*_COMPANIONS]
    with suppress(ValueError, TypeError, KeyError, NotImplementedError):  # a damaged modules.json is copied as it is
        for content in base_model.read_files(('modules.json',)).values():
            paths = [module['path'] for module in json.loads(content) if module['path']]
            names += [name for path in paths for name in base_model.names_below(path)]
    write_missing(folder, base_model.read_files(names))


def _write_named_code(folder: Path, base_model: LocatedBase) -> list[str]:
    """Copy the code that the settings name, as those of a base do whose class is one of transformers by now.

    Nothing is executed. What custom code itself has saved stays.
    """
    files = {path.name: path.read_bytes() for path in folder.glob('*.json')}
    code, missing = base_model.read_code(files)
    write_missing(folder, code)
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
    content, warnings = with_older_fields((folder / CONFIG).read_bytes(), config)
    (folder / CONFIG).write_bytes(content)
    return warnings


def _restore_forced(generation: GenerationConfig, base_model: LocatedBase) -> None:
    """Restore the base's value of what training code sets by itself: ``use_cache``, and in Axolotl ``do_sample``.

    Axolotl switches sampling on in every model (``loaders/model.py``); where other settings of generation differ from
    the base's, somebody has chosen them.
    """
    base = base_model.read_json(GENERATION_CONFIG) or base_model.read_json(CONFIG)
    if not base:
        return
    default = type(generation)()
    names = (name for name in {**generation.to_diff_dict(), **base} if hasattr(default, name) and name[0] != '_')
    settings = (name for name in names if not name.endswith('_token_id') and name != 'transformers_version')
    before = {name: base.get(name, getattr(default, name)) for name in settings}
    changed = {name: value for name, value in before.items() if value != getattr(generation, name)}
    forced = {'use_cache'} if generation.use_cache is False else set()
    if 'axolotl' in sys.modules and changed.keys() <= {'do_sample', 'use_cache'}:
        forced.add('do_sample')
    vars(generation).update({name: value for name, value in changed.items() if name in forced})


def _add_eos_token_ids(path: Path, eos_token_ids: Sequence[int]) -> None:
    generation = strict_json.read(path)
    known = generation.get('eos_token_id')
    known = known if isinstance(known, list) else [] if known is None else [known]
    generation['eos_token_id'] = list(dict.fromkeys([*known, *eos_token_ids]))
    path.write_text(json.dumps(generation, indent=2, sort_keys=True) + '\n', encoding='utf-8')  # as transformers does


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
    base = base_model.read_json(CONFIG)
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
            f'embeddings before training (a model that takes a tokenizer does it if it gets one). If no file of a '
            f'finished run has the added rows, nobody saved them (Trainer saves frozen embeddings nowhere at ZeRO-3): '
            f'give with --base the model that has them'
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
