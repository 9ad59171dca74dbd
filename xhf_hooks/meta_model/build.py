"""Builds the trained model on the meta device.

- XTuner's models, from the run's config: ``llm``, ``ref_llm``, ``visual_encoder``, ``projector``, ``v_head``.
- Models of transformers.Trainer and Axolotl, from ``config.json`` and ``adapter_config.json`` in the checkpoint.
- Other modules that contain one transformers model, from the folder given with ``--base``. Its path in the module
  follows from the names in the checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xhf_hooks.base_model.files import LocatedBase, find_base_file
from xhf_hooks.compat.transformers import ROPE_OPTIONS, has_rope, set_rope_option, text_config
from xhf_hooks.errors import BaseModelError, ConfigError, OptionError
from xhf_hooks.exporters.hf_assets import forget_use_cache
from xhf_hooks.format.text import some
from xhf_hooks.meta_model import transformers_model
from xhf_hooks.meta_model.meta_model import MetaModel
from xhf_hooks.meta_model.nested_adapters import adapt_parts
from xhf_hooks.meta_model.placing import below, beside_backbone, place
from xhf_hooks.meta_model.run_config import RunConfig, Unread, required
from xhf_hooks.meta_model.starting_weights import StartingWeights, base_named_by, checkpoints_loaded_over
from xhf_hooks.meta_model.stored_names import without_adapters
from xhf_hooks.meta_model.trainer_files import (
    ADAPTER_CONFIG,
    adapter_folder,
    config_folder,
    folder_of_trainer_files,
    is_save_of_hook,
)
from xhf_hooks.sources.checkpoint.find import FoundCheckpoint
from xhf_hooks.sources.stored_tensors import StoredTensor
from xhf_hooks.system.library_settings import quiet

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Fields of an XTuner model's config that hold models, and fields that hold their adapters (xtuner ``model/*.py``).
_MODELS = ('llm', 'ref_llm', 'visual_encoder')
#: Options that freeze, and what they freeze in LLaVAModel and in InternVL_V1_5 (xtuner ``model/internvl.py``).
_FROZEN_BY = {
    'freeze_llm': {'llm', 'language_model'},
    'freeze_visual_encoder': {'visual_encoder', 'vision_model'},
}
_ADAPTERS = {'lora': 'llm', 'llm_lora': 'llm', 'visual_encoder_lora': 'visual_encoder'}


def build_meta_model(
    config: RunConfig | None,
    found: FoundCheckpoint,
    stored: Mapping[str, StoredTensor],
    *,
    base: str | None,
    module: str | None = None,
    architecture: str | None = None,
    has_recorded_trained: bool = False,
    notes: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> MetaModel:
    """Build the model of a checkpoint.

    Args:
        found: The checkpoint. ``config.json`` is looked for beside it and in the hook's folders.
        stored: The checkpoint's tensors, by each of their names.
        module: The option ``module``; it chooses the model where the checkpoint has several.
        base: Folder or hub name given by the user; takes precedence over the config and the checkpoint.
        architecture: The name of the trained class, given by the user; takes precedence over config.json.
        has_recorded_trained: Whether the checkpoint records what was trained. Then it has all of that.
        notes: Why configs beside the checkpoint were not read.

    Raises:
        ConfigError, BaseModelError: No usable config was found.
        DamagedError: The config describes a model that cannot be built.
    """
    if architecture is not None and transformers_model.class_named(architecture) is None:
        raise OptionError('architecture', 'the name of a class of the installed transformers', architecture)
    meta_model = MetaModel('', stored, trust_remote_code, module, architecture, has_recorded_trained, notes=[*notes])
    folder = config_folder(found) or adapter_folder(found)
    with quiet():
        if config is not None and config.model is not None and _is_xtuners(config.model):
            if architecture is not None:
                raise OptionError('architecture', f'no value, since {config.where} says what was trained', architecture)
            _build_xtuners(meta_model, config.model, config.where, base)
        elif base is not None or folder is not None or base_named_by(config, stored, None) is not None:
            _build_of_transformers(meta_model, found, base, config)
            if config is not None and config.model is not None:
                _freeze(meta_model.module, config.model)
        else:
            problem = 'no config was found' if config is None else f'{config.where} has no supported model'
            problem += f' ({"; ".join(notes)})' if notes else ''
            raise ConfigError(
                f"{found.path}: {problem}, and there is no config.json beside it. Name the run's config with "
                f'--config, or a folder with the config.json of the model with --base'
            )
    meta_model.over_base = StartingWeights.find(meta_model.module, checkpoints_loaded_over(config))
    return meta_model


def _build_xtuners(meta_model: MetaModel, model: Mapping[str, Any], where: str, base: str | None) -> None:
    kind = model['type'].rpartition('.')[2]
    meta_model.described_by = f'{kind} of {where}'
    module = meta_model.module
    for name in _MODELS:
        if isinstance(model.get(name), Mapping):
            child = _child_of_xtuners(meta_model, model, name, where, base if name != 'visual_encoder' else None)
            if kind == 'RewardModel' and name == 'llm':
                child = child.model  # xtuner keeps the backbone only (model/reward.py)
            module.add_module(name, child)
    for option, name in _ADAPTERS.items():
        _require_read(model.get(option), f'model.{option}', where)
        if isinstance(model.get(option), Mapping) and hasattr(module, name):
            lora = transformers_model.lora_config_of(model[option], where)
            setattr(module, name, transformers_model.adapt(getattr(module, name), lora))
    _add_the_rest(module, model, meta_model.stored)
    _freeze(module, model)


def _child_of_xtuners(
    meta_model: MetaModel, model: Mapping[str, Any], name: str, where: str, base: str | None
) -> nn.Module:
    options, what = model[name], f'model.{name}.pretrained_model_name_or_path'
    folder = base or str(required(options.get('pretrained_model_name_or_path'), what, where))
    parts = str(required(options.get('type'), f'model.{name}.type', where)).split('.')
    auto_class = parts[-2] if parts[-1] == 'from_pretrained' and len(parts) > 1 else parts[-1]
    remedy = transformers_model.NAME_BASE
    if name == 'visual_encoder':  # --base is that of the llm
        remedy = f'copy the config that MMEngine dumped into the work_dir, set {what} in it, and give it with --config'
    config = meta_model.config_in(folder, '--base' if base else f'{what} of {where}', remedy)
    for option, value in options.items():
        if hasattr(config, option) or option in ROPE_OPTIONS:
            _require_read(value, f'model.{name}.{option}', where)
    unknown = transformers_model.apply_options(config, options)
    if unknown:
        meta_model.notes.append(f'{where}: options of model.{name} that {type(config).__name__} lacks: {some(unknown)}')
    if name != 'visual_encoder':
        meta_model.notes += _enlarge_context(config, model.get('max_position_embeddings'), where)
    return meta_model.built(folder, config, auto_class)


def _build_of_transformers(
    meta_model: MetaModel, found: FoundCheckpoint, given: str | None, of_run: RunConfig | None
) -> None:
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
    if adapter is None:
        meta_model.described_by = base
        of_base = meta_model.config_in(base, 'the model')
        config = _config_of_run(meta_model, config_dir, of_base, base, given) or of_base
        is_saved = saved is not None and base == str(saved)
        model: nn.Module = _built_as_trained(meta_model, base, config, of_base, is_save_of_run=is_saved)
        _take_generation_config(meta_model, model, found, given)
        if is_adapter:
            prefix = meta_model.find_prefix(model, base).removesuffix('base_model.model.')
            model = adapt_parts(model, of_run, meta_model.stored, prefix)
    else:
        lora = transformers_model.adapter_config_in(adapter.parent)
        if given is None or of_given is not None:
            base = lora.base_model_name_or_path
        if not base:
            raise BaseModelError(f'{adapter} has no base_model_name_or_path; set it to the base model')
        meta_model.described_by = f'{adapter} and {base}'
        of_base = meta_model.config_in(base, 'the model')
        config = _config_of_run(meta_model, config_dir, of_base, base, given)
        meta_model.has_config_of_base = config is None
        config = config or of_base
        kind = meta_model.architecture or transformers_model.class_for_adapter(lora, config)
        model = meta_model.built(base, config, kind, of_base)
        _take_generation_config(meta_model, model, found, given)
        model = transformers_model.adapt(model, lora)
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
    if other is None and model is not None and not meta_model.has_recorded_trained:
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
    folder = folder_of_trainer_files(found, 'generation_config.json')
    if folder is None or not model.can_generate():
        return
    of_base, model.generation_config = model.generation_config, transformers_model.generation_config_in(str(folder))
    differing = [] if given is None or of_base is None else _differing(model.generation_config, of_base)
    differing = [name for name in differing if name != '_from_model_config']
    if differing:
        name = f'generation_config.json is that of {folder}, beside the checkpoint, not that of {given}'
        meta_model.notes.append(f'{name}; they differ in {some(differing, 5)}')


def _require_read(value: Any, what: str, where: str) -> None:
    """Refuse a value that is unread, or has a part that is."""
    if isinstance(value, Unread):
        required(value, what, where)
    parts = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    for name, part in parts:
        _require_read(part, f'{what}.{name}', where)


def _is_xtuners(model: Mapping[str, Any]) -> bool:
    return isinstance(model.get('llm'), Mapping) and 'pretrained_model_name_or_path' in model['llm']


def _enlarge_context(config: PretrainedConfig, wanted: Any, where: str) -> list[str]:
    """Same as ``_prepare_for_long_context_training`` in xtuner ``model/sft.py``; a note where it cannot be done."""
    now = getattr(config, 'max_position_embeddings', None)
    if type(wanted) is not int or type(now) is not int or not has_rope(config):
        return []
    factor = float(-(-wanted // now)) if wanted > now else 1.0
    if set_rope_option(config, 'rope_scaling', {'type': 'linear', 'factor': factor}):
        return []
    return [
        f'{where}: model.max_position_embeddings is not applied, since {type(config).__name__} has RoPE for each kind '
        f'of layer; set rope_parameters in the config.json of OUT to those of training'
    ]


def _add_the_rest(module: nn.Module, model: Mapping[str, Any], names: Collection[str]) -> None:
    children = {name.partition('.')[0] for name in names}
    if 'v_head' in children:
        hidden = text_config(module.llm.config).hidden_size
        module.v_head = nn.Linear(hidden, 1, bias=False, device='meta')
    if 'ref_llm' in children and not hasattr(module, 'ref_llm'):
        module.ref_llm = nn.Module()  # a copy of llm, not exported; its tensors are skipped by name
    if 'visual_encoder' in model:
        module.projector = _projector(module, model)


def _projector(module: nn.Module, model: Mapping[str, Any]) -> nn.Module:
    """XTuner's own class: its code is exported with the weights."""
    with transformers_model.refused_as(ConfigError, "a LLaVAModel needs xtuner's projector"), torch.device('meta'):
        from xtuner.model.modules.projector import ProjectorConfig, ProjectorModel

        config = ProjectorConfig(
            visual_hidden_size=module.visual_encoder.config.hidden_size,
            llm_hidden_size=module.llm.config.hidden_size,
            depth=model.get('projector_depth', 2),
        )
        return ProjectorModel(config)


def _freeze(module: nn.Module, model: Mapping[str, Any]) -> None:
    """Freeze the parts that XTuner's LLaVAModel and InternVL_V1_5 freeze; adapters stay trainable.

    Models around them, such as Sa2VA's, have their config under the name of the part.
    """
    for option, names in _FROZEN_BY.items():
        for path, parameter in module.named_parameters() if model.get(option) is True else ():
            if not names.isdisjoint(path.split('.')[:2]):
                parameter.requires_grad_(_is_trained_with_adapter(path))
    for name, part in module.named_children():
        if isinstance(model.get(name), Mapping):
            _freeze(part, model[name])


def _is_trained_with_adapter(path: str) -> bool:
    return 'lora_' in path or '.modules_to_save.' in path
