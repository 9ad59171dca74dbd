"""peft adapters on a meta model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xhf_hooks.errors import ConfigError
from xhf_hooks.meta_model.transformers_model import in_one_line

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel


def lora_config_of(options: Mapping[str, Any], where: str) -> PeftConfig:
    """peft's LoraConfig from the options in a run's config.

    Raises:
        ConfigError: It is another kind of adapter, or has an option that peft does not have.
    """
    from peft import LoraConfig

    kind = str(options.get('type', ''))
    if kind.rpartition('.')[2] != 'LoraConfig':
        raise ConfigError(f'{where}: lora has type {kind or "none"}; only LoraConfig can be converted')
    given = {name: value for name, value in options.items() if name != 'type'}
    unknown = sorted(given.keys() - inspect.signature(LoraConfig).parameters.keys())
    if unknown:
        raise ConfigError(f'{where}: peft has no LoraConfig option {unknown}; install the version that trained it')
    try:
        return LoraConfig(**given)
    except Exception as error:  # peft's classes may raise anything
        raise ConfigError(f'{where}: peft refuses the options of lora ({in_one_line(error)})') from None


def adapter_config_in(folder: Path) -> PeftConfig:
    """Read the ``adapter_config.json`` in a folder.

    Raises:
        ConfigError: peft cannot read it.
    """
    from peft import LoraConfig, PeftConfig

    try:
        found = PeftConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ConfigError(f'{folder}/adapter_config.json: peft cannot read it ({in_one_line(error)})') from None
    if not isinstance(found, LoraConfig):
        kind = str(found.peft_type).rpartition('.')[2][:40]
        raise ConfigError(f'{folder}/adapter_config.json: peft_type is {kind!r}; only LORA can be converted')
    return found


def adapt(model: PreTrainedModel, lora: PeftConfig) -> PeftModel:
    """Add an untrained adapter to ``model``.

    Without ``target_modules``, all linear layers but the head are adapted, as in XTuner (``find_all_linear_names`` in
    ``model/utils.py``).

    Raises:
        ConfigError: peft cannot adapt this model as configured.
    """
    from peft import get_peft_model

    wanted = copy.copy(lora)
    wanted.inference_mode = False
    if getattr(wanted, 'megatron_config', None) is not None:
        wanted.megatron_config = None  # else peft imports the module that megatron_core names
    if wanted.target_modules is None:
        wanted.target_modules = _all_linear_names(model)
    initialised = wanted.init_lora_weights
    wanted.init_lora_weights = False  # there are no weights to initialise or decompose
    try:
        with torch.device('meta'):
            adapted = get_peft_model(model, wanted)
    except Exception as error:
        raise ConfigError(f'peft cannot adapt a {type(model).__name__} as configured ({in_one_line(error)})') from None
    for config in adapted.peft_config.values():
        config.init_lora_weights = initialised
    return adapted


def _all_linear_names(model: nn.Module) -> set[str]:
    found = {name.rpartition('.')[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return found - {'lm_head', 'output_layer'}
