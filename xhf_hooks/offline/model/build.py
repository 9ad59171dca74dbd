"""Builds the trained model on the meta device.

- Models that the run's config describes, by the functions in MODEL_BUILDERS (:mod:`xhf_hooks.registry`).
- Models of transformers.Trainer and Axolotl, from ``config.json`` and ``adapter_config.json`` in the checkpoint.
- Other modules that contain one transformers model, from the folder given with ``--base``. Its path in the module
  follows from the names in the checkpoint.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from xhf_hooks.compat.transformers import text_config
from xhf_hooks.errors import BaseModelError, ConfigError, OptionError
from xhf_hooks.exporters.assets.base_files import LocatedBase, find_base_file
from xhf_hooks.exporters.hf_assets import forget_use_cache
from xhf_hooks.format.loaded_files import ADAPTER_CONFIG, GENERATION_CONFIG
from xhf_hooks.format.text import some
from xhf_hooks.offline.checkpoint.find import FoundCheckpoint
from xhf_hooks.offline.model import transformers_model
from xhf_hooks.offline.model.find_class import below, beside_backbone, place
from xhf_hooks.offline.model.freeze_modules import freeze_parts
from xhf_hooks.offline.model.meta_model import MetaModel
from xhf_hooks.offline.model.nested_adapters import adapt_parts
from xhf_hooks.offline.model.run_config import RunConfig
from xhf_hooks.offline.model.starting_weights import StartingWeights, base_named_by, checkpoints_loaded_over
from xhf_hooks.offline.model.stored_names import without_adapters
from xhf_hooks.offline.model.trainer_files import (
    adapter_folder,
    config_folder,
    folder_of_trainer_files,
    is_save_of_hook,
)
from xhf_hooks.registry import MODEL_BUILDERS
from xhf_hooks.sources.stored_tensors import StoredTensor
from xhf_hooks.system.library_settings import quiet

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def build_meta_model(meta_model: MetaModel, config: RunConfig, found: FoundCheckpoint, base: str | None) -> None:
    """Build the model of a checkpoint.

    Args:
        meta_model: Gets the model. Its notes say why configs beside the checkpoint were not read.
        config: The config of the run.
        found: The checkpoint. ``config.json`` is looked for beside it and in the hook's folders.
        base: Folder or hub name given by the user; takes precedence over the config and the checkpoint.

    Raises:
        ConfigError, BaseModelError: No usable config was found.
        DamagedError: The config describes a model that cannot be built.
    """
    named, notes = meta_model.architecture, [*meta_model.notes]
    if named is not None and transformers_model.class_named(named) is None:
        raise OptionError('architecture', 'the name of a class of the installed transformers', named)
    folder = config_folder(found) or adapter_folder(found)
    with quiet():
        is_built = any(build(meta_model, config, base, folder) for build in MODEL_BUILDERS.last_first())
        if not is_built and base is None and folder is None and base_named_by(config, meta_model.stored, None) is None:
            problem = f'{config.where} has no supported model' if config.where else 'no config was found'
            problem += f' ({"; ".join(notes)})' if notes else ''
            raise ConfigError(
                f"{found.path}: {problem}, and there is no config.json beside it. Name the run's config with "
                f'--config, or a folder with the config.json of the model with --base'
            )
        if not is_built:
            _build_of_transformers(meta_model, found, base, config)
            freeze_parts(meta_model.module, config.model)
    meta_model.over_base = StartingWeights.find(meta_model.module, checkpoints_loaded_over(config))


def _build_of_transformers(meta_model: MetaModel, found: FoundCheckpoint, given: str | None, of_run: RunConfig) -> None:
    """The config of the model, or of its adapter, is beside the checkpoint, or in the given folder.

    An adapter's config beside the checkpoint of a model without one is of another run. Without one, the run's own
    config may say how the adapters were made.
    """
    is_adapter = any('lora_' in name for name in meta_model.shapes)
    adapter_dir, config_dir = adapter_folder(found), config_folder(found)
    of_given = find_base_file(given or '', ADAPTER_CONFIG)
    adapter = of_given
    if adapter is None and adapter_dir is not None and (is_adapter or (given is None and config_dir is None)):
        adapter = adapter_dir / ADAPTER_CONFIG
    saved = config_dir if config_dir is not None and is_save_of_hook(config_dir) else None
    base = (
        given or (base_named_by(of_run, meta_model.stored, saved) if config_dir == saved else None) or str(config_dir)
    )
    lora = None if adapter is None else transformers_model.adapter_config_in(adapter.parent)
    if lora is not None and (given is None or of_given is not None):
        base = lora.base_model_name_or_path
        if not base:
            raise BaseModelError(f'{adapter} has no base_model_name_or_path; set it to the base model')
    meta_model.described_by = base if adapter is None else f'{adapter} and {base}'
    of_base = meta_model.config_in(base, 'the model')
    config = _config_of_run(meta_model, config_dir, of_base, base, given)
    meta_model.has_config_of_base = config is None
    config = config or of_base
    if lora is None:
        is_saved = saved is not None and base == str(saved)
        model: nn.Module = _built_as_trained(meta_model, base, config, of_base, is_save_of_run=is_saved)
    else:
        kind = meta_model.architecture or transformers_model.class_for_adapter(lora, config)
        model = meta_model.built(base, config, kind, of_base)
    _take_generation_config(meta_model, model, found, given)
    if lora is not None:
        model = transformers_model.adapt(model, lora)
    elif is_adapter:
        prefix = meta_model.find_prefix(model, base).removesuffix('base_model.model.')
        model = adapt_parts(model, of_run, meta_model.stored, prefix)
    meta_model.module = place(model, meta_model.find_prefix(model, base))


def _built_as_trained(
    meta_model: MetaModel, base: str, config: PretrainedConfig, of_base: PretrainedConfig, *, is_save_of_run: bool
) -> PreTrainedModel:
    """Build the given class, or the one that config.json names, or the one that has the checkpoint's tensors."""
    built = partial(meta_model.built, base, of_base=of_base, is_save_of_run=is_save_of_run)
    if meta_model.architecture is not None:
        return built(config, meta_model.architecture)
    for_other_class, notes, model, prefix = copy.deepcopy(config), [*meta_model.notes], None, None
    inside: dict[str, StoredTensor] = {}
    if getattr(config, 'architectures', None):  # transformers 4.57 writes Qwen2-VL's into a part
        model = built(config)
        with suppress(BaseModelError):  # no tensor has a name of this class
            prefix = meta_model.find_prefix(model, base)
        inside = {} if prefix is None else without_adapters(below(prefix, meta_model.stored))
        if inside and transformers_model.untie_embeddings(config, model, inside):
            note = 'input and output embeddings differ in the checkpoint: tie_word_embeddings is set to false'
            meta_model.forget_built([*notes, note])
            return built(config)
    other = meta_model.find_class(for_other_class, model, base)
    # Where the checkpoint records what was trained, it may leave out what is frozen
    if other is None and model is not None and meta_model.trained is None:
        arguments = transformers_model.arguments_of(model, inside)
        if arguments:
            meta_model.forget_built(notes)
            return built(for_other_class, arguments=arguments)
    if other is None and model is not None:
        beside = [] if prefix is None else beside_backbone(model, prefix, meta_model.stored)
        if beside:
            problem = f"no class of transformers for {type(config).__name__} has the checkpoint's tensors"
            meta_model.notes.append(f'{problem} beside the {type(model).__name__} ({some(beside)})')
        return model
    if other is None:
        return built(config)
    if model is not None:
        note = f'the checkpoint is of a {other.__name__}, and {base} of a {type(model).__name__}'
        meta_model.forget_built([*notes, note])
    return built(for_other_class, other.__name__)


