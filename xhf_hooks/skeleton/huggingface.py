"""A transformers model on the meta device, as ``from_pretrained`` builds it from a folder, without the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xhf_hooks.errors import BaseModelError
from xhf_hooks.regular_files import require_regular

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Arguments of ``from_pretrained`` that say how weights are loaded, not what the model is; and what must not come
#: from a config that is anybody's text.
_NOT_OF_THE_CONFIG = ('type', 'pretrained_model_name_or_path', 'auto_map', 'torch_dtype', 'dtype', 'name_or_path')
_NEVER_RECORDED = ('quantization_config', 'architectures', 'use_cache')


def load_config(base: str, *, trust_remote_code: bool, why: str) -> PretrainedConfig:
    """The config of the model at ``base``, a folder or a name in the local hub cache; never from the network.

    Args:
        why: What names the base, for the message.

    Raises:
        BaseModelError: It is not there, or needs code that is not trusted.
    """
    from transformers import AutoConfig

    try:
        require_regular(base)
        return AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # a config.json is anyone's data: whatever its class raises, it cannot be used
        first_line = (str(error).splitlines() or [''])[0][:200]
        remedy = 'name the folder of the model that training started from with --base'
        if 'trust_remote_code' in str(error):
            remedy = 'if you trust that code, add --trust-remote-code'
        raise BaseModelError(f'{base} ({why}): no usable config.json ({first_line}); {remedy}') from None


def apply_options(config: PretrainedConfig, options: Mapping[str, Any]) -> None:
    """Further arguments of ``from_pretrained`` that are fields of the config, as ``rope_scaling``."""
    for name, value in options.items():
        known = hasattr(config, name) and not name.startswith('_')
        is_plain = isinstance(value, (str, int, float, bool, dict, list, type(None)))
        if known and is_plain and name not in (*_NOT_OF_THE_CONFIG, *_NEVER_RECORDED):
            setattr(config, name, value)


def build(config: PretrainedConfig, auto_class: str | None, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model without memory.

    Args:
        auto_class: Such as ``'AutoModelForCausalLM'``, or a class of transformers; None takes the config's
            ``architectures``.

    Raises:
        BaseModelError: transformers does not know it.
    """
    import transformers

    name = auto_class or next(iter(getattr(config, 'architectures', None) or ()), None)
    kind = None if name is None or not name.isidentifier() else getattr(transformers, name, None)
    remote = trust_remote_code and getattr(config, 'auto_map', None)
    if kind is None and not remote:
        raise BaseModelError(
            f'{config._name_or_path}: its config.json names the architecture {name!r}, which transformers '
            f'{transformers.__version__} does not have; set architectures, or use the version that trained it'
        )
    with torch.device('meta'):
        if kind is None:
            model = _remote_model(config)
        elif hasattr(kind, 'from_config'):
            model = kind.from_config(config, **({'trust_remote_code': True} if remote else {}))
        else:
            model = kind(config)
    _use_generation_config(model, config._name_or_path)
    return model


def _remote_model(config: PretrainedConfig) -> PreTrainedModel:
    import transformers

    auto = next((name for name in config.auto_map if name.startswith('AutoModel')), 'AutoModel')
    return getattr(transformers, auto).from_config(config, trust_remote_code=True)


def _use_generation_config(model: PreTrainedModel, base: str) -> None:
    """As ``from_pretrained`` does for models that generate."""
    from transformers import GenerationConfig

    if not model.can_generate() or not (Path(base).is_dir() and (Path(base) / 'generation_config.json').is_file()):
        return
    model.generation_config = GenerationConfig.from_pretrained(base, local_files_only=True)
