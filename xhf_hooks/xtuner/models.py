"""Builds XTuner's models on the meta device from a run's config.

They have ``llm``, ``ref_llm``, ``visual_encoder``, ``projector`` and ``v_head`` (xtuner ``model/*.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xhf_hooks.compat.transformers import ROPE_OPTIONS, has_rope, set_rope_option, text_config
from xhf_hooks.errors import ConfigError, OptionError
from xhf_hooks.format.text import some
from xhf_hooks.offline.model import transformers_model
from xhf_hooks.offline.model.freeze_modules import freeze_parts
from xhf_hooks.offline.model.meta_model import MetaModel
from xhf_hooks.offline.model.run_config import RunConfig, require_read, required

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Fields of an XTuner model's config that hold models, and fields that hold their adapters (xtuner ``model/*.py``).
_MODELS = ('llm', 'ref_llm', 'visual_encoder')
_ADAPTERS = {'lora': 'llm', 'llm_lora': 'llm', 'visual_encoder_lora': 'visual_encoder'}


def build_xtuners(meta_model: MetaModel, config: RunConfig, base: str | None, folder: Path | None) -> bool:
    """Build the model that the run's config describes; False if that is none of XTuner's.

    Args:
        meta_model: Gets the model.
        base: Folder or hub name of the base of ``llm``, given by the user.
        folder: Of the checkpoint's config.json, which is not read: the run's config says all of these models.

    Raises:
        ConfigError, BaseModelError: The config lacks what is needed, or a base is not found.
        OptionError: An architecture was given.
    """
    if not _is_xtuners(config.model):
        return False
    model, where = config.model, config.where
    if meta_model.architecture is not None:
        expected = f'no value, since {where} says what was trained'
        raise OptionError('architecture', expected, meta_model.architecture)
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
        require_read(model.get(option), f'model.{option}', where)
        if isinstance(model.get(option), Mapping) and hasattr(module, name):
            lora = transformers_model.lora_config_of(model[option], where)
            setattr(module, name, transformers_model.adapt(getattr(module, name), lora))
    _add_the_rest(module, model, meta_model.stored)
    freeze_parts(module, model)
    return True


def _is_xtuners(model: Mapping[str, Any]) -> bool:
    return isinstance(model.get('llm'), Mapping) and 'pretrained_model_name_or_path' in model['llm']


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
            require_read(value, f'model.{name}.{option}', where)
    unknown = transformers_model.apply_options(config, options)
    if unknown:
        meta_model.notes.append(f'{where}: options of model.{name} that {type(config).__name__} lacks: {some(unknown)}')
    if name != 'visual_encoder':
        meta_model.notes += _enlarge_context(config, model.get('max_position_embeddings'), where)
    return meta_model.built(folder, config, auto_class)


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