def _config_of_run(
    meta_model: MetaModel, folder: Path | None, of_base: PretrainedConfig, base: str, given: str | None
) -> PretrainedConfig | None:
    """The config.json that the run left, as its model had it; None if it left none, or that of another model.

    Args:
        folder: Where the config.json is.
        base: Folder or hub name of the base model.
        given: The value of ``--base``.
    """
    if folder is None:
        return None
    is_of_trainer = (folder / 'trainer_state.json').is_file()
    config = meta_model.config_in(str(folder), f'{folder}/config.json')
    if type(config) is type(text_config(of_base)):  # AutoModelForCausalLM makes the text model of some bases
        of_base = text_config(of_base)
    if not is_of_trainer and _sizes(config) != _sizes(of_base):
        meta_model.notes.append(f'{folder}/config.json is of another model than {base}: it is not taken')
        return None
    if type(config) is not type(of_base) and type(config).__name__ == type(of_base).__name__:
        # Of custom code that is in both folders: the model's class will be the base's, which wants its own config class
        config = type(of_base).from_pretrained(str(folder))
    if is_of_trainer or base != str(folder):
        forget_use_cache(config, LocatedBase.locate(base))
        config._name_or_path = base
    if getattr(config, 'architectures', None) is None:  # as config.save_pretrained alone writes it
        config.architectures = getattr(of_base, 'architectures', None)
    differing = _differing(config, of_base)
    if given is not None and differing:
        meta_model.notes.append(
            f'config.json is that of {folder}, not that of {given}; they differ in {some(differing, 5)}'
        )
        meta_model.described_by = f'{folder}/config.json and {base}'
    return config


def _sizes(config: PretrainedConfig) -> tuple[Any, ...]:
    """The fields of a config that no training changes: the kind of model and its width and depth."""
    text = text_config(config)
    names = ('hidden_size', 'd_model', 'n_embd', 'num_hidden_layers', 'n_layer')
    return (config.model_type, *(getattr(text, name, None) for name in names))


def _differing(config: Any, of_base: Any) -> list[str]:
    """Fields in which two configs differ, other than those that every save writes anew."""
    own, other = config.to_dict(), of_base.to_dict()
    anew = ('_name_or_path', 'architectures', 'dtype', 'torch_dtype', 'transformers_version', 'use_cache')
    return [name for name in {**other, **own} if name not in anew and own.get(name) != other.get(name)]


def _take_generation_config(meta_model: MetaModel, model: nn.Module, found: FoundCheckpoint, given: str | None) -> None:
    """Give the model the generation config beside the checkpoint, if there is one."""
    folder = folder_of_trainer_files(found, GENERATION_CONFIG)
    if folder is None or not model.can_generate():
        return
    of_base, model.generation_config = model.generation_config, transformers_model.generation_config_in(str(folder))
    differing = [] if given is None or of_base is None else _differing(model.generation_config, of_base)
    differing = [name for name in differing if name != '_from_model_config']
    if differing:
        name = f'generation_config.json is that of {folder}, beside the checkpoint, not that of {given}'
        meta_model.notes.append(f'{name}; they differ in {some(differing, 5)}')
